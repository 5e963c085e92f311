"""Figures with knobs: every setting can be drawn, the sentences are right, a page without a kernel has the default."""

from __future__ import annotations

import gc
import importlib
import itertools
import math
import re
import sys
import weakref

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jupyter_client.manager import start_new_kernel
from matplotlib.backends.backend_agg import FigureCanvasAgg
from speeds import besides

from labs import hardware_probe
from labs.activation_checkpointing.splitting import at_peak
from labs.chapters.nb00 import explorer as nb00
from labs.chapters.nb01 import explorer as nb01
from labs.chapters.nb02 import explorer as nb02
from labs.chapters.nb03 import explorer as nb03
from labs.chapters.nb04 import explorer as nb04
from labs.chapters.nb05 import explorer as nb05
from labs.chapters.nb05.bert_chain import bert_chain, optimizer_step_bytes
from labs.chapters.nb06 import explorer as nb06
from labs.chapters.nb07 import explorer as nb07
from labs.chapters.nb08 import explorer as nb08
from labs.common import oracle
from labs.common.memory.bert_memory import parameter_count, predict
from labs.common.memory.recomputation import segment_bounds
from labs.common.models.large_models import BertShape, bert
from labs.common.timing.roofline import training_step_work
from labs.kit import explore, hardware, plot
from labs.kit.errors import BadInput
from labs.kit.explore import Menu, Slider
from labs.kit.notebook_report import html_pictures
from labs.kit.record import Record, Records
from labs.tune_dataloader import rules

