"""Where NaN begins is named by module, step and sample; drift is found by a hash that does not cancel, in k steps."""

import dataclasses
import math
import re
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

from labs import nan_clinic as lab
from labs.chapters.nb10 import editable_drift
from labs.chapters.nb10 import figures_numbers as figures
from labs.kit.check import predict
from labs.kit.errors import BadInput
from labs.kit.lab import lab_module, make_config
from labs.kit.launch import launch, run_on_ranks
from labs.kit.plot import kinds_in, to_png
from labs.kit.rank import Rank
from labs.kit.record import Records
from labs.nan_clinic import numbers
from labs.nan_clinic.numbers import CAUSES, HEALTHY, Case, Signs

CPU = torch.device("cpu")
LAYOUT = {"world_size": 2, "rank": None, "backend": "gloo", "device": "cpu"}
PROVENANCE = {"cpu": "a processor", "utc": "2026-11-23T00:00:00+00:00"}


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """As a rank has: more of them wait for each other on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.long)])
def examined(request):
    """Patients of one seed each, or of two, on real ranks."""
    seeds = request.param
    return launch("nan_clinic", 2, seeds=seeds, seed=11, device="cpu", oversubscribe=True)


def test_every_patient_is_named_and_learns_after_the_cure(examined):
    wrong = [r.case for r in examined.where("cause_right") if not r.value]
    patients = _seeds(examined) * len(CAUSES | HEALTHY)
    assert not wrong and len(examined.where("cause_right")) == patients
    assert [r.value for r in examined.where("cure_works")] == [1.0] * patients


def test_module_step_and_sample_are_those_that_were_planted(examined):
    for metric, causes in (("module_right", 6), ("sample_right", 5)):
        found = [r.value for r in examined.where(metric)]
        assert found == [1.0] * _seeds(examined) * causes
    assert lab.steps_right(examined) == [True] * _seeds(examined) * 7
    places = {r.case["module"] for r in examined.where("bad_step") if r.case["planted_module"]}
    assert len(places) > 2 * _seeds(examined), "the seed draws the place"


def test_what_a_scaler_hides_shows_in_what_clipping_saw_and_in_the_steps_it_skips(examined):
    hidden = [r for name in ("clip before unscale_", "skipped for ever") for r in examined.where("loss", planted=name)]
    assert len(hidden) == 2 * _seeds(examined)
    assert all(len(r.samples) == numbers.STEPS + 1 for r in hidden), "no loss is NaN"
    assert not any(lab.falls(list(r.samples)) for r in hidden), "and none of them learns"


def test_bisection_takes_as_many_trials_as_the_formula_says(examined):
    trials = [(r.value, examined.one("predicted_trials", **_case(r)).value) for r in examined.where("trials")]
    assert trials == [(5, 5)] * 5 * _seeds(examined)
    for n in (1, 2, 3, 7, 32, 33, 100):
        for bad in range(n):
            asked = []
            index, count = lab.bad_sample(lambda a, b, bad=bad, asked=asked: asked.append(b) or a <= bad < b, n)
            assert index == bad and count == len(asked)
            assert lab.predict_trials(n) - 1 <= count <= lab.predict_trials(n)
            assert count == lab.predict_trials(n) or n & (n - 1), "for powers of two it is exact"


def _seeds(examined):
    return examined[0].config["seeds"]


def _case(record):
    return {key: record.case[key] for key in ("planted", "of_seed")}


def test_anomaly_detection_points_at_gradients_and_misses_where_a_forward_began(examined):
    said = {r.case["planted"]: (r.case["anomaly"], r.case["anomaly_in"]) for r in examined.where("bad_step")}
    assert said["root of zero"] == ("SqrtBackward0", "RootNorm")
    assert said["skipped for ever"] == ("SqrtBackward0", "ChosenRoot")
    assert said["row all masked"][1] == "" and said["log of zero"][1] == ""


def test_cures_are_for_their_own_cause():
    """Another cure leaves the patient ill: the named cause matters."""
    for cure in set(CAUSES) - {"root of zero", "skipped for ever"}:
        case = Case.draw("root of zero", 3)
        losses = [s.loss for s in numbers.train(case, numbers.cured(case.cause.plan, cure), CPU)]
        assert any(map(math.isnan, losses)), cure


def test_the_diagnosis_goes_by_what_tells_the_causes_apart():
    bad = Signs("output", samples=32)
    assert lab.numbers.diagnose(dataclasses.replace(bad, in_fp32=False)) == "FP16 overflow"
    assert lab.numbers.diagnose(dataclasses.replace(bad, other_batch=True, in_fp32=False)) == "learning rate"
    assert lab.numbers.diagnose(dataclasses.replace(bad, row_masked=True)) == "row all masked"
    assert lab.numbers.diagnose(dataclasses.replace(bad, samples=1)) == "batch of one"
    assert lab.numbers.diagnose(dataclasses.replace(bad, where="gradient", skipped=1.0)) == "skipped for ever"
    searching = dataclasses.replace(bad, where="gradient", skipped=1.0, again=False)
    assert lab.numbers.diagnose(searching) == "healthy", "the scaler is lowering its scale"
    assert lab.numbers.diagnose(Signs("nowhere", clip_ratio=2.0)) == "healthy"
    assert lab.numbers.diagnose(Signs("nowhere", clip_ratio=6e4)) == "clip before unscale_"


@pytest.mark.parametrize(
    ("losses", "steps"), [([2, 1.5, 1.2, 1.3], 0), ([2, 1, 2.9, 3.1, 40, 9e9], 3), ([2, 1, 50, 1.1, 0.9], 0), ([], 0)]
)
def test_rising_counts_only_what_is_not_taken_back(losses, steps):
    assert numbers.rising(losses) == steps


class Branches(nn.Module):
    """A log inside of a module that has children; a tuple as output."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x, scale):
        return self.second((self.first(x) * scale).log()), x


