"""What can hold a training back, one row each: the counterfactual that prices it, the part of a step that shows it,
what to type against it, and the notebook that teaches it."""

from __future__ import annotations

from dataclasses import dataclass

HOLDS_BACK, OPTION, READING = "holds back", "option", "reading"
"""Kinds of finding: something to get rid of; something a healthy training may use, too; not priced."""


@dataclass(frozen=True)
class Cause:
    """One row. Texts may hold the names of `diagnosis.numbers` in braces."""

    name: str
    mode: str
    """Counterfactual that prices it; "" if there is none."""
    what: str
    """One sentence about what the doctor saw."""
    cure: str
    """What to type."""
    notebook: str
    parts: tuple[str, ...] = ()
    """Kinds of a step's parts that would be gone without it: where the mode was not tried, they price it."""
    lines: str = ""
    """Kind of the noted lines that show it."""
    calls: tuple[str, ...] = ()
    """Calls in the source that it hangs on."""
    option: bool = False
    within: tuple[str, ...] = ()
    """Kinds of a step's parts outside of which its counterfactual changes nothing."""


THREADS = "torch uses {threads} in each of {local_ranks}, on {cores}"
LARGER = "with {factor} times the batch ({batch} now) a sample costs less"
NOT_FUSED = "the optimizer updates parameters one by one, or list by list: fused, it takes one kernel for many"
STARVED = "the GPU had work {gpu} % of the time only: Python does not call it fast enough"
AHEAD = "what makes a batch belongs into a DataLoader's dataset or collate_fn, with workers that do it ahead"
PIN = "DataLoader(..., pin_memory=True) and x.to(device, non_blocking=True)"
CAUSES = (
    Cause(
        "slow_loader",
        "same batch again",
        "each step waits {part} of its {mean} for data on average ({loader})",
        "{loader_cure}",
        "02, section 3",
        ("data",),
        calls=("DataLoader",),
    ),
    Cause(
        "exchange",
        "no exchange",
        "{exposed} of a step's {mean} are exchange between ranks that nothing hides",
        "{exchange_cure}",
        "07, section 4",
        ("exchange",),
        "exchange",
        ("DistributedDataParallel", "DDP", "fully_shard", "FullyShardedDataParallel"),
    ),
    Cause(
        "synchronise",
        "no waiting line",
        "the host waits for the device {calls} times in a step",
        "keep the tensor (loss.detach()) and read it every 50 steps: if step % 50 == 0: ...",
        "01, exercise 01.3",
        (),
        "synchronise",
    ),
    Cause(
        "validation",
        "",
        "{often} evaluate the model: {part} for each step on average, of {mean}",
        "evaluate every few hundred steps: if step % 500 == 0: ...; but leave it where what comes out is trained on "
        "(rollouts, a generator's samples)",
        "09, section 5",
        ("evaluation",),
        calls=("evaluate", "validate", "test"),
    ),
    Cause(
        "checkpoint",
        "",
        "{often} save something: {part} for each step on average, of {mean}",
        "save every few minutes",
        "05, section 7",
        ("save",),
        "save",
        ("save",),
    ),
    Cause(
        "printing",
        "",
        "it prints {calls} times in a step: {part} of {mean}",
        "print every 50 steps: if step % 50 == 0: ...",
        "01, exercise 01.3",
        ("print",),
        "print",
    ),
    Cause(
        "more_threads",
        "one thread per core",
        THREADS + ": one for each core is faster",
        "torch.set_num_threads({fair_threads})",
        "02, section 5",
        calls=("set_num_threads",),
        option=True,
    ),
    Cause(
        "threads",
        "fewer threads",
        THREADS,
        "torch.set_num_threads({fair_threads})",
        "02, section 5",
        calls=("set_num_threads",),
    ),
    Cause(
        "anomaly",
        "no anomaly detection",
        "autograd checks every gradient for NaN (anomaly detection is on)",
        "torch.autograd.set_detect_anomaly(False)",
        "10, section 4",
        calls=("set_detect_anomaly", "detect_anomaly"),
    ),
    Cause(
        "find_unused",
        "no search for unused parameters",
        "DDP searches for unused parameters after every forward",
        "DistributedDataParallel(..., find_unused_parameters=False)",
        "03, section 1",
        calls=("DistributedDataParallel", "DDP"),
    ),
    Cause(
        "float64",
        "single precision",
        "everything is computed in 64 bits",
        "torch.set_default_dtype(torch.float32), and .float() for data and model",
        "04, section 1",
        calls=("set_default_dtype", "double"),
    ),
    Cause(
        "pageable",
        "pinned memory",
        "batches are copied to the device from pageable memory",
        PIN,
        "00, section 3",
        lines="copy",
        calls=("DataLoader",),
    ),
    Cause(
        "tiny_batches",
        "larger batch",
        LARGER + ": most of a step is paid whatever its size is",
        "batch_size={larger_batch}: other learning rate, other training",
        "01, section 6",
        calls=("DataLoader",),
    ),
    Cause(
        "optimizer_loop",
        "fused optimizer",
        "the optimizer goes from parameter to parameter in Python",
        "{optimizer}(..., fused=True)",
        "09, section 1",
        within=("optimizer",),
        calls=("{optimizer}",),
    ),
    Cause(
        "half_precision",
        "half precision",
        "forward and loss are computed in 32 bits",
        'with torch.autocast("{device}", torch.{half}): around forward and loss{scaler}; compare the losses',
        "04, section 5",
        option=True,
    ),
    Cause(
        "compile",
        "compiled",
        "each operation of the model is called from Python, one by one",
        "model = torch.compile(model)",
        "09, section 4",
        option=True,
    ),
)
"""A training that has one of them may be healthy all the same: what counts is the bound."""
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
}
"""What a learner calls the kinds of `facts.KINDS`."""
NEVER_SEEN = (
    "whether a kernel uses its device well: python -m labs.profile_step, notebook 09",
    "whether the training learns as it should: what is measured is speed, and lines that are known to spoil results",
    "what comes later than these steps: ends of epochs, a disk that fills, a neighbour that comes",
)
SECTIONS = {
    "growing": "09, section 3",
    "straggler": "09, section 2",
    "recompiles": "09, section 4",
    "own_code": "09, section 1",
    "copies": "00, section 3",
    "data_parallel": "03, section 2",
}
