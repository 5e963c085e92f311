"""Small trainings in which one planted line ends in NaN or hides it, and the signs that tell which line it was.

A training learns Fashion-MNIST: a stack of blocks of norm, attention and perceptron, without biases, so that a blank
image stays zero in every layer. `plan(case)` says how one is written; a cure is another plan.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import math
import random
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, scaled_dot_product_attention

from labs.common.data import fashion_mnist
from labs.common.precision import amp

BATCH, STEPS, BLOCKS = 32, 24, 3
TOKENS, WIDTH = 6, 16
RAW_CAMERA = 4095.0  # the largest value of a 12-bit image that nobody has divided by it
LR, LR_GROWTH, MAX_NORM = 0.05, 1.5, 1.0
LAST = 6  # steps at the end, by which a training is judged


# What is planted, beside what is right


class RootNorm(nn.Module):
    """x over its root mean square. eps stands outside of the root: d sqrt(u)/du is infinite at u = 0, times 0: NaN."""

    def forward(self, x: Tensor) -> Tensor:
        """(..., features) to the same."""
        return x / (x.pow(2).mean(-1, keepdim=True).sqrt() + 1e-6)


class BatchNormByHand(nn.Module):
    """Standardises over the batch. The standard deviation of one sample is 0/0; nn.BatchNorm1d raises an error."""

    def forward(self, x: Tensor) -> Tensor:
        """(samples, tokens, features) to the same."""
        return (x - x.mean(0)) / x.std(0)


class LogMagnitude(nn.Module):
    """log|x|, which is -inf at 0."""

    def forward(self, x: Tensor) -> Tensor:
        """Any shape."""
        return x.abs().log()


class LogOfOneMore(nn.Module):
    """log(1 + |x|), which is 0 at 0."""

    def forward(self, x: Tensor) -> Tensor:
        """Any shape."""
        return x.abs().log1p()


class ChosenRoot(nn.Module):
    """sqrt(x) where x > 0, else 0. `where` drops the root of a negative number forward, but backward 0 * NaN is NaN."""

    def forward(self, x: Tensor) -> Tensor:
        """Any shape."""
        return torch.where(x > 0, x.sqrt(), 0.0)


class ClampedRoot(nn.Module):
    """The same with a lower limit under the root, so that what is not chosen is finite, too."""

    def forward(self, x: Tensor) -> Tensor:
        """Any shape."""
        return torch.where(x > 0, x.clamp(min=1e-2).sqrt(), 0.0)


class SquaredReLU(nn.Module):
    """relu(x)^2: above 256 it is beyond FP16, whose largest number is 65,504."""

    def forward(self, x: Tensor) -> Tensor:
        """Any shape."""
        return x.relu().square()


class Attention(nn.Module):
    """Each token looks at the tokens of its sample that the mask shows."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, shown: Tensor) -> Tensor:
        """x (samples, tokens, features), shown (samples, tokens) bool. A sample that shows no token gets zeros."""
        mask = shown[:, None, :].expand(-1, TOKENS, -1)
        return self.out(scaled_dot_product_attention(*self.qkv(x).chunk(3, -1), attn_mask=mask))


class AttentionByHand(Attention):
    """The same by hand: where a sample shows no token, softmax has nothing but -inf and gives NaN."""

    def forward(self, x: Tensor, shown: Tensor) -> Tensor:
        """As in Attention."""
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = q @ k.transpose(-2, -1) / WIDTH**0.5
        return self.out(scores.masked_fill(~shown[:, None, :], -math.inf).softmax(-1) @ v)


class Block(nn.Module):
    """Norm, attention, norm, perceptron; what both give is added to x."""

    def __init__(self, norm: nn.Module, attention: Attention, act: nn.Module) -> None:
        super().__init__()
        self.before, self.attention, self.norm = right_norm(), attention, norm
        up, down = nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.mlp = nn.Sequential(OrderedDict(up=up, act=act, down=down))

    def forward(self, x: Tensor, shown: Tensor) -> Tensor:
        """As in Attention."""
        x = x + self.attention(self.before(x), shown)
        return x + self.mlp(self.norm(x))


def right_norm() -> nn.Module:
    """Its eps stands inside of the root."""
    return nn.RMSNorm(WIDTH, eps=1e-6, elementwise_affine=False)


