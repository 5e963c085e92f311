"""Where NaN begins is named by module, step and sample; drift is found by a hash that does not cancel, in k steps."""

import dataclasses
import math
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

from labs import nan_clinic as lab
from labs.chapters.nb10 import editable_drift
from labs.kit.errors import BadInput
from labs.kit.lab import lab_module, make_config
from labs.kit.launch import launch, run_on_ranks
from labs.nan_clinic import numbers
from labs.nan_clinic.numbers import CAUSES, HEALTHY, Signs


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


# The command


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
