"""Predicted bytes are those of the allocator; the rest of the lab says what torch does."""

import gc
import math
from dataclasses import replace

import pytest
import torch
from speeds import first

from labs import activation_checkpointing
from labs.activation_checkpointing import deep_models, report, sequences, variants
from labs.activation_checkpointing.splitting import (
    Chain,
    after_forward,
    at_peak,
    best_segments,
    share_again,
    time_ratio,
    trace_chain,
)
from labs.activation_checkpointing.step import possible, steps_of
from labs.common.activation_memory.allocator import Storages, watch
from labs.common.memory import recomputation
from labs.common.memory.bert_memory import layer_bytes
from labs.common.models import Workload
from labs.common.models.large_models import BertShape, bert
from labs.kit.errors import BadInput
from labs.kit.launch import launch

CPU = torch.device("cpu")
SHAPE = BertShape(layers=4, hidden=64, heads=4, vocabulary=128, places=64)
SMALL = {
    "bert": lambda: bert(SHAPE, 64),
    "thin": lambda: deep_models.thin_chain(12, 64),
    "mlp": lambda: deep_models.deep_mlp(6, 64),
}


def equal_chain(n=12, kept=10, boundary=1, gradient=0):
    return Chain((kept,) * n, (boundary,) * n, (gradient,) * n, outside=7, fixed=100)


def cut(n, k, keep_last=False):
    return [(a, b, not keep_last or b < n) for a, b in recomputation.segment_bounds(n, k)]


@pytest.fixture(autouse=True)
def one_thread():
    """As a rank of the lab has on a CPU; two that share a busy machine wait for each other.

    Garbage of tests before goes first: freed while the allocator is watched, it would lower the peak.
    """
    gc.collect()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def run():
    return launch("activation_checkpointing", nproc=1, smoke=True, parts=("pareto", "chain", "variants"))


# -- prediction


def test_peak_by_hand():
    """fixed + outside + the largest of m A + (k - 1) b, m A + (n - m) g and A + (n - 1) g."""
    predict = activation_checkpointing.predict
    assert predict(equal_chain(), [], passing=3) == 100 + 7 + 120 + 3
    assert predict(equal_chain(), cut(12, 1)) == 100 + 7 + 120
    assert predict(equal_chain(), cut(12, 4)) == 100 + 7 + 30 + 3
    assert predict(equal_chain(), cut(12, 12)) == 100 + 7 + 10 + 11
    assert (
        predict(equal_chain(gradient=5), cut(12, 4)) == 100 + 7 + 30 + 45
    )  # at the first segment, the others' are there
    assert predict(equal_chain(), cut(12, 4, keep_last=True)) == predict(equal_chain(), cut(12, 4))


def test_what_forward_leaves_by_hand():
    assert after_forward(equal_chain(), []) == 7 + 120
    assert after_forward(equal_chain(), cut(12, 4)) == 7 + 4
    assert after_forward(equal_chain(), cut(12, 4, keep_last=True)) == 7 + 3 + 30


@pytest.mark.parametrize(("n", "kept"), [(16, 1), (36, 1), (64, 4)])
def test_the_best_number_of_segments_is_a_square_root(n, kept):
    chain = equal_chain(n, kept, 1)
    best = min((k for k in range(1, n + 1) if n % k == 0), key=lambda k: at_peak(chain, cut(n, k)).total)
    assert best == best_segments(chain) == math.sqrt(n * kept)


def test_time_by_hand():
    assert time_ratio(share_again(12, cut(12, 4))) == pytest.approx(4 / 3)
    assert time_ratio(share_again(12, cut(12, 4, keep_last=True))) == pytest.approx(1.25)
    assert time_ratio(share_again(12, []), forward=0.4) == 1
    assert time_ratio(0.5, forward=0.4) == 1.2


@pytest.mark.parametrize("name", first(1, SMALL))
def test_prediction_is_the_allocators_peak_within_one_percent(name):
    torch.manual_seed(0)
    workload = SMALL[name]()
    steps = steps_of(workload, [p for p in possible(workload.module) if p != "selective"], 16, CPU)
    none, passing = steps["none"], 0
    chain = trace_chain(Workload(none.module, None, none.loss), none.x, none.y, sum(none.fixed().values()))
    for policy, step in steps.items():
        live = step.live()
        if policy == "none":
            passing = chain.fixed + live.peak - at_peak(chain, step.runs).total
        assert at_peak(chain, step.runs).total + passing == pytest.approx(chain.fixed + live.peak, rel=0.01), policy
        assert after_forward(chain, step.runs) == pytest.approx(live.after_forward, rel=0.01), policy
    assert passing > 0


# -- allocator


def test_the_allocator_is_watched_and_agrees_with_storages_that_are_counted():
    x = torch.ones(2**18, requires_grad=True)  # 1 MiB
    live = watch(lambda: x.exp().sin().sum(), lambda loss: loss.backward(), CPU)
    assert live.after_forward == x.nbytes + 4  # the result of exp, which sin keeps, too; the loss
    with Storages() as storages:
        loss = x.exp().sin().sum()
        kept = storages.now
        del loss
    assert kept == pytest.approx(x.nbytes, abs=8)
    assert live.peak >= 2 * x.nbytes
    assert max(live.changes) == live.peak


# -- variants (B13)