EXPLORERS = {
    "roofline": nb00.roofline,
    "batch": nb01.batch,
    "workers": nb02.workers,
    "speedup": nb03.speedup,
    "memory_formats": nb04.memory,
    "memory_policies": nb05.memory,
    "pipeline": nb06.pipeline,
    "slow_link": nb07.step,
    "scale": nb08.scale,
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


@pytest.mark.parametrize("name", besides(("speedup", "roofline"), EXPLORERS))
@settings(max_examples=4, deadline=None)
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
    assert plot.kinds_in(fig) == {"modelled"}
    plot.to_png(fig)
    assert fig._course_caption.startswith("modelled")
    title = fig._suptitle.get_window_extent(FigureCanvasAgg(fig).get_renderer())
    assert title.x0 >= 0 and title.x1 <= fig.bbox.x1, "the title is cut"


# -- what the sentences say


def numbers(text):
    return [float(n.replace(",", "")) for n in re.findall(r"\d[\d,]*(?:\.\d+)?", text)]


@pytest.mark.parametrize(("card", "number_format"), [("H100 SXM", "BF16"), ("T4", "FP32")])
@pytest.mark.parametrize("name", ["mlp", "cnn", f"layer {nb00.LAYER} x {nb00.LAYER}"])
def test_the_roofline_says_from_which_batch_on_a_model_is_compute_bound(card, number_format, name):
    """Compared with the counts of the very batches below and above, not with the straight line between two others."""
    spec = hardware.spec(card)
    ridge = spec.tflops(number_format.lower()) * 1000 / spec.bandwidth_gb_s
    factory = nb00.models.MODELS.get(name, nb00.layer)
    bytes_of_four = {"BF16": 2, "FP32": 4}[number_format] / 4
    sentence = drawn("roofline", card=card, number_format=number_format, model=name)[2]
    assert f"above {ridge:.1f} FLOP per byte" in sentence
    if "No batch" in sentence:
        work = training_step_work(factory(), 8192)
        assert work.intensity / bytes_of_four < ridge
        return
    least = int(re.search(r"from batch ([\d,]+) on", sentence)[1].replace(",", ""))
    at, below = (training_step_work(factory(), rows) for rows in (least, max(least - 1, 1)))
    assert at.intensity / bytes_of_four > ridge and (least == 1 or below.intensity / bytes_of_four <= ridge)


def test_the_counted_bytes_and_operations_are_straight_lines_over_the_batch():
    work = hardware_probe.predict(hardware_probe.Config(batch_size=48))
    for name in ("mlp", "cnn", "cnn_batchnorm"):
        found = nb00.at_batch(nb00.work_line(nb00.models.MODELS[name]), 48, 4)
        counted = work[f"{name}, 48 rows"]
        assert found.flop == pytest.approx(counted.flop) and found.bytes == pytest.approx(counted.bytes)


def test_a_run_of_ones_own_is_one_more_card_and_a_model_of_ones_own_one_more_model():
    here = {"cpu": "Xeon 8481C", "cores": 8, "gpus": [], "torch": "2.13.0", "utc": "2026-11-21T10:00:00+00:00"}
    run = Records(
        [
            Record("hardware_probe", "matmul_flop_s", "FLOP/s", (9e10, 1e11), case={"dtype": "fp32"}, provenance=here),
            Record("hardware_probe", "memory_b_s", "B/s", (1e10,), provenance=here),
        ]
    )
    draw, controls = opened(nb00.roofline, run, model="mlp")
    fig, _, sentence = draw(**{key: c.default for key, c in controls.items()})
    assert controls["model"].default == "yours" and "compute-bound above 9.5 FLOP per byte" in sentence
    plot.to_png(fig)
    assert "measured here on Xeon 8481C" in fig._course_caption
    with pytest.raises(BadInput, match="there is no model 'nonsense'"):
        nb00.roofline(model="nonsense")


@given(model=st.sampled_from((50, 400, 3200)), one=st.sampled_from((50, 200, 800)), cores=st.sampled_from((1, 4, 16)))
def test_the_workers_that_are_enough_are_those_of_the_tuner(model, one, cores):
    loaders = {w: min(max(w, 1), cores) * one for w in range(nb02.MOST + 1)}
    least = rules.cheapest_expected(model, loaders)
    sentence = drawn("workers", model_rate=model, one_rate=one, cores=cores)[2]
    if "No number" in sentence:
        assert int(numbers(sentence)[-1]) == least
    else:
        assert sentence.endswith(f": {nb02._count(least)} {'is' if least == 1 else 'are'} needed to feed the model.")


def test_the_speed_up_over_a_link():
    link = next(name for name in nb03.links() if name.startswith("PCIe 4"))
    values = {"step_ms": 20, "parameters": 30, "link": link, "latency_us": 20, "ranks": 8}
    # 120 MB of gradients; each rank sends 2 x 7/8 of it at 32 GB/s, in 14 messages of 20 us.
    exchange_ms = 1e3 * (2 * 7 / 8 * 120e6 / 32e9 + 14 * 20e-6)
    _, alt, sentence = drawn("speedup", **values)
    assert f"{8 * 20 / (20 + exchange_ms):.2g} times" in alt and f"{exchange_ms:.3g} ms for an all-reduce" in sentence
    assert f"90% would take {9 * exchange_ms:.2g} ms" in sentence and "Limited by computing" in sentence
    assert "Limited by communication" in drawn("speedup", **values | {"step_ms": 5})[2]


def test_a_link_of_ones_own_gives_back_the_times_it_was_fitted_to():
    sizes, n, latency, rate = (2**12, 2**20, 2**23), 4, 3e-5, 2e9
    times = [nb03.all_reduce_s(size, n, latency, rate) for size in sizes]
    run = Records(
        Record("crossover", "all_reduce_s", "s", (t,), case={"size": s}, layout={"world_size": n})
        for s, t in zip(sizes, times, strict=True)
    )
    assert nb03.own_link(run) == pytest.approx((latency, rate), rel=1e-3)
    draw, controls = opened(nb03.speedup, run)
    assert controls["link"].default == nb03.HERE and draw(**{k: c.default for k, c in controls.items()})


def test_the_memory_that_mixed_precision_saves_and_the_batch_that_fits():
    _, alt, sentence = drawn("memory_formats", batch=8, seq=512, card="RTX 4090", optimizer="SGD")
    full, half = (predict(8, 512, p, optimizer="sgd").total / 1e9 for p in ("fp32", "fp16"))
    assert f"{full:.1f} GB, in mixed precision {half:.1f} ({half / full - 1:+.0%})" in alt
    fits = [int(n) for n in re.search(r"at most (\d+) sequences in FP32, (\d+) sequences", sentence).groups()]
    for most, precision in zip(fits, ("fp32", "fp16"), strict=True):
        at, above = (predict(n, 512, precision, optimizer="sgd").total for n in (most, most + 1))
        assert at <= 24_564 * 2**20 < above  # all that nvidia-smi prints of a card sold as 24 GB


@pytest.mark.parametrize(
    ("count", "precision"),
    [
        (2, "bf16"),
        *(
            pytest.param(*of, marks=pytest.mark.long)
            for of in ((0, "fp32"), (0, "bf16"), (2, "fp32"), (4, "fp32"), (4, "bf16"))
        ),
    ],
)
def test_the_chain_of_a_bert_is_that_of_a_traced_step_but_for_what_lives_for_a_moment(precision, count):
    """The oracle follows every storage of a step; the formula is to be near it, and hardly above.

    What it counts outside of the layers, such as 16-bit copies of the head's weights, may be gone at the peak.
    """
    shape, policy = BertShape(layers=4), {0: "none", 2: "segments:2", 4: "block"}[count]
    for rows, seq in ((32, 128), (8, 512)):
        trace = oracle.step(
            lambda seq=seq: bert(shape, seq), rows, optimizer="adam", precision=precision, policy=policy, target="cuda"
        )
        fullest = dict.fromkeys(("forward", "backward", "optimizer"), 0)
        for event, total in zip(trace.events, trace.timeline(), strict=True):
            if event.phase in fullest:
                fullest[event.phase] = max(fullest[event.phase], total)
        cut = [(a, b, True) for a, b in segment_bounds(4, count)] if count else []
        formula = at_peak(bert_chain(rows, seq, precision, shape), cut).total
        assert 0.9 <= formula / max(fullest["forward"], fullest["backward"]) <= 1.005
        assert optimizer_step_bytes(parameter_count(shape), "adam") == pytest.approx(fullest["optimizer"], rel=1e-3)


@pytest.mark.parametrize(("optimizer", "per_parameter"), [("sgd", 8), ("momentum", 12), ("adam", 20)])
def test_the_optimizers_own_step(optimizer, per_parameter):
    trace = oracle.step("char_gpt", 2, optimizer=optimizer, target="cuda")
    found = max(t for e, t in zip(trace.events, trace.timeline(), strict=True) if e.phase == "optimizer")
    assert optimizer_step_bytes(159_296, optimizer) == 159_296 * per_parameter
    assert found == pytest.approx(159_296 * per_parameter, rel=0.05)  # whole blocks of 512 bytes, and the batch


def test_the_largest_batch_with_layers_computed_again():
    sentence = drawn("memory_policies", seq=128, card="RTX 4090")[2]
    fits = [int(n) for n in numbers(re.search(r"holds: (.*?)\.", sentence)[1].replace("5 segments", ""))]
    assert len(fits) == 3 and fits == sorted(fits)
    for most, count in zip(fits, nb05.POLICIES.values(), strict=True):
        at, above = (sum(nb05.peak(n, 128, "fp32", "adam", count).values()) for n in (most, most + 1))
        assert at <= 24_564 * 2**20 < above  # all that nvidia-smi prints of a card sold as 24 GB


@pytest.mark.parametrize("schedule", nb06.NAMES)
@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 1), (4, 8), (8, 32)])
def test_a_pipeline_of_equal_stages_has_the_bubble_and_no_more(schedule, stages, micro_batches):
    values = {"schedule": schedule, "stages": stages, "micro_batches": micro_batches, "message_ms": 0, "slowest": 1}
    events = nb06.simulate(**values)
    for stage in range(stages):
        own = sorted((e for e in events if e.stage == stage), key=lambda e: e.start_s)
        assert all(a.end_s <= b.start_s + 1e-12 for a, b in itertools.pairwise(own)), "two things at a time"
        assert sum(e.end_s - e.start_s for e in own) == pytest.approx(nb06.WORK_S / stages)
    _, alt, sentence = drawn("pipeline", **values)
    share = (stages - 1) / (micro_batches + stages - 1)
    assert f"idle {share:.0%}" in alt and f"= {share:.0%} idle." in sentence
    speed = stages * (1 - share)
    assert (f"{speed:.2f} times as fast as one device" in sentence) == (speed > 1)


