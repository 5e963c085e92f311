"""The lab profiles, predicts and measures every cut, and its choice is the best by its own model."""

import statistics

import pytest
import torch
from again import holds_soon
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from labs import pipeline_split
from labs.kit.errors import BadInput
from labs.kit.launch import launch
from labs.kit.record import Record, Records
from labs.parts.models import Workload
from labs.parts.pipelines import chain, partition


def heavy_end():
    """Nearly all work is in the last of four layers: it must be alone on its stage."""
    layers = [nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 512), nn.Sequential(*heavy())]
    return Workload(nn.Sequential(*layers), lambda n: (torch.randn(n, 16), torch.randn(n, 512)), nn.MSELoss())


def heavy():
    return [nn.Linear(512, 512) for _ in range(6)]


def measured():
    values = {"model": (f"{__name__}:heavy_end",), "batch_size": 256, "repeats": 5, "smoke": True}
    return launch("pipeline_split", nproc=2, oversubscribe=True, **values)


@pytest.fixture(scope="module")
def run():
    return measured()


NAME = f"{__name__}:heavy_end"


def test_every_cut_is_predicted_and_measured(run):
    cuts = [cuts for cuts, predicted, measured in pipeline_split.sweep(run, NAME) if predicted > 0 < measured]
    assert cuts == [[1], [2], [3]]
    layers = run.where("layer_s", chain=NAME)
    assert {(r.case["layer"], r.case["part"]) for r in layers} == {
        (layer, part) for layer in range(5) for part in ("forward", "backward")
    }
    assert [r.case["cut"] for r in run.where("message_s", chain=NAME)] == [1, 2, 3]


def test_the_heavy_layer_gets_a_stage_of_its_own(run):
    # What the layers took is measured: a neighbour who takes a core from one of them for a moment may turn it round.
    assert holds_soon(it_is_nearly_the_best_to_cut_before_it, run, measured)


def it_is_nearly_the_best_to_cut_before_it(run):
    assert pipeline_split.chosen_cuts(run, NAME, "equally many layers") == [2]
    predicted = {tuple(cuts): seconds for cuts, seconds, _ in pipeline_split.sweep(run, NAME)}
    chosen = tuple(pipeline_split.chosen_cuts(run, NAME))
    # The chooser balances stages, the prediction runs the whole step: on layers that a neighbour disturbed in their
    # profile the two may name different cuts, of nearly the same time.
    return predicted[chosen] < 1.5 * min(predicted.values()) and predicted[3,] < 1.5 * predicted[chosen]


def test_the_finalists_hold_the_chosen_cut(run):
    finalists = [r.case["cuts"] for r in run.where("step_s", chain=NAME, phase="finalists")]
    assert pipeline_split.chosen_cuts(run, NAME) in finalists and len(finalists) <= 3
    assert holds_soon(lambda run: pipeline_split.chosen_over_rival(run, NAME).low < 1.5, run, measured)


@pytest.mark.parametrize("nproc", [1, 4])
def test_other_numbers_of_ranks(nproc):
    run = launch("pipeline_split", nproc=nproc, model=("convnet",), batch_size=16, smoke=True, oversubscribe=True)
    assert len(pipeline_split.chosen_cuts(run, "convnet")) == nproc - 1
    tried = [cuts for cuts, *_ in pipeline_split.sweep(run, "convnet")]
    assert tried == partition.candidates(7, nproc, pipeline_split.chosen_cuts(run, "convnet"))


def test_predict_by_hand():
    costs = partition.Costs((1.0, 1.0), (2.0, 2.0), (0.0, 0.0))
    assert pipeline_split.predict(costs, [1], 4) == pytest.approx(5 * 3.0)


def test_the_choice_is_compared_with_its_fastest_rival_pair_by_pair():
    def step(cuts, *seconds):
        return Record("pipeline_split", "step_s", "s", seconds, case={"chain": "c", "cuts": cuts, "phase": "finalists"})

    chosen = Record("pipeline_split", "chosen", "1", [2], "modelled", {"chain": "c", "by": "cost model"})
    rivals = [step([3], 1.0, 2.0, 1.0), step([4], 1.5, 3.0, 1.5)]
    found = pipeline_split.chosen_over_rival(Records([chosen, step([2], 1.1, 2.2, 1.1), *rivals]), "c")
    assert found.value == pytest.approx(1.1)
    found = pipeline_split.chosen_over_rival(Records([chosen, step([2], 0.8, 1.6, 0.8), *rivals]), "c")
    assert found.value == pytest.approx(0.8)
    alone = pipeline_split.chosen_over_rival(Records([chosen, step([2], 1.0, 2.0)]), "c")
    assert (alone.low, alone.high) == (1, 1)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"batch_size": 30}, "8 micro-batches do not divide a batch of 30 rows"),
        ({"model": ("resnet",)}, "there is no chain 'resnet'"),
        ({"model": (f"{__name__}:one_layer",)}, "has 1 layers, not enough for 2 stages"),
        ({"rounds": 0}, "rounds must be at least 1"),
    ],
)
def test_bad_input_is_one_line_before_anything_starts(values, words):
    with pytest.raises(BadInput, match=words) as e:
        launch("pipeline_split", nproc=2, oversubscribe=True, **values)
    assert "\n" not in str(e.value)


def one_layer():
    return Workload(nn.Sequential(nn.Linear(16, 512)), heavy_end().make_batch, nn.MSELoss())


@pytest.mark.parametrize("name", pipeline_split.UNBALANCED)
def test_the_course_models_are_unbalanced(name):
    """Equally many layers is not the best cut of any of them: by multiply-adds, which no neighbour disturbs."""
    model = chain(name)
    x, _ = model.make_batch(2)
    work = []
    for layer in model.layers:
        with FlopCounterMode(display=False) as flops:
            x = layer(x)
        work.append(flops.get_total_flops())
    best = min(range(1, len(work)), key=lambda c: max(sum(work[:c]), sum(work[c:])))
    assert best != round(len(work) / 2) and statistics.pstdev(work) > 0
