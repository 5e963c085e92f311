"""Formula, trace and real step agree; each would notice if the other were wrong."""

import itertools

import pytest
import torch
from speeds import besides
from torch import nn
from torch.nn import functional

from labs import amp_memory
from labs.common import models
from labs.common.memory import bert_memory, saved_tensors
from labs.common.models import Workload, large_models
from labs.common.models.large_models import BertShape
from labs.common.models.text_models import char_gpt
from labs.kit.errors import BadInput
from labs.kit.launch import launch

SMALL = {
    "tiny_bert": large_models.tiny_bert,
    "tiny_resnet": large_models.tiny_resnet,
    "cnn": models.cnn,
    "cnn_batchnorm": models.cnn_batchnorm,
    "mlp": models.mlp,
    "char_gpt": char_gpt,
}
SDPA = BertShape(attention="sdpa")


@pytest.fixture(scope="module")
def run():
    return launch("amp_memory", nproc=1, smoke=True)


def saved(module, x, precision="fp32"):
    return saved_tensors.of_step(Workload(module, None, lambda out, _: out.sum()), x, x, precision)


# -- counting


def test_by_hand():
    """Linear keeps its input; ReLU its output, which the next Linear keeps too: counted once.

    The first layer's weight is not needed: no gradient goes further back.
    """
    module = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    assert saved(module, torch.randn(5, 8)).activations == 4 * 5 * (8 + 16)
    lowered = saved(module, torch.randn(5, 8), "bf16")
    assert (lowered.activations, lowered.weight_copies) == (2 * 5 * (8 + 16), 2 * 16 * 4)
    assert lowered.by_dtype == {"bfloat16": 2 * 5 * (8 + 16)}


CASES = [*itertools.product(SMALL, ("fp32", "bf16", "fp16"))]


@pytest.mark.parametrize(("name", "precision"), besides(CASES[::7], CASES))
def test_the_trace_agrees_with_a_real_step(name, precision):
    torch.manual_seed(0)
    workload = SMALL[name]()
    real = saved_tensors.of_step(workload, *workload.make_batch(6), precision)
    line = saved_tensors.trace_line(workload, precision)
    assert line.weight_copies == real.weight_copies
    assert line.activations(6) == pytest.approx(real.activations, rel=0 if precision == "fp32" else 0.02)
    assert (real.weight_copies == 0) == (precision == "fp32")


def test_the_trace_leaves_the_workload_and_its_data_real():
    workload = char_gpt()
    saved_tensors.trace(workload, 2, "bf16")
    x, y = workload.make_batch(2)
    assert workload.loss(workload.module(x), y).item() > 0


@pytest.mark.long
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_one_layer_times_24_is_24_layers(precision):
    slow = saved_tensors.trace_line(lambda: large_models.bert(None, 128), precision, "cuda")
    assert amp_memory.bert_line(BertShape(), 128, precision) == slow


def test_unknown_format():
    with pytest.raises(ValueError, match="no format 'int8'"):
        saved_tensors.trace(models.mlp, 2, "int8")


# -- CUDA's rules


def test_emulated_rules_are_autocasts_own_where_a_cpu_has_the_same():
    """Without LayerNorm, softmax and dropout the two devices have the same rules."""
    for name in ("mlp", "cnn"):
        workload = SMALL[name]()
        cpu, cuda = (saved_tensors.trace(workload, 4, "bf16", target) for target in ("cpu", "cuda"))
        # Cross-entropy is raised to FP32 on both; a CPU's list does not say so for log_softmax.
        assert cuda.weight_copies == cpu.weight_copies
        assert cuda.activations - cpu.activations in (0, 2 * 4 * 10)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("name", "precision"), [("tiny_bert", "fp16"), ("tiny_resnet", "fp16"), ("char_gpt", "fp32")])
def test_emulated_rules_are_those_of_a_gpu(name, precision):
    workload, device = SMALL[name](), torch.device("cuda")
    traced = saved_tensors.trace(workload, 6, precision, "cuda")
    workload.module.to(device)
    real = saved_tensors.of_step(workload, *(t.to(device) for t in workload.make_batch(6)), precision)
    assert traced.weight_copies == real.weight_copies
    assert traced.activations == pytest.approx(real.activations, rel=0.02)