class Net(nn.Module):
    """Images as TOKENS tokens of WIDTH features, BLOCKS blocks, ten scores."""

    def __init__(self, plan: Plan, block: int) -> None:
        super().__init__()
        self.embed = nn.Linear(196, TOKENS * WIDTH, bias=False)
        kinds = [plan if k == block else PLAIN for k in range(BLOCKS)]  # only one block has the planted line
        self.blocks = nn.ModuleList(Block(NORMS[p.norm](), ATTENTIONS[p.attention](), ACTS[p.act]()) for p in kinds)
        self.last = right_norm() if plan.last_norm else nn.Identity()
        if not plan.last_norm:
            for b in self.blocks:
                b.before = b.norm = nn.Identity()
        self.head = nn.Linear(TOKENS * WIDTH, 10, bias=False)

    def forward(self, images: Tensor, shown: Tensor) -> Tensor:
        """images (samples, 196) in 0..1, shown (samples, TOKENS) bool: scores (samples, 10)."""
        x = self.embed(images).unflatten(1, (TOKENS, WIDTH))
        for block in self.blocks:
            x = block(x, shown)
        return self.head(self.last(x).flatten(1))


NORMS: dict[str, Callable[[], nn.Module]] = {
    "eps inside": right_norm,
    "eps outside": RootNorm,
    "over the batch": BatchNormByHand,
    "none": nn.Identity,
}
ACTS: dict[str, Callable[[], nn.Module]] = {
    "gelu": nn.GELU,
    "log": LogMagnitude,
    "log1p": LogOfOneMore,
    "squared relu": SquaredReLU,
    "root": ChosenRoot,
    "clamped root": ClampedRoot,
}
ATTENTIONS = {"torch's": Attention, "by hand": AttentionByHand}


# How a training is written


@dataclass(frozen=True)
class Plan:
    """What the lines of a training are."""

    norm: str = "eps inside"
    act: str = "gelu"
    attention: str = "torch's"
    last_norm: bool = True
    """False: no norm anywhere, as in a plain deep network."""
    precision: str = "fp32"
    """One of labs.common.precision.amp.FORMATS; "fp16" has a GradScaler, amp.NO_SCALING has none."""
    init_scale: float = 2.0**10
    """Of the GradScaler."""
    clip_first: bool = False
    """The gradient is clipped before unscale_."""
    max_norm: float = MAX_NORM
    lr_growth: float = 1.0
    """By what each step from the case's on multiplies the learning rate: a schedule that was meant to lower it."""
    drop_last: bool = False
    """Leave out the last batch, which has one sample."""
    check_data: bool = False
    """Leave out samples that are not finite."""


PLAIN = Plan()


@dataclass(frozen=True)
class Cause:
    """A planted line, where it shows, and what mends it."""

    name: str
    plan: Plan
    """How the training is written with it."""
    cure: dict
    """What a cure changes in any plan."""
    planted: str = ""
    """What is special about the one sample: "" for nothing."""
    part: str = ""
    """The module in the drawn block that makes the first number that is not finite; "" if none does."""
    advice: str = ""


CAUSES = {
    cause.name: cause
    for cause in (
        Cause(
            "bad sample",
            PLAIN,
            {"check_data": True},
            planted="nan pixel",
            advice="refuse samples that are not finite where the data is read",
        ),
        Cause(
            "log of zero",
            Plan(act="log"),
            {"act": "log1p"},
            "blank",
            "mlp.act",
            advice="log1p, or a lower limit before the log or the division",
        ),
        Cause(
            "root of zero",
            Plan(norm="eps outside"),
            {"norm": "eps inside"},
            "blank",
            "norm",
            advice="put eps inside of the root: its slope at 0 is infinite",
        ),
        Cause(
            "row all masked",
            Plan(attention="by hand"),
            {"attention": "torch's"},
            "masked",
            "attention",
            advice="scaled_dot_product_attention, or show at least one token",
        ),
        Cause(
            "batch of one",
            Plan(norm="over the batch"),
            {"drop_last": True},
            part="norm",
            advice="drop_last=True, or a norm that does not look across the batch",
        ),
        Cause(
            "FP16 overflow",
            Plan(precision=amp.NO_SCALING, act="squared relu", norm="none"),
            {"precision": "bf16"},
            "raw camera",
            "mlp.act",
            advice="BF16, or values below 65,504; a GradScaler only skips the step",
        ),
        Cause(
            "learning rate",
            Plan(last_norm=False, lr_growth=LR_GROWTH, max_norm=math.inf),
            {"lr_growth": 1.0},
            advice="a smaller learning rate: look at its schedule; clipping",
        ),
        Cause(
            "clip before unscale_",
            Plan(precision="fp16", init_scale=2.0**16, clip_first=True),
            {"clip_first": False},
            advice="scaler.unscale_(optimizer), then clip",
        ),
        Cause(
            "skipped for ever",
            Plan(precision="fp16", act="root"),
            {"act": "clamped root"},
            part="mlp.act",
            advice="watch the scale; then mend the module that makes the NaN",
        ),
    )
}
HEALTHY = {
    cause.name: cause
    for cause in (
        Cause("healthy", PLAIN, {}),
        Cause("healthy, blank image", Plan(act="log1p"), {}, planted="blank"),
        Cause("healthy, row all masked", PLAIN, {}, planted="masked"),
        Cause(
            "healthy, large values in BF16",
            Plan(precision="bf16", act="squared relu", norm="none"),
            {},
            planted="raw camera",
        ),
        Cause("healthy, scale too large at first", Plan(precision="fp16", init_scale=2.0**26), {}),
    )
}
"""Each looks like an ill one: the same data through the right line, or steps that a scaler skips as it should."""