def test_first_bad_names_the_innermost_maker_and_leaves_no_hook():
    model, x = nn.ModuleDict({"a": Branches(), "b": nn.Linear(3, 1)}), torch.ones(2, 3)
    with lab.first_bad(net=model) as notes, warnings.catch_warnings():
        warnings.filterwarnings("ignore", lab.NO_INPUT_GRADIENT)
        y = model["b"](model["a"](x, scale=torch.tensor(0.0))[0])
        y.sum().backward()
    assert lab.culprit(notes) == ("net.a", "output"), "not its child, to which bad numbers came"
    assert not any(m._forward_hooks or m._backward_hooks for m in model.modules())
    assert lab.culprit([]) == ("", "")
    with lab.first_bad(net=model) as notes, warnings.catch_warnings():
        warnings.filterwarnings("ignore", lab.NO_INPUT_GRADIENT)
        model["a"](x, scale=torch.tensor(math.nan))
    assert lab.culprit(notes) == ("", ""), "what came bad by keyword is not its fault"


@pytest.mark.filterwarnings("ignore:Full backward hook")
def test_a_gradient_of_a_parameter_that_overflows_alone_is_named():
    """1,000 samples of 100: each gradient of the input is 0.5, their sum in the weight is beyond FP16."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).half()
    with torch.no_grad():
        for layer in model:
            layer.weight.fill_(0.5)
            layer.bias.zero_()
    with lab.first_bad(net=model) as notes:
        y = model(torch.full((1000, 2), 100.0, dtype=torch.float16))
        y.backward(torch.ones_like(y))
    assert y.isfinite().all() and model[1].bias.grad.isfinite().all() and not model[1].weight.grad.isfinite().any()
    assert lab.culprit(notes) == ("net.1", "gradient of weight"), "before that of net.0, which overflows, too"
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


class RootOfZero(nn.Module):
    """Makes NaN in backward, inside of a module with a child."""

    def __init__(self):
        super().__init__()
        self.child = nn.Linear(3, 3)

    def forward(self, x):
        y = self.child(x) * 0
        return y.sqrt() * 0


@pytest.mark.filterwarnings("ignore:Full backward hook")
def test_a_parameter_to_which_a_bad_gradient_came_is_not_named():
    model = nn.Sequential(nn.Linear(3, 3), RootOfZero())
    with lab.first_bad(net=model) as notes:
        model(torch.ones(2, 3)).sum().backward()
    assert model[1].child.weight.grad.isnan().any()
    assert lab.culprit(notes) == ("net.1", "gradient")


@pytest.mark.filterwarnings("ignore:Full backward hook")
def test_sparse_gradients_are_looked_at_as_well():
    """The rows of one index are summed: 40,000 twice is beyond FP16."""
    model = nn.Embedding(5, 3, sparse=True).half()
    for index, found in (([1, 2], ("", "")), ([1, 1], ("net", "gradient of weight"))):
        model.zero_grad()
        with lab.first_bad(net=model) as notes:
            y = model(torch.tensor(index))
            y.backward(torch.full_like(y, 4e4))
        assert lab.culprit(notes) == found


def test_tensors_of_several_devices_and_integers_are_looked_at_together():
    """The meta device stands for a GPU: tensors of two devices cannot be stacked there, either."""
    lengths, data = torch.tensor([3, 2]), torch.ones(5, device="meta")
    assert lab.all_finite((lengths, data)).device.type == "meta"
    assert lab.all_finite((torch.ones(1), data)).device.type == "meta"
    assert lab.all_finite(lengths) and lab.all_finite([]) and lab.all_finite(torch.ones(2, dtype=torch.complex64))
    assert not lab.all_finite((lengths, torch.tensor([math.inf]))) and not lab.all_finite(torch.tensor(math.nan * 1j))


# Replicas


def test_one_bit_changes_the_hash_and_nothing_cancels():
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int8, torch.bool):
        x = torch.zeros(6, dtype=dtype)
        y = x.clone()
        y[4] = 1
        assert lab.bit_hash(x) == lab.bit_hash(x.clone()) != lab.bit_hash(y)
    torch.manual_seed(0)
    x = torch.randn(200_000)  # more than one part
    swapped, signs = x.clone(), x.clone()
    swapped[[3, 150_000]] = x[[150_000, 3]]
    signs[[3, 150_000]] *= -1  # the top bit of two words
    mirrored = x.clone()
    mirrored[7] = -mirrored[8]
    both = mirrored.clone()
    both[[7, 8]] = mirrored[[8, 7]]
    found = [int(lab.bit_hash(t)) for t in (x, swapped, signs, mirrored, both, x.reshape(400, 500).t())]
    assert len(set(found)) == 6
    if hasattr(torch, "hash_tensor"):  # the docstring's claim
        assert torch.hash_tensor(torch.zeros(4)) == torch.hash_tensor(torch.ones(4))
    assert lab.bit_hash(torch.zeros(4)) != lab.bit_hash(torch.ones(4))
    assert lab.bit_hash(torch.tensor(0.0)) != lab.bit_hash(torch.tensor(-0.0)), "bits, not values"
    assert lab.bit_hash(torch.tensor(float("nan"))) == lab.bit_hash(torch.tensor(float("nan")))


def checked(_):
    """On each rank: what the check says of equal tensors and NaN, of one that differs on the last rank, on rank 0."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    tensors = {"a": torch.ones(5), "b": torch.arange(4.0), "c": torch.full((2,), math.nan)}
    same = lab.replica_check(tensors)
    if rank == last:
        tensors["b"][2] = torch.nextafter(tensors["b"][2], torch.tensor(9.0))
    late = lab.replica_check(tensors)
    tensors["b"] = torch.arange(4.0) + (rank == 0)
    return same, late, lab.replica_check(tensors)


