"""Figures: marks by kind, labels, provenance, alternative text, size."""

from __future__ import annotations

import html
import io
import math
import re
import warnings
from dataclasses import replace

import pandas
import pytest
from matplotlib.colors import to_rgb
from PIL import Image

from labs.kit import plot
from labs.kit.check import predict
from labs.kit.display import show_table
from labs.kit.errors import BadInput
from labs.kit.measure import Estimate
from labs.kit.plot import KIND_STYLE
from labs.kit.record import KINDS, Record, Records, provenance_line

HERE = {"cpu": "Xeon 8481C", "cores": 8, "gpus": [], "torch": "2.13.0", "utc": "2026-11-21T10:00:00+00:00"}


def record(kind="measured", samples=(1.0,), **provenance) -> Record:
    return Record("ddp", "speed_up", "x", samples, kind, layout={"world_size": 2}, provenance=HERE | provenance)


RUN = Records([record(), record("recorded", utc="2026-10-01T00:00:00+00:00")])


def figure(**kwargs):
    return plot.figure("Two ranks halve a step", xlabel="ranks", ylabel="speed-up (x)", records=RUN, **kwargs)


def drawn(ax, kind):
    return next(line for line in ax.lines if line.get_gid() == f"kind:{kind}")


def test_every_kind_has_a_look_of_its_own():
    looks = {(m.marker, m.filled, m.line if m.marker is None else "") for m in KIND_STYLE.values()}
    assert len(looks) == len(KIND_STYLE) and set(KINDS) | {"prediction"} == set(KIND_STYLE)


@pytest.mark.parametrize(
    ("kind", "marker", "filled"),
    [("measured", "o", True), ("recorded", "s", True), ("published", "D", False), ("prediction", "*", True)],
)
def test_marks_follow_the_kind(kind, marker, filled):
    _, ax = figure()
    plot.points(ax, [1, 2], [1.0, 1.8], kind=kind, label="DDP")
    line = drawn(ax, kind)
    assert line.get_marker() == marker
    assert (line.get_markerfacecolor() != "white") is filled
    assert KIND_STYLE[kind].word in ax.get_legend_handles_labels()[1][0]


def test_a_model_is_a_dashed_line():
    _, ax = figure()
    plot.ideal(ax, [1, 2, 4])
    assert drawn(ax, "modelled").get_linestyle() == "--"
    assert list(drawn(ax, "modelled").get_ydata()) == [1, 2, 4]


def test_intervals_are_drawn_and_missing_values_left_out():
    _, ax = figure()
    plot.points(ax, [1, 2, 3, 4], [Estimate(1.0, 0.9, 1.2, 9), None, math.nan, 2.0])
    assert list(drawn(ax, "measured").get_xdata()) == [1, 4]
    (bars,) = ax.collections
    assert [seg[:, 1].tolist() for seg in bars.get_segments()] == [[0.9, 1.2], [2.0, 2.0]]


def test_a_record_is_drawn_as_its_median_with_interval():
    _, ax = figure()
    plot.points(ax, [1], [record(samples=[1.0, 2.0, 3.0, 4.0, 5.0])])
    assert drawn(ax, "measured").get_ydata().tolist() == [3.0]
    (low, high) = ax.collections[0].get_segments()[0][:, 1]
    assert low < 3.0 < high


def test_the_prediction_is_a_star_and_no_prediction_is_nothing():
    _, ax = figure()
    plot.prediction(ax, 2, predict(None, "speed-up"))
    assert not ax.lines
    plot.prediction(ax, 2, predict(1.9, "speed-up"))
    assert drawn(ax, "prediction").get_ydata().tolist() == [1.9]


def test_unknown_kinds_and_missing_words_are_one_clear_line():
    _, ax = figure()
    with pytest.raises(BadInput, match="measured, recorded, modelled, published, prediction"):
        plot.points(ax, [1], [1.0], kind="guessed")
    with pytest.raises(BadInput, match="message"):
        plot.figure(" ", xlabel="x", ylabel="y")
    with pytest.raises(BadInput, match="label with a unit"):
        plot.figure("message", xlabel="x", ylabel="")
    with pytest.raises(BadInput, match="alt="):
        plot.show(figure()[0], alt="")