@dataclass(frozen=True)
class Case:
    """A cause and where its seed plants it."""

    cause: Cause
    seed: int
    block: int
    step: int
    sample: int
    """Of the batch of that step."""

    @classmethod
    def draw(cls, name: str, seed: int) -> Case:
        """The same for the same name and seed, on every machine."""
        dice, cause = random.Random(f"{name} {seed}"), (CAUSES | HEALTHY)[name]
        block, step, sample = dice.randrange(BLOCKS), dice.randrange(4, STEPS - 10), dice.randrange(BATCH)
        step = {"batch of one": STEPS, "skipped for ever": 0, "clip before unscale_": 0}.get(name, step)
        return cls(cause, seed, block, step, 0 if name == "batch of one" else sample)

    @property
    def module(self) -> str:
        """The name of the module that makes the first number that is not finite; "" if it is not planted in one."""
        return f"model.blocks.{self.block}.{self.cause.part}" if self.cause.part else ""


@functools.cache
def images() -> tuple[Tensor, Tensor]:
    """All training images, means of 2 x 2 pixels in 0..1, (10000, 196) float32, and labels (10000,) int64."""
    data = fashion_mnist()
    x = torch.from_numpy(data.x_train).float().div(255).unsqueeze(1)
    return avg_pool2d(x, 2).flatten(1), torch.from_numpy(data.y_train).long()


Batch = tuple[Tensor, Tensor, Tensor]
"""Images (samples, 196), which tokens are shown (samples, TOKENS), labels (samples,)."""


def batches(case: Case, device: torch.device) -> list[Batch]:
    """STEPS batches of BATCH samples and one of a single sample; what the cause plants is in them."""
    draw = torch.Generator().manual_seed(case.seed)
    chosen = torch.randperm(10_000, generator=draw)[: STEPS * BATCH + 1]
    x, y = (t[chosen] for t in images())
    shown = torch.rand(len(x), TOKENS, generator=draw) > 0.3  # tokens are hidden at random, as in masked training
    shown[range(len(x)), torch.randint(TOKENS, (len(x),), generator=draw)] = True
    one = case.step * BATCH + case.sample
    match case.cause.planted:
        case "nan pixel":
            x[one, case.seed % 196] = math.inf if case.seed % 2 else math.nan
        case "blank":
            x[one] = 0.0
        case "masked":
            shown[one] = False
        case "raw camera":
            x[one] *= RAW_CAMERA
    return list(zip(*(t.to(device).split(BATCH) for t in (x, shown, y)), strict=True))


@dataclass
class Seen:
    """What a step shows from outside."""

    loss: float
    norm: float
    """Of the gradient, as clipping saw it."""
    skipped: bool
    """By the GradScaler."""