def test_what_a_slow_link_leaves_of_the_ranks():
    """100 MB on 8 ranks at 1.6 GB/s: 2 x 7/8 x 100 / 1.6 ms, and 14 messages of 20 us; 3/4 of 2/3 of 100 ms hides."""
    exchange_ms = 2 * 7 / 8 * 100 / 1.6 + 14 * 0.02
    _, alt, sentence = drawn("slow_link")
    assert f"8 ranks work at {100 * 100 / (100 + exchange_ms - 50):.0f}%" in alt
    assert f"takes {exchange_ms:.3g} ms, {exchange_ms - 50:.3g} ms of it exposed, beside 100 ms" in sentence
    assert " 0 ms of it exposed" in drawn("slow_link", smaller=25)[2]


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


@pytest.mark.parametrize("name", EXPLORERS)
def test_without_a_page_the_default_figure_is_an_ordinary_output(name, monkeypatch):
    page = Page(monkeypatch, live=False)
    EXPLORERS[name]()
    ((bundle, how),) = page.shown
    assert set(bundle) == {"text/html", "text/plain"} and how == {"raw": True}
    (picture,) = html_pictures(bundle["text/html"])
    assert len(picture.alt) > 30 and picture.title.startswith("modelled")
    assert bundle["text/plain"].startswith(f"[Figure: {picture.alt}]\n")
    assert len(picture.src) < 4 / 3 * plot.MAX_PNG_BYTES + 50


