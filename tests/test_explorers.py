"""Figures with knobs: every setting can be drawn, the sentences are right, a page without a kernel has the default."""

from __future__ import annotations

import importlib
import math
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jupyter_client.manager import start_new_kernel
from matplotlib.backends.backend_agg import FigureCanvasAgg
from speeds import besides

from labs.explorers import controls as explore
from labs.explorers import exchange, loader, roofline, scale, split
from labs.kit import hardware, plot
from labs.kit.errors import BadInput
from labs.kit.notebook_report import html_pictures

EXPLORERS = {
    "roofline": roofline.roofline,
    "loader": loader.loader,
    "split": split.split,
    "exchange": exchange.exchange,
    "scale": scale.scale,
}


def opened(cell, *args, **kwargs):
    """(draw, controls) of what a notebook's cell calls."""
    found = []
    module = importlib.import_module(cell.__module__)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "explore", lambda draw, **controls: found.append((draw, controls)))
        cell(*args, **kwargs)
    return found[0]


OPENED = {name: opened(cell) for name, cell in EXPLORERS.items()}


def defaults(name):
    return {key: control.default for key, control in OPENED[name][1].items()}


def drawn(name, **values):
    return OPENED[name][0](**{**defaults(name), **values})


@pytest.mark.parametrize("name", besides(("roofline",), EXPLORERS))
@settings(max_examples=3, deadline=None)
@given(data=st.data())
def test_every_setting_can_be_drawn_and_read(name, data):
    draw, controls = OPENED[name]
    values = {key: data.draw(st.sampled_from(list(c.values)), label=key) for key, c in controls.items()}
    try:
        fig, alt, sentence = draw(**values)
    except BadInput as e:  # the only thing that cannot be drawn: a peak that no datasheet states
        spec, wanted = hardware.spec(values["card"]), values["number_format"].lower()
        assert name == "roofline" and spec.tflops(wanted) is None and "no sourced" in str(e)
        return
    (ax,) = fig.axes
    for (low, high), numbers in ((ax.get_xlim(), "get_xdata"), (ax.get_ylim(), "get_ydata")):
        low, high = sorted((low, high))
        assert math.isfinite(low) and math.isfinite(high) and low < high
        assert all(math.isfinite(v) for line in ax.lines for v in getattr(line, numbers)())
        knobs = [line for line in ax.lines if line.get_marker() == "X"]
        assert all(low <= v <= high for line in knobs for v in getattr(line, numbers)()), "the knobs' point is outside"
    assert ax.get_xlabel() and ax.get_ylabel() and sentence.strip() == sentence and sentence.endswith(".")
    assert "nan" not in f"{alt} {sentence}" and not re.search(r"\binf\b", f"{alt} {sentence}")
    plot.to_png(fig)
    assert fig._course_caption.startswith("modelled")
    title = fig._suptitle.get_window_extent(FigureCanvasAgg(fig).get_renderer())
    assert title.x0 >= 0 and title.x1 <= fig.bbox.x1, "the title is cut"


# -- what the sentences say


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"params": 7e9, "gpus": 8, "card": "A100 80GB SXM"}, "Fastest that fits: FSDP2"),
        ({"params": 1e8, "gpus": 1, "card": "H100 SXM", "batch": 8}, "Fastest that fits: one GPU"),
        ({"params": 7e10, "gpus": 1, "card": "T4"}, "No plan keeps 10% of the memory free"),
    ],
)
def test_a_split_is_the_advice_of_labs_strategy(values, words):
    _, alt, sentence = drawn("split", **values)
    assert words in sentence and f"{values['gpus']} x {values['card']}" in alt


@pytest.mark.parametrize(("ridge", "itemsize", "rows"), [(295.3, 2, 345), (20.0, 4, 41)])
def test_a_layer_is_compute_bound_from_the_batch_whose_intensity_is_the_ridge(ridge, itemsize, rows):
    """By hand for an H100: 2 B n / (s (n + 2 B)) = ridge with n = 4,096."""
    first = roofline.first_compute_bound(ridge, 4096, itemsize)
    assert round(first) == rows and roofline.intensity(first, 4096, itemsize) == pytest.approx(ridge)
    assert roofline.first_compute_bound(300.0, 256, 2) == math.inf


# -- the page


class Page:
    """What is displayed, in place of a notebook."""

    def __init__(self, monkeypatch, live=True):
        self.shown, self.boxes, knobs = [], [], explore.knobs
        monkeypatch.setattr(explore, "is_live", lambda: live)
        monkeypatch.setattr("IPython.display.display", lambda data, **how: self.shown.append((data, how)))
        monkeypatch.setattr(explore, "knobs", lambda *args: self.boxes.append(knobs(*args)) or self.boxes[-1])

    @property
    def last(self):
        return self.shown[-1][0]


def test_a_moved_knob_draws_the_same_picture_anew(monkeypatch):
    name = "roofline"
    page = Page(monkeypatch)
    EXPLORERS[name]()
    (controls, _), (before, how) = page.shown
    assert controls["application/vnd.jupyter.widget-view+json"]["model_id"] == page.boxes[0].model_id
    for widget, (key, control) in zip(page.boxes[0].children, OPENED[name][1].items(), strict=True):
        assert widget.description == control.label and widget.value == control.default
        other = next(v for v in control.values if v != control.default)
        widget.value = other
        assert page.shown[-1][1] == {"raw": True, "display_id": how["display_id"], "update": True}
        assert page.last["text/plain"].split("]\n")[1] == drawn(name, **{key: other})[2]
        widget.value = control.default
    assert page.last["text/plain"] == before["text/plain"]


def test_what_cannot_be_drawn_is_said_in_place_of_the_picture(monkeypatch):
    page = Page(monkeypatch)
    roofline.roofline()
    card, number_format, *_ = page.boxes[0].children
    card.value = "T4"
    assert page.last == {"text/plain": "no sourced BF16 peak of a T4: choose another format"}
    number_format.value = "FP16"
    assert html_pictures(page.last["text/html"])


CELL = "from labs.explorers import roofline\nroofline.roofline()"


@pytest.fixture(scope="module")
def kernel():
    manager, client = start_new_kernel()
    yield client
    client.stop_channels()
    manager.shutdown_kernel(now=True)


def outputs(client, allow_stdin):
    found = []
    client.execute_interactive(CELL, allow_stdin=allow_stdin, timeout=250, output_hook=found.append)
    assert not [m for m in found if m["msg_type"] == "error"]
    return [m["content"]["data"] for m in found if m["msg_type"] == "display_data"]


def test_only_a_page_that_somebody_sits_at_gets_knobs(kernel):
    """As nbconvert, nbval and papermill run a cell; and as JupyterLab does."""
    (first,) = outputs(kernel, False)
    assert set(first) == {"text/html", "text/plain"} and html_pictures(first["text/html"])
    knobs, picture = outputs(kernel, True)
    assert set(knobs) == {"application/vnd.jupyter.widget-view+json", "text/plain"}
    assert picture["text/plain"] == first["text/plain"]
