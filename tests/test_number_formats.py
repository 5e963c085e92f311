"""Formats by formula against what torch knows of them, number by number where there are few bits."""

import math

import pytest
import torch

from labs.amp_training import number_formats as nf

WITH_DTYPE = [name for name, f in nf.FORMATS.items() if f.dtype is not None]


def every_value(dtype):
    """All positive finite numbers of a format of 8 or 16 bits, float64, sorted."""
    bits = torch.arange(2**7, dtype=torch.uint8) if dtype.itemsize == 1 else torch.arange(2**15, dtype=torch.int16)
    values = bits.view(dtype).double()
    return values[values.isfinite()].sort().values


def test_ranges_are_those_of_torch():
    for f in (nf.FORMATS[name] for name in WITH_DTYPE):
        info = torch.finfo(f.dtype)
        found = (f.storage_bits, f.largest, f.smallest_normal, f.spacing_at_1)
        assert found == (info.bits, info.max, info.smallest_normal, info.eps)
        assert f.storage_bits == 1 + f.exponent_bits + f.mantissa_bits


@pytest.mark.parametrize("name", [n for n in WITH_DTYPE if n != "fp32"])
def test_ranges_and_spacings_are_those_of_every_number_there_is(name):
    f, values = nf.FORMATS[name], every_value(nf.FORMATS[name].dtype)
    assert (values[1].item(), values[-1].item()) == (f.smallest_subnormal, f.largest)
    gaps = values[2:] - values[1:-1]
    exponents = torch.frexp(values[1:-1]).exponent - 1
    assert gaps.tolist() == [f.spacing(e) for e in exponents.tolist()]


def test_tf32_has_the_range_of_fp32_and_the_spacing_of_fp16():
    tf32, fp32, fp16 = (nf.FORMATS[n] for n in ("tf32", "fp32", "fp16"))
    assert tf32.smallest_normal == fp32.smallest_normal and tf32.highest_exponent == fp32.highest_exponent
    assert tf32.spacing_at_1 == fp16.spacing_at_1
    assert tf32.largest == (2 - 2**-10) * 2.0**127


def test_spacings_reach_from_the_least_to_the_largest_number():
    found = nf.spacings("fp16")
    assert found[0] == (-24, 2.0**-24) and found[-1] == (15, 2.0**5)
    assert dict(found)[-14] == 2.0**-24 and dict(found)[0] == 2.0**-10
    assert nf.spacings("fp32", first=0, last=1) == [(0, 2.0**-23), (1, 2.0**-22)]
    assert nf.FORMATS["fp16"].spacing(16) == math.inf


def test_the_table_has_a_row_for_each_format():
    rows = nf.table()
    assert [r["format"] for r in rows] == list(nf.FORMATS)
    digits = {r["format"]: round(r["decimal digits"], 1) for r in rows}
    assert (digits["fp32"], digits["fp16"], digits["bf16"]) == (7.2, 3.3, 2.4)