class Training:
    """A training of a case as `plan` has it, step by step."""

    def __init__(self, case: Case, plan: Plan, device: torch.device) -> None:
        torch.manual_seed(case.seed)
        self.case, self.plan, self.device = case, plan, device
        self.model, self.loss = Net(plan, case.block).to(device), nn.CrossEntropyLoss()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=LR, momentum=0.9)
        self.scaler = amp.scaler(plan.precision, device, init_scale=plan.init_scale)
        self.batches = batches(case, device)
        if plan.drop_last:
            self.batches = [b for b in self.batches if len(b[0]) == BATCH]
        if plan.check_data:
            finite = [x.isfinite().all(1) for x, _, _ in self.batches]
            self.batches = [tuple(t[keep] for t in b) for b, keep in zip(self.batches, finite, strict=True)]

    def step(self, number: int) -> Seen:
        """One step on batch `number`, from 0."""
        x, shown, y = self.batches[number]
        if number >= self.case.step:
            self.optimizer.param_groups[0]["lr"] *= self.plan.lr_growth
        self.optimizer.zero_grad()
        with amp.precision(self.plan.precision, self.device):
            loss = self.loss(self.model(x, shown), y)
        self.scaler.scale(loss).backward()
        if not self.plan.clip_first:
            self.scaler.unscale_(self.optimizer)
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.plan.max_norm)
        before = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return Seen(loss.item(), norm.item(), self.scaler.get_scale() < before)

    def state(self) -> dict[str, Tensor]:
        """A copy of the weights."""
        return copy.deepcopy(self.model.state_dict())

    def gradient(self, weights: dict[str, Tensor], batch: Batch, precision: str) -> tuple[float, float]:
        """Loss and gradient norm of a batch at these weights, in a format, without a scale; nothing is trained."""
        self.model.load_state_dict(weights)
        self.optimizer.zero_grad()
        x, shown, y = batch
        with amp.precision(precision, self.device):
            loss = self.loss(self.model(x, shown), y)
        loss.backward()
        norm = nn.utils.get_total_norm([p.grad for p in self.model.parameters()])
        self.optimizer.zero_grad()
        return loss.item(), norm.item()


def fp16_impossible(device: torch.device) -> str:
    """Why such a model cannot be trained in FP16 on `device`, in torch's words; "" if it can."""
    training = Training(Case.draw("healthy", 0), PLAIN, device)
    try:
        training.gradient(training.state(), training.batches[0], amp.NO_SCALING)
    except RuntimeError as e:  # of kernels, NotImplementedError included
        return f"{type(e).__name__}: {' '.join(str(e).split())[:150]}"
    return ""


def train(case: Case, plan: Plan, device: torch.device) -> list[Seen]:
    """The whole training."""
    training = Training(case, plan, device)
    return [training.step(number) for number in range(len(training.batches))]


def cured(plan: Plan, named: str) -> Plan:
    """The plan after the cure of the cause that was named."""
    return dataclasses.replace(plan, **CAUSES[named].cure) if named in CAUSES else plan


# Differential diagnosis


@dataclass(frozen=True)
class Signs:
    """What was seen and tried; all a diagnosis goes by."""

    where: str
    """The first number that is not finite: in the "input", an "output", a "gradient", or "nowhere"."""
    again: bool = True
    """The same batch from the same weights gives it again, without a GradScaler's scale."""
    other_batch: bool = False
    """Another batch, from the weights before that step, gives it, too."""
    in_fp32: bool = True
    """The same batch from the same weights gives it in FP32, too."""
    rising: int = 0
    """Steps in a row, up to that one, in which the loss rose or stayed far above its lowest."""
    samples: int = 0
    """In the batch."""
    row_masked: bool = False
    """The sample found by bisection shows no token."""
    skipped: float = 0.0
    """Share of the last steps that the scaler skipped."""
    clip_ratio: float = 1.0
    """The norm that clipping saw over the gradient's norm in FP32, at the end."""


def diagnose(s: Signs) -> str:
    """The cause that the signs name, or "healthy". What is surest comes first."""
    if not s.again:
        return "healthy"  # the scale was too large, and the scaler is lowering it
    if s.skipped == 1.0:
        return "skipped for ever"
    if s.where == "nowhere":
        return "clip before unscale_" if s.clip_ratio > 30 else "healthy"
    if s.where == "input":
        return "bad sample"
    if s.other_batch or s.rising >= 2:
        return "learning rate"
    if not s.in_fp32:
        return "FP16 overflow"
    if s.where == "gradient":
        return "root of zero"
    if s.samples == 1:
        return "batch of one"
    return "row all masked" if s.row_masked else "log of zero"


def rising(losses: list[float]) -> int:
    """Steps in a row at the end of `losses` that are more than three times as high as the lowest before them."""
    count, lowest = 0, math.inf
    for loss in losses:
        count = count + 1 if not loss <= 3 * lowest else 0
        lowest = min(lowest, loss)
    return count


def class_at(place: tuple[str, str]) -> str:
    """The class of this file whose source holds a (file, line) of a traceback; "" for none."""
    file, line = place
    kinds = [k for k in globals().values() if isinstance(k, type) and issubclass(k, nn.Module)]
    for kind in kinds if file == __file__ else ():
        lines, first = inspect.getsourcelines(kind)
        if first <= int(line) < first + len(lines):
            return kind.__name__
    return ""