def test_without_widgets_the_default_figure_is_shown_and_what_is_missing(monkeypatch, capsys):
    page = Page(monkeypatch)
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    nb01.batch()
    assert len(page.shown) == 1 and html_pictures(page.last["text/html"])
    assert "pip install ipywidgets" in capsys.readouterr().out


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.long if n != "roofline" else ()) for n in EXPLORERS]
)
def test_a_moved_knob_draws_the_same_picture_anew(name, monkeypatch):
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
    nb00.roofline()
    card, number_format, *_ = page.boxes[0].children
    card.value = "T4"
    assert page.last == {"text/plain": "T4: no sourced BF16 peak, and none is guessed. Choose another format."}
    number_format.value = "FP16"
    assert html_pictures(page.last["text/html"])


def test_a_default_must_be_one_of_the_values():
    with pytest.raises(BadInput, match="workers: take different values, and one of them as the default, not 3"):
        explore.explore(lambda workers: None, workers=Slider("workers", (1, 2), 3))
    with pytest.raises(BadInput, match="name: take different values"):
        explore.explore(lambda name: None, name=Menu("name", ["a", "a"], "a"))


def test_a_moved_knob_leaves_no_figure_behind_and_asks_for_no_full_collection(monkeypatch):
    """A full collection goes through all that torch has, which takes longer than several redraws."""
    page, figures, generations, draw = Page(monkeypatch), [], [], plot.to_png
    monkeypatch.setattr(plot, "to_png", lambda fig: figures.append(weakref.ref(fig)) or draw(fig))
    nb01.batch()
    figures.clear()
    told = lambda phase, about: generations.append(about["generation"]) if phase == "start" else None  # noqa: E731
    gc.callbacks.append(told)
    try:
        knob = page.boxes[0].children[0]
        for value in [v for v in OPENED["batch"][1]["fixed_ms"].values if v != knob.value][:3]:
            generations.clear()
            knob.value = value
            assert generations[-1] == 1 and generations.count(2) == 0
    finally:
        gc.callbacks.remove(told)
    assert len(figures) == 3 and [ref() for ref in figures] == [None] * 3
    assert gc.isenabled()


CELL = "from labs.chapters.nb01 import explorer\nexplorer.batch()"


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
    """As nbconvert, nbval and papermill run a cell, twice the same; and as JupyterLab does."""
    (first,), (second,) = outputs(kernel, False), outputs(kernel, False)
    assert set(first) == {"text/html", "text/plain"} and first == second
    knobs, picture = outputs(kernel, True)
    assert set(knobs) == {"application/vnd.jupyter.widget-view+json", "text/plain"}
    assert picture["text/plain"] == first["text/plain"]
