"""Figures: marks by kind, labels, provenance, alternative text, size."""

from __future__ import annotations

import html
import io
import math
import re
import warnings
from dataclasses import replace

import pytest
from PIL import Image

from labs.kit import plot
from labs.kit.check import predict
from labs.kit.errors import BadInput
from labs.kit.measure import Estimate
from labs.kit.plot import KIND_STYLE
from labs.kit.record import Record, Records, provenance_line

HERE = {"cpu": "Xeon 8481C", "cores": 8, "gpus": [], "torch": "2.13.0", "utc": "2026-11-21T10:00:00+00:00"}


def record(kind="measured", samples=(1.0,), **provenance) -> Record:
    return Record("ddp", "speed_up", "x", samples, kind, layout={"world_size": 2}, provenance=HERE | provenance)


RUN = Records([record(), record("recorded", utc="2026-10-01T00:00:00+00:00")])


def figure(**kwargs):
    return plot.figure("Two ranks halve a step", xlabel="ranks", ylabel="speed-up (x)", records=RUN, **kwargs)


def drawn(ax, kind):
    return next(line for line in ax.lines if line.get_gid() == f"kind:{kind}")


def test_intervals_are_drawn_and_missing_values_left_out():
    _, ax = figure()
    plot.points(ax, [1, 2, 3, 4], [Estimate(1.0, 0.9, 1.2, 9), None, math.nan, 2.0])
    assert list(drawn(ax, "measured").get_xdata()) == [1, 4]
    (bars,) = ax.collections
    assert [seg[:, 1].tolist() for seg in bars.get_segments()] == [[0.9, 1.2], [2.0, 2.0]]


def test_the_prediction_is_a_star_and_no_prediction_is_nothing():
    _, ax = figure()
    plot.prediction(ax, 2, predict(None, "speed-up"))
    assert not ax.lines
    plot.prediction(ax, 2, predict(1.9, "speed-up"))
    assert drawn(ax, "prediction").get_ydata().tolist() == [1.9]


@pytest.mark.parametrize("kind", ["measured", "recorded"])
def test_a_figure_of_measurements_without_their_records_is_refused(kind):
    fig, ax = plot.figure("message", xlabel="ranks", ylabel="speed-up (x)")
    plot.points(ax, [1], [1.0], kind=kind)
    with pytest.raises(BadInput, match=f"{kind} numbers.*records="):
        plot.to_png(fig)


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


def busy_figure():
    fig, ax = figure()
    n = list(range(1, 9))
    for i in range(4):
        values = [Estimate(v * (1 - i / 9), v * 0.8, v, 9) for v in n]
        plot.points(ax, n, values, label=f"model {i}", line=True)
    plot.points(ax, n, n, kind="published", label="article")
    plot.points(ax, n, n, kind="recorded", label="H200")
    plot.ideal(ax, n)
    plot.prediction(ax, 3, 2.0)
    return fig, ax


def test_a_busy_figure_stays_small_and_whole():
    fig, ax = busy_figure()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # constrained layout warns when it gives up
        png = plot.to_png(fig)
    assert len(png) <= plot.MAX_PNG_BYTES
    picture = Image.open(io.BytesIO(png)).convert("L")
    assert picture.width == 7.0 * plot.DPI  # inches x dots per inch: the whole width, nothing cropped
    edge = [picture.getpixel((x, y)) for x in (0, picture.width - 1) for y in range(picture.height)]
    assert min(edge) > 200, "something is cut off at the left or right edge"
    words = ax.get_legend().get_texts()
    assert len(words) == 8 and all(any(m.word in t.get_text() for m in KIND_STYLE.values()) for t in words)


def test_show_sends_an_image_with_alternative_text(monkeypatch):
    sent = []
    monkeypatch.setattr("IPython.display.display", lambda data, raw: sent.append(data))
    fig, ax = figure()
    plot.points(ax, [1, 2], [1.0, 1.8])
    plot.show(fig, alt='Speed-up of "DDP" < 2,\n  against ranks.')
    alt = 'Speed-up of "DDP" < 2, against ranks.'
    assert sent[0]["text/plain"] == f"[Figure: {alt}]"
    size = 'width="560" height="312" style="[^"]*"'
    form = rf'<img alt="([^"]*)" title="([^"]*)" {size} src="data:image/png;base64,[\w+/=]+">'
    found = re.fullmatch(form, sent[0]["text/html"])
    assert [html.unescape(text) for text in found.groups()] == [alt, fig._course_caption]
