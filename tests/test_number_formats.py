"""Formats by formula against what torch knows of them and against its casts, bit by bit where there are few bits."""

import math

import pytest
import torch

from labs.parts.precision import number_formats as nf

WITH_DTYPE = [name for name, f in nf.FORMATS.items() if f.dtype is not None]
MANY = torch.cat(
    [torch.randn(20_000, generator=torch.Generator().manual_seed(1)) * 2.0**e for e in (-140, -40, -24, -14, 0, 8, 16)]
)


def every_value(dtype):
    """All positive finite numbers of a format of 8 or 16 bits, float64, sorted."""
    bits = torch.arange(2**7, dtype=torch.uint8) if dtype.itemsize == 1 else torch.arange(2**15, dtype=torch.int16)
    values = bits.view(dtype).double()
    return values[values.isfinite()].sort().values


@pytest.mark.parametrize("name", WITH_DTYPE)
def test_ranges_are_those_of_torch(name):
    f, info = nf.FORMATS[name], torch.finfo(nf.FORMATS[name].dtype)
    assert (f.storage_bits, f.largest, f.smallest_normal, f.spacing_at_1) == (
        info.bits,
        info.max,
        info.smallest_normal,
        info.eps,
    )
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


@pytest.mark.parametrize("name", WITH_DTYPE)
def test_rounding_is_the_cast_bit_for_bit(name):
    dtype = nf.FORMATS[name].dtype
    edges = torch.tensor(
        [
            0.0,
            -0.0,
            1.0,
            464.0,
            465.0,
            480.0,
            65504.0,
            65519.0,
            65520.0,
            -65520.0,
            math.inf,
            -math.inf,
            math.nan,
            2**-25,
            1.5 * 2**-25,
            3 * 2**-25,
            57344.0,
            61440.0,
        ]
    )
    for x in (MANY, edges):
        # Beyond the largest FP8 number torch's versions differ: the standard leaves the choice.
        x = x if nf.FORMATS[name].infinity else x[x.abs() <= nf.FORMATS[name].largest]
        assert torch.equal(nf.round_to(x, name).nan_to_num(7e30), x.to(dtype).float().nan_to_num(7e30))


def test_e4m3_saturates_since_it_has_no_infinity():
    found = nf.round_to(torch.tensor([449.0, 464.0, 465.0, 1e9, -math.inf, math.nan]), "fp8 e4m3")
    assert found[:5].tolist() == [448.0, 448.0, 448.0, 448.0, -448.0] and found[5].isnan()


def test_halves_go_to_the_even_neighbour_in_every_format():
    for name, f in nf.FORMATS.items():
        half, one_and_half = 1 + f.spacing_at_1 / 2, 1 + 1.5 * f.spacing_at_1
        found = nf.round_to(torch.tensor([half, one_and_half], dtype=torch.float64), name)
        assert found.tolist() == [1.0, 1 + 2 * f.spacing_at_1], name


def test_tf32_is_fp32_without_its_last_13_bits():
    bits = MANY.view(torch.int32)
    masked = ((bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF).view(torch.float32)  # to nearest, halves to even
    assert torch.equal(nf.round_to(MANY, "tf32"), masked)


@pytest.mark.parametrize("name", nf.FORMATS)
def test_the_relative_error_is_at_most_half_a_spacing(name):
    f = nf.FORMATS[name]
    x = MANY[(MANY.abs() >= f.smallest_normal) & (MANY.abs() <= f.largest)]
    found = nf.relative_error(x, name)
    assert len(x) > 1000 and found.max() <= f.spacing_at_1 / 2
    assert found.max() > f.spacing_at_1 / 4 or name == "fp32"


def test_what_is_lost_has_error_1_and_zero_has_none():
    assert nf.relative_error(torch.tensor([1e-8, 0.0, 1.0]), "fp16").tolist() == [1.0, 0.0, 0.0]
    assert 0 < nf.relative_error(torch.tensor([1e-8]), "bf16").item() < 2**-8


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


def test_an_unknown_format_is_one_line():
    with pytest.raises(ValueError, match="there is no format 'fp4': take one of fp32"):
        nf.round_to(torch.ones(1), "fp4")