def test_the_check_names_tensor_and_rank_on_all_ranks():
    assert run_on_ranks(checked, 3, None) == [([], [("b", 2)], [("b", 1), ("b", 2)])] * 3


# The learner's round


def drifting(rank, model, optimizer, batches):
    """A rank that leaves out a step by itself."""
    for step, (x, y) in enumerate(batches):
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        if rank == 1 and step == 12:
            continue
        optimizer.step()


def test_the_editable_round_tells_when_it_is_noticed(capsys):
    editable_drift.compare(drifting, every=5)
    said = capsys.readouterr().out
    assert said.startswith("Compared every 5 steps, the replicas differ after step 15, in 0.bias")
    rows = [line.split() for line in said.splitlines()[2:8]]
    assert [row[0] for row in rows] == ["5", "10", "15", "20", "25", "30"]
    assert rows[1][1] == rows[1][2] and rows[2][1] != rows[2][2], "the losses part where the replicas do"
    editable_drift.compare(editable_drift.healthy)
    assert "6 comparisons the replicas are the same, bit for bit" in capsys.readouterr().out


def leaving(rank, model, optimizer, batches):
    """One rank leaves the loop."""
    for step, (x, y) in enumerate(batches):
        if rank == 1 and step == 12:
            break
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


@pytest.mark.long
def test_a_rank_that_leaves_the_learners_loop_is_told(capsys):
    editable_drift.compare(leaving, limit_s=12.0)
    assert capsys.readouterr().out.startswith("Given up after 12 s: a rank waits")


