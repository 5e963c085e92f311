"""What the doctor can name as slow: the measurement that prices it, its sentence, its fix, and the notebook on it."""

from __future__ import annotations

from dataclasses import dataclass

WRONG, SLOW, RISK, OPTION, UNPRICED = "wrong result", "slow", "at risk", "option", "not priced"
"""Kinds of findings, in the order of a report. An option is what a healthy script may use; UNPRICED was seen, and
what it costs isn't known."""
KINDS = (WRONG, SLOW, RISK, OPTION, UNPRICED)


@dataclass(frozen=True)
class Bottleneck:
    """One row: fields in braces are those of findings.numbers."""

    name: str
    mode: str  # The step that was tried without it; "" where its part of the step prices it
    what: str
    fix: str
    notebook: str
    parts: tuple[str, ...] = ()  # Kinds of spans that would be gone
    lines: str = ""  # Kind of the lines that show it
    calls: tuple[str, ...] = ()  # Names whose first call in the script is the line to change, where no line was noted
    option: bool = False
    within: tuple[str, ...] = ()
    """Parts of a step outside of which nothing changes."""


LARGER = "with {factor} times the batch ({batch} now) a sample costs less"
NOT_FUSED = "the optimizer updates parameters one by one, or list by list: fused, it takes one kernel for many"
STARVED = "for {idle} % of a step the GPU is in no part of it: Python may not call it fast enough"
AHEAD = "move what makes a batch into a DataLoader's dataset or collate_fn, with workers that do it ahead"
PIN = "DataLoader(..., pin_memory=True) and x.to(device, non_blocking=True)"
BY_BATCH_FIX = (
    "index by the batch, num_workers=0: x[torch.randperm(len(x))[i : i + {batch}]], or DataLoader(dataset, "
    "sampler=BatchSampler(RandomSampler(dataset), {batch}, False), batch_size=None)"
)
DDP = ("DistributedDataParallel", "DDP")
BOTTLENECKS = (
    Bottleneck(
        "slow_loader",
        "same batch again",
        "each step waits {part} of its {mean} for data on average ({loader})",
        "{loader_fix}",
        "02, section 3",
        ("data",),
        calls=("DataLoader",),
    ),
    Bottleneck(
        "exchange",
        "no exchange",
        "{exposed} of a step's {mean} are exchange between ranks that nothing hides",
        "{exchange_fix}",
        "07, section 5",
        ("exchange",),
        "exchange",
        (*DDP, "fully_shard", "FullyShardedDataParallel"),
    ),
    Bottleneck(
        "buffers",
        "no buffer broadcast",
        "before each forward DDP sends {buffers} from rank 0 to the others, which wait for them",
        "DistributedDataParallel(..., broadcast_buffers=False), if each rank may keep its own running statistics",
        "03, section 5",
        calls=DDP,
    ),
    Bottleneck(
        "synchronise",
        "no waiting line",
        "the host waits for the device {calls} times in a step",
        "keep the tensor (loss.detach()) and read it every 50 steps: if step % 50 == 0: ...",
        "01, exercise 01.3",
        (),
        "synchronise",
    ),
    Bottleneck(
        "validation",
        "",
        "{often} evaluate the model: {part} for each step on average, of {mean}",
        "evaluate every few hundred steps: if step % 500 == 0: ...; but leave it where the training uses its output",
        "09, section 5",
        ("evaluation",),
        calls=("evaluate", "validate", "test"),
    ),
    Bottleneck(
        "checkpoint",
        "",
        "{often} save something: {part} for each step on average, of {mean}",
        "save every few minutes",
        "05, section 7",
        ("save",),
        "save",
        ("save",),
    ),
    Bottleneck(
        "printing",
        "",
        "it prints {calls} times in a step: {part} of {mean}",
        "print every 50 steps: if step % 50 == 0: ...",
        "01, exercise 01.3",
        ("print",),
        "print",
    ),
    Bottleneck(
        "threads",
        "fewer threads",
        "torch uses {threads} in each of {local_ranks}, on {cores}",
        "torch.set_num_threads({fair_threads})",
        "02, section 5",
        calls=("set_num_threads",),
    ),
    Bottleneck(
        "anomaly",
        "no anomaly detection",
        "autograd checks every gradient for NaN (anomaly detection is on)",
        "torch.autograd.set_detect_anomaly(False)",
        "10, section 5",
        calls=("set_detect_anomaly", "detect_anomaly"),
    ),
    Bottleneck(
        "find_unused",
        "no search for unused parameters",
        "DDP searches for unused parameters after every forward",
        "DistributedDataParallel(..., find_unused_parameters=False)",
        "03, section 1",
        calls=DDP,
    ),
    Bottleneck(
        "float64",
        "single precision",
        "everything is computed in 64 bits",
        "torch.set_default_dtype(torch.float32), and .float() for data and model",
        "04, section 1",
        calls=("set_default_dtype", "double"),
    ),
    Bottleneck(
        "tiny_batches",
        "larger batch",
        LARGER + ": most of a step doesn't depend on its size",
        "batch_size={larger_batch}: other learning rate, other training",
        "01, section 6",
        calls=("DataLoader",),
    ),
    Bottleneck(
        "optimizer_loop",
        "fused optimizer",
        "the optimizer goes from parameter to parameter in Python",
        "{optimizer}(..., fused=True)",
        "09, section 1",
        within=("optimizer",),
        calls=("{optimizer}",),
    ),
    Bottleneck(
        "half_precision",
        "half precision",
        "forward and loss are computed in 32 bits",
        'with torch.autocast("{device}", torch.{half}): around forward and loss{scaler}; compare the losses',
        "04, section 5",
        option=True,
    ),
    Bottleneck(
        "compile",
        "compiled",
        "each operation of the model is called from Python, one by one",
        "model = torch.compile(model)",
        "09, section 4",
        option=True,
    ),
)
PARTS = {
    "data": "waiting for data",
    "copy": "copy to device",
    "prepare": "own code between steps",
    "forward": "forward",
    "loss": "loss",
    "backward": "backward",
    "exchange": "exchange",
    "optimizer": "optimizer",
    "evaluation": "evaluation",
    "synchronise": "waiting for device",
    "print": "print",
    "save": "save",
    "rest": "own code within the step",
    "device": "the doctor's wait for the device",
    "idle": "other work, waits for the host",
}
"""What a learner calls the kinds of profile.KINDS; "idle" is what a GPU's step has besides its parts."""
NOT_DETECTED = (
    "whether a kernel uses its device well: python -m labs.profile_step, notebook 09",
    "whether the data, the loss or the model are the right ones",
    "what comes later than these steps: ends of epochs, a disk that fills, another program",
)
SECTIONS = {
    "rows_one_by_one": "02, section 3",
    "workers_restart": "02, section 3",
    "growing": "09, section 3",
    "straggler": "09, section 2",
    "recompiles": "09, section 4",
    "own_code": "09, section 1",
    "copies": "00, section 3",
    "pageable": "00, section 3",
    "data_parallel": "03, section 2",
}