# -- the closed form


SHAPES = [*itertools.product((BertShape(), SDPA), (128, 384, 512), ("fp32", "fp16"))]


@pytest.mark.parametrize(("shape", "seq", "precision"), besides(SHAPES[::5], SHAPES), ids=str)
def test_formula_and_trace_agree(shape, seq, precision):
    line, by_hand = amp_memory.bert_line(shape, seq, precision), bert_memory.predict(5, seq, precision, shape)
    assert line.weight_copies == by_hand.weight_copies
    exact = shape.attention == "eager"
    assert line.activations(5) == pytest.approx(by_hand.activations, rel=0 if exact else 1e-6)


def test_in_16_bit_throughout_a_layer_is_that_of_korthikanti():
    """s h (34 + 5 a s / h) bytes, arXiv 2205.05198: every number of 4 bytes takes 2, statistics are left out."""
    s, h, a = 512, 1024, 16
    units = {"sh": s * h, "ass": a * s * s}
    halved = sum((t.fp32 // 2 if t.fp32 > 1 else 1) * units[t.unit] for t in bert_memory.LAYER if t.unit in units)
    assert halved == s * h * 34 + 5 * a * s * s


def test_the_largest_batch_is_the_last_that_fits():
    for precision in ("fp32", "fp16"):
        batch = bert_memory.largest_batch(24e9, 384, precision)
        sizes = [bert_memory.predict(b, 384, precision).total for b in (batch, batch + 1)]
        assert sizes[0] <= 24e9 < sizes[1]
    assert bert_memory.largest_batch(1e9, 384) == 0


@pytest.mark.parametrize(("optimizer", "per_parameter"), [("sgd", 8), ("momentum", 12), ("adam", 16)])
def test_states_by_hand_and_measured(optimizer, per_parameter):
    memory, peak_bytes = amp_memory.measure_step(models.mlp(), 4, "bf16", optimizer, torch.device("cpu"))
    assert memory.total - memory.activations - memory.weight_copies == per_parameter * 658_698
    assert peak_bytes is None
    expected = bert_memory.states(658_698, optimizer, memory.activations, memory.weight_copies)
    assert memory == expected


# -- the lab


def test_records_of_the_large_model(run):
    for attention, shape in (("eager", BertShape()), ("sdpa", SDPA)):
        case = {"model": "bert_large", "attention": attention, "seq": 128, "batch": 70}
        fp32, lowered = (amp_memory.total(run, precision=p, **case) for p in ("fp32", "fp16"))
        shares = amp_memory.saved_shares(run, "bert_large", 128, attention=attention)
        assert shares[70] == 1 - lowered / fp32
        assert shares == {
            b: pytest.approx(bert_memory.saved_share(b, 128, shape), abs=1e-5) for b in amp_memory.Config().batches
        }
        assert amp_memory.total(run, "formula_bytes", precision="fp16", **case) == pytest.approx(lowered)
    assert {r.kind for r in run.where("predicted_bytes")} == {"modelled"}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"sequences": (600,)}, "sequences must hold"),
        ({"batches": (4, 4)}, "batches must be different"),
        ({"optimizer": "lion"}, "optimizer"),
    ],
)
def test_bad_input(values, words):
    with pytest.raises(BadInput, match=words):
        launch("amp_memory", nproc=1, **values)


@pytest.mark.parametrize(
    "loss",
    [
        lambda x, y: functional.cross_entropy(x, y, label_smoothing=0.1),
        lambda x, y: functional.cross_entropy(x, functional.one_hot(y, 8).float()),
    ],
)
def test_losses_whose_bytes_are_not_known_are_refused(loss):
    x, y = torch.randn(4, 8, requires_grad=True), torch.arange(4)
    with saved_tensors.CudaRules(torch.bfloat16), pytest.raises(BadInput, match="class indices"):
        loss(x.bfloat16(), y)