@pytest.mark.parametrize("kind", ["measured", "recorded"])
def test_a_figure_of_measurements_without_their_records_is_refused(kind):
    fig, ax = plot.figure("message", xlabel="ranks", ylabel="speed-up (x)")
    plot.points(ax, [1], [1.0], kind=kind)
    with pytest.raises(BadInput, match=f"{kind} numbers.*records="):
        plot.to_png(fig)


def test_a_figure_of_models_needs_no_records():
    fig, ax = plot.figure("message", xlabel="ranks", ylabel="speed-up (x)")
    plot.ideal(ax, [1, 2])
    plot.to_png(fig)
    assert fig.get_supxlabel() == "modelled by this course"


def test_a_long_source_stays_inside_the_figure():
    """Wide letters, as in addresses: a line of so many characters need not be a line of so many points."""
    fig, ax = plot.figure(
        "message",
        xlabel="GPUs",
        ylabel="GB/s",
        records=[
            record(
                "published", source="github.com/MOMMOMMOM/WWWWWWWW at c53741b8, NETWORK/BENCHMARKS/8xH200.md: GWMWGW"
            )
        ],
    )
    plot.points(ax, [1], [1.0], kind="published")
    plot.to_png(fig)
    [line] = [text for text in fig.texts if text.get_text() == fig.get_supxlabel()]
    assert line.get_window_extent().x1 < fig.bbox.x1 and "\n" in line.get_text()


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


def test_what_ran_on_cores_is_not_of_the_gpus_of_its_machine():
    one = record(gpus=[{"name": "H200"}] * 8)
    on_cores = replace(one, layout={"world_size": 2, "device": "cpu"})
    assert " on 2 of 8 x H200," in provenance_line([replace(one, layout={"world_size": 2, "device": "cuda"})])
    assert " on 8 x H200," in provenance_line([replace(one, layout={"world_size": 8, "device": "cuda"})])
    assert provenance_line([on_cores]) == provenance_line([record()])


@pytest.mark.parametrize("words", ["Mostly WIDE letters", "one two three", "The loop reports 6% of what a step takes,"])
def test_a_title_fits_its_picture_and_leaves_no_word_alone(words):
    for n in range(1, 6):
        fig, _ = plot.figure(" ".join([words] * n + ["1.92"]), xlabel="a", ylabel="b", size=(6.6, 4.2))
        fig.draw_without_rendering()
        assert fig._suptitle.get_window_extent().x1 < fig.bbox.x1
        lines = fig._suptitle.get_text().split("\n")
        assert min(map(len, lines)) > max(map(len, lines)) / 2, lines


def test_heat_map_prints_every_value_legibly():
    fig, ax = figure()
    values = [[0.5, 1.0], [1.5, math.nan]]
    plot.heat_map(ax, values, columns=[8, 64], rows=["small", "large"], center=1.0, label="speed-up (x)")
    assert [t.get_text() for t in ax.texts] == ["0.50", "1.00", "1.50"]
    image = ax.images[0]
    for text, value in zip(ax.texts, (0.5, 1.0, 1.5), strict=True):
        assert contrast(image.cmap(image.norm(value))[:3], text.get_color()) >= 4.5  # WCAG 2.1, level AA
    assert len(plot.to_png(fig)) <= plot.MAX_PNG_BYTES
    with pytest.raises(BadInput, match="at least one number"):
        plot.heat_map(ax, [[math.nan]], columns=[1], rows=[1])


def contrast(rgb, name) -> float:
    def luminance(color):
        linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in color]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    a, b = sorted([luminance(rgb), 1.0 if name == "white" else 0.0])
    return (b + 0.05) / (a + 0.05)


def test_log_axes_have_plain_numbers():
    fig, ax = figure()
    plot.points(ax, [1, 1024, 2_000_000], [0.25, 1.0, 4.0])
    plot.log_axes(ax, x=[1, 1024, 2_000_000], y=[0.25, 1, 4])
    fig.draw_without_rendering()
    assert [t.get_text() for t in ax.get_xticklabels()] == ["1", "1,024", "2M"]
    assert [t.get_text() for t in ax.get_yticklabels()] == ["0.25", "1", "4"]
    assert [plot.plain_number(v) for v in (0, 131_072, 2.5e6, 1.5e9)] == ["0", "131,072", "2.5M", "1.5G"]