def test_reentrant_checkpoint_loses_gradients_silently(run):
    def lost(scenario, variant):
        return run.one("parameters_without_gradient", scenario=scenario, variant=variant).value

    later, first = "a later layer", "first layer, on data"
    assert [lost(later, v) for v in variants.VARIANTS] == [0, 0, 0], "there it works, and warns"
    assert run.one("warnings", scenario=later, variant="left out").value == 1
    assert [lost(first, v) for v in variants.VARIANTS] == [4, 4, 0]
    assert [run.one("raised", scenario=first, variant=v).value for v in variants.VARIANTS] == [0, 0, 0]
    for scenario in variants.SCENARIOS:
        assert lost(scenario, "use_reentrant=False") == 0
        assert run.one("raised", scenario=scenario, variant="use_reentrant=False").value == 0
        raised = run.one("raised", scenario=scenario, variant="use_reentrant=True").value
        assert raised == (scenario not in (later, first))


def test_without_the_random_state_gradients_are_wrong(run):
    assert run.one("gradient_error", preserve_rng_state=True).value == 0
    assert run.one("gradient_error", preserve_rng_state=False).value > 0.1


# -- sequences (B16)


def test_kept_bytes_are_the_closed_form():
    for attention in ("eager", "sdpa"):
        shape = BertShape(attention=attention)
        assert sequences.deep(shape, 64, "none").after_forward == 24 * layer_bytes(64, "fp32", shape)
    assert sequences.deep(BertShape(), 64, "block").after_forward == 24 * 64 * 1024 * 4  # an input per layer


def test_what_grows_with_the_square():
    def ratio(attention, policy):
        peaks = [sequences.deep(BertShape(attention=attention), s, policy).peak for s in (1024, 2048)]
        return peaks[1] / peaks[0]

    assert ratio("eager", "none") > 3.3
    assert ratio("eager", "block") > 3  # the one layer in work has the whole matrix
    assert ratio("sdpa", "none") == pytest.approx(2, rel=0.01)
    assert sequences.square_share(BertShape(), 2048) > 0.8
    assert sequences.square_share(BertShape(attention="sdpa"), 2048) == 0


# -- the lab


def test_every_policy_has_every_metric(run):
    policies = possible(deep_models.build("deep_mlp", 0).module)
    for metric in ("peak_bytes", "saved_bytes", "flops", "gradients_equal", "gradient_difference", "step_s"):
        assert [r.case["policy"] for r in run.where(metric, part="pareto")] == policies
    policies.remove("selective")  # what that keeps depends on operations, not on blocks
    assert [r.case["policy"] for r in run.where("predicted_peak_bytes", part="pareto")] == policies


def test_gradients_are_bitwise_equal_and_a_third_more_is_computed(run):
    for r in run.where("gradients_equal"):
        assert r.value == 1
        assert run.one("gradient_difference", policy=r.case["policy"]).value == 0
    whole = [row for row in report.pareto(run) if row["policy"].count(":") == 1]  # selective, and kept last, are less
    assert len(whole) > 3
    for row in whole:
        assert row["flops_ratio"] == pytest.approx(4 / 3, rel=0.01)
    assert run.one("best_segments", model="thin_chain").value == 6


def test_the_thin_chain_is_smallest_at_the_square_root(run):
    rows = [r for r in report.pareto(run, "chain") if r["segments"]]
    for key in ("peak_bytes", "predicted_peak_bytes"):
        assert min(rows, key=lambda r: r[key])["segments"] == 6


def test_peak_parts_add_up(run):
    for r in run.where("predicted_peak_bytes"):
        parts = run.where("peak_part_bytes", part=r.case["part"], policy=r.case["policy"])
        assert sum(p.value for p in parts) == r.value
    kept, peak = report.fell(run, "segments:2")
    assert kept > 10 * peak > 10


def test_two_ranks_and_a_model_of_your_own():
    run = launch(
        "activation_checkpointing",
        nproc=2,
        oversubscribe=True,
        smoke=True,
        parts=("pareto",),
        model="labs.common.models.large_models:tiny_resnet",
        policies=("stage", "selective"),
        batch=4,
    )
    assert {r.case["policy"] for r in run.where("step_s")} == {"none", "stage", "selective"}
    assert all(r.value == 1 for r in run.where("gradients_equal"))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model": "labs.models:mlp", "policies": ("segments:9",)}, "segments:9 of 5 blocks"),
        ({"model": "char_gtp"}, "there is no model 'char_gtp': take one of deep_mlp"),
        ({"rounds": 0}, "rounds must be"),
        ({"parts": ()}, "parts must name one"),
    ],
)
def test_bad_input_is_one_line(values, message):
    with pytest.raises(BadInput, match=message) as e:
        activation_checkpointing.check_layout(activation_checkpointing.Config(**values), 1)
    assert "\n" not in str(e.value)


def test_where_the_optimizer_takes_room_for_all_at_once_that_can_be_the_peak():
    """As measured on an H200: foreach's AdamW takes the parameters' size beside all gradients, activations are gone."""
    chain = Chain(kept=(100,) * 4, inputs=(1,) * 4, gradients=(30,) * 4, fixed=360)
    cut = [(i, i + 1, True) for i in range(4)]
    assert at_peak(chain, cut).total == 360 + 100 + 90
    stepping = at_peak(replace(chain, optimizer=120), cut)
    assert (stepping.gradients, stepping.optimizer, stepping.total) == (120, 120, 600)
    assert at_peak(replace(chain, optimizer=120), ()).total == 360 + 400  # kept activations are more