@pytest.fixture
def shown(monkeypatch):
    """(figures, alternative texts, sentences, tables) of what is drawn meanwhile."""
    drawn, alts, said, tables = [], [], [], []
    monkeypatch.setattr(figures, "show", lambda fig, alt: (drawn.append(fig), alts.append(alt), to_png(fig)))
    monkeypatch.setattr(figures, "say", said.append)
    monkeypatch.setattr(figures, "show_table", tables.append)
    return drawn, alts, said, tables


def test_the_timeline_and_the_tables(examined, shown):
    drawn, alts, said, tables = shown
    figures.timeline(examined, predict(4, "steps of warning", "steps"))
    assert "bad sample: none" in alts[0] and "first in the input" in alts[0] and "You predicted 4 steps" in said[0]
    assert "steps with a loss of more than three times its lowest" in alts[0]
    assert len(drawn[0].axes) == 2 and {"measured", "prediction"} == kinds_in(drawn[0])
    figures.silent(examined)
    assert (
        alts[1].startswith("No loss is NaN") and alts[1].count("cured to") == 2 and {"measured"} == kinds_in(drawn[1])
    )
    [ratio] = [line for line in said if "the norm that was clipped" in line]
    assert (
        ratio.startswith("* clip before unscale_: ")
        and float(re.search(r"is ([\d,]+) times", ratio)[1].replace(",", "")) > 1e4
    )
    figures.where_it_began(examined)
    figures.cures(examined)
    assert (
        len(tables[0]) == 8 * _seeds(examined) and "NO" not in tables[0].to_string() and len(tables[1]) == len(CAUSES)
    )


def without_step(run, cause, gone):
    """The same records, in which a step's loss was not finite."""
    rows = []
    for r in run:
        if r.metric == "loss" and r.case["planted"] == cause:
            kept = [(k, v) for k, v in zip(r.case["steps"], r.samples, strict=True) if k != gone]
            steps, samples = zip(*kept, strict=True)
            r = dataclasses.replace(r, samples=samples, case={**r.case, "steps": list(steps)})
        rows.append(r)
    return Records(rows)


@pytest.mark.parametrize("gone", [7, numbers.STEPS])
def test_a_step_without_a_finite_loss_turns_the_title_and_leaves_a_gap(examined, shown, gone):
    drawn, alts, *_ = shown
    figures.silent(without_step(examined, "clip before unscale_", gone))
    assert not alts[0].startswith("No loss is NaN") and "1 of 25 steps without a finite loss" in alts[0]
    assert list(drawn[0].axes[0].lines[0].get_xdata()) == [k for k in range(numbers.STEPS) if k != gone]


# The command


def test_one_rank_examines_patients():
    run = launch("nan_clinic", 1, causes=("bad sample",), device="cpu")
    said = list(lab.answer(run))
    assert "1 of 1" in said[0]


def without_fp16(_):
    """What is examined on a device whose kernels have no FP16."""

    def refuse(self, weights, batch, precision):
        raise NotImplementedError("no kernel\nfor Half")

    whole, numbers.Training.gradient = numbers.Training.gradient, refuse
    why = numbers.fp16_impossible(CPU)
    numbers.Training.gradient, numbers.fp16_impossible = whole, lambda device: why
    rank = Rank(0, 1, 0, 1, CPU, "gloo", (), lab="nan_clinic")
    asked = lab.Config(causes=("FP16 overflow", "skipped for ever", "bad sample"))
    return list(lab.run(asked, rank))


def test_patients_in_fp16_are_left_out_where_it_is_not_possible():
    [records] = run_on_ranks(without_fp16, 1, None)
    run = Records(records)
    assert {r.case["planted"] for r in run.where("cause_right")} == {"bad sample"}
    assert "FP16 is not possible here" in next(iter(lab.answer(run))) and "no kernel for Half" in str(run[0].case)


def test_smoke_runs_take_less_and_the_answer_is_short():
    run = launch("nan_clinic", 2, device="cpu", oversubscribe=True, smoke=True, **lab.SMOKE)
    assert 1 <= len(list(lab.answer(run))) <= 6


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"causes": ("bad smaple",)}, "did you mean 'bad sample'"),
        ({"seeds": 0}, "seeds"),
        ({"seed": -1}, "seed"),
    ],
)
def test_bad_values_name_their_option(values, said):
    with pytest.raises(BadInput, match=said):
        make_config(lab_module("nan_clinic"), values)