def test_bars_name_their_rows_and_show_intervals():
    fig, ax = figure()
    plot.bars(ax, ["none", "no warm-up"], [Estimate(10, 9, 11, 5), None], label="step")
    assert [t.get_text() for t in ax.get_yticklabels()] == ["none", "no warm-up"]
    assert drawn(ax, "measured").get_xdata().tolist() == [10]
    assert ax.get_legend_handles_labels()[1] == ["step (measured)"]
    plot.to_png(fig)


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


def test_figures_are_not_kept_by_pyplot():
    import sys

    busy_figure()
    assert "matplotlib.pyplot" not in sys.modules or not sys.modules["matplotlib.pyplot"].get_fignums()


def test_colours_that_few_pixels_have_survive_the_palette():
    fig, ax = plot.figure("Every mark keeps its colour", xlabel="x (s)", ylabel="y (x)", records=[record()])
    for x, color in enumerate(plot.SERIES):
        plot.points(ax, [x], [1.0], color=color)
    shown = {c for _, c in Image.open(io.BytesIO(plot.to_png(fig))).convert("RGB").getcolors(10**6)}
    for color in plot.SERIES:
        distance = min(max(abs(a / 255 - b) for a, b in zip(c, to_rgb(color), strict=True)) for c in shown)
        assert distance < 0.15, color


def test_a_timeline_is_drawn_with_its_kind():
    fig, ax = figure()
    plot.spans(ax, 0, [(0.0, 1.0), (2.0, 2.5)], label="loads")
    plot.spans(ax, 1, [(0.5, 1.5)], label="trains")
    assert plot.kinds_in(fig) == {"measured"}
    boxes = [path.get_extents() for path in ax.collections[0].get_paths()]
    assert [(b.x0, b.x1) for b in boxes] == [(0.0, 1.0), (2.0, 2.5)] and boxes[0].y0 < 0 < boxes[0].y1
    assert plot.to_png(fig).startswith(b"\x89PNG")
    assert [t.get_text() for t in ax.get_legend().get_texts()] == ["loads (measured)", "trains (measured)"]


def test_stacked_areas_end_at_the_total():
    fig, ax = plot.figure("Activations rule", xlabel="operation", ylabel="memory (GB)")
    plot.stack(ax, [0, 1, 2], {"parameters": [1, 1, 1], "activations": [0, 2, 1]}, kind="modelled")
    tops = [max(v for _, v in path.vertices) for c in ax.collections for path in c.get_paths()]
    assert tops == [1, 3] and plot.kinds_in(fig) == {"modelled"}
    labels = ax.get_legend_handles_labels()[1]
    assert labels == ["parameters (modelled)", "activations (modelled)"]


def test_a_choice_map_has_one_colour_per_name_and_refuses_names_without():
    fig, ax = plot.figure("Data parallel, mostly", xlabel="batch", ylabel="parameters")
    colors = {"DDP": plot.SERIES[0], "nothing fits": plot.GREY}
    plot.choice_map(ax, [["DDP", "nothing fits"], ["DDP", "DDP"]], columns=[1, 2], rows=["small", "big"], colors=colors)
    assert ax.images[0].get_array().tolist() == [[0, 1], [0, 0]] and plot.kinds_in(fig) == {"modelled"}
    assert ax.get_legend_handles_labels()[1] == ["DDP (modelled)", "nothing fits (modelled)"]
    with pytest.raises(BadInput, match="a color for pipeline"):
        plot.choice_map(ax, [["pipeline"]], columns=[1], rows=[1], colors=colors)


def test_a_shown_table_has_words_to_the_left_and_numbers_to_the_right(monkeypatch):
    shown = []
    monkeypatch.setattr("IPython.display.display", lambda data, raw: shown.append(data["text/html"]))
    show_table(pandas.DataFrame({"verdict": ["equal", "3"], "bytes": [12, 7]}, index=["a", "b"]))
    assert shown[0].count('<td style="text-align:left">') == 2 and shown[0].count("<td>") == 2
    assert '<td style="text-align:left">3</td>' in shown[0] and "\n" not in shown[0].strip()
