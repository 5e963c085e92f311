"""Figures: labels, provenance, alternative text, size."""

from __future__ import annotations

import html
import io
import re
import warnings
from dataclasses import replace

import pytest
from PIL import Image

from labs.kit import plot
from labs.kit.record import Record, Records, provenance_line

HERE = {"cpu": "Xeon 8481C", "cores": 8, "gpus": [], "torch": "2.13.0", "utc": "2026-11-21T10:00:00+00:00"}


def record(kind="measured", samples=(1.0,), **provenance) -> Record:
    return Record("ddp", "speed_up", "x", samples, kind, layout={"world_size": 2}, provenance=HERE | provenance)


RUN = Records([record(), record("recorded", utc="2026-10-01T00:00:00+00:00")])


def figure():
    return plot.figure("Two ranks halve a step", xlabel="ranks", ylabel="speed-up (x)", records=RUN)


@pytest.mark.parametrize(
    ("records", "line"),
    [
        ([record()], "measured here on Xeon 8481C, 2 of 8 cores, torch 2.13.0, 2026-11-21 UTC"),
        (
            [record(), record(utc="2026-11-21T23:00:00+00:00")],
            "measured here on Xeon 8481C, 2 of 8 cores, torch 2.13.0, 2026-11-21 UTC",
        ),
        (
            [record("recorded", gpus=["H200", "H200"], utc="2026-10-01T00")],
            "recorded on 2 x H200, torch 2.13.0, 2026-10-01 UTC",
        ),
        ([record(cores=1)], "measured here on Xeon 8481C, 2 ranks sharing 1 core, torch 2.13.0, 2026-11-21 UTC"),
        ([replace(record(), layout={})], "measured here on Xeon 8481C, 8 cores, torch 2.13.0, 2026-11-21 UTC"),
        # DataLoader workers beside one rank, which may run on every logical CPU of the 8 cores
        (
            [replace(record(), layout={"world_size": 1, "cores": 16})],
            "measured here on Xeon 8481C, 8 of 8 cores, torch 2.13.0, 2026-11-21 UTC",
        ),
        ([record("published", source="Goyal 2017")], "published: Goyal 2017"),
        (
            [record("modelled"), record("published", source="Goyal 2017")],
            "modelled by this course; published: Goyal 2017",
        ),
        ([], ""),
    ],
)
def test_provenance_line(records, line):
    assert provenance_line(records) == line


def test_a_busy_figure_stays_small_and_whole():
    fig, ax = figure()
    n = list(range(1, 9))
    for i in range(6):
        ax.errorbar(n, [v * (1 - i / 9) for v in n], yerr=0.2, fmt="o-", label=f"model {i}")
    plot.legend_below(fig, ax)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # constrained layout warns when it gives up
        png = plot.to_png(fig)
    assert len(png) <= plot.MAX_PNG_BYTES
    picture = Image.open(io.BytesIO(png)).convert("L")
    assert picture.width == 7.0 * plot.DPI  # inches x dots per inch: the whole width, nothing cropped
    edge = [picture.getpixel((x, y)) for x in (0, picture.width - 1) for y in range(picture.height)]
    assert min(edge) > 200, "something is cut off at the left or right edge"


def test_a_picture_has_its_alternative_text_provenance_and_size():
    fig, ax = figure()
    ax.plot([1, 2], [1.0, 1.8])
    alt = 'Speed-up of "DDP" < 2, against ranks.'
    size = 'width="560" height="312" style="[^"]*"'
    form = rf'<img alt="([^"]*)" title="([^"]*)" {size} src="data:image/png;base64,[\w+/=]+">'
    found = re.fullmatch(form, plot.picture_markup(fig, alt))
    assert [html.unescape(text) for text in found.groups()] == [alt, provenance_line(RUN)]
