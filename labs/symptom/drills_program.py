"""Faults of a program that one process shows, and their cures; see drills.py."""

from __future__ import annotations

import io
import tempfile
import time
import warnings
from multiprocessing.connection import Listener
from pathlib import Path
from unittest import mock

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from labs.symptom.drill_kit import drill, script

# Loading data ---------------------------------------------------------------------------------------------------------


class CustomDataset:
    """An index is its item."""

    def __getitem__(self, i):
        return torch.ones(1) * i


class Sized(CustomDataset):
    """The same with a length."""

    def __len__(self):
        return 4


@drill()
def dataset_without_length(cured):
    list(DataLoader(Sized() if cured else CustomDataset(), shuffle=True))


@drill()
def unequal_samples(cured):
    samples = [torch.ones(3), torch.ones(3 if cured else 4)]
    next(iter(DataLoader(samples, batch_size=2)))


@drill()
def lambda_in_dataset(cured):
    samples = Sized()
    samples.transform = torch.neg if cured else (lambda x: -x)
    list(DataLoader(samples, num_workers=1, multiprocessing_context="spawn"))


@drill()
def lonely_sample(cured):
    model, data = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), TensorDataset(torch.ones(5, 2))
    for (x,) in DataLoader(data, batch_size=2, drop_last=cured):  # the last of 5 samples is alone
        model(x)


@drill()
def no_main_guard(cured):
    loop = "for _ in DataLoader(TensorDataset(torch.ones(4, 1)), num_workers=1, multiprocessing_context='spawn'): pass"
    guard = "if __name__ == '__main__':\n    " if cured else ""
    return script(f"import torch\nfrom torch.utils.data import DataLoader, TensorDataset\n{guard}{loop}\n")


# A step ---------------------------------------------------------------------------------------------------------------


@drill()
def label_out_of_range(cured):
    cross_entropy(torch.zeros(1, 10), torch.tensor([9 if cured else 10]))


@drill()
def two_formats(cured):
    layer = nn.Linear(2, 2) if cured else nn.Linear(2, 2).half()
    layer(torch.ones(1, 2))


@drill()
def backward_twice(cured):
    w = torch.ones(2, requires_grad=True)
    total = 0.0
    for _ in range(2):
        loss = (w * w).sum()
        loss = loss if cured else loss + total
        loss.backward()
        total = loss  # keeps the graph; loss.item() or loss.detach() would not


@drill()
def nothing_to_train(cured):
    layer = nn.Linear(2, 2).requires_grad_(cured)
    layer(torch.ones(1, 2)).sum().backward()


@drill()
def reentrant_without_gradient(cured):
    checkpoint(nn.Linear(2, 2), torch.ones(1, 2), use_reentrant=not cured)


@drill()
def reentrant_not_said(cured):
    said = {"use_reentrant": False} if cured else {}
    checkpoint(nn.Linear(2, 2), torch.ones(1, 2, requires_grad=True), **said)


@drill()
def overwritten_in_place(cured):
    x = torch.ones(2, requires_grad=True).sigmoid()
    y = x.exp()  # exp keeps its result for backward
    y = y + 1 if cured else y.add_(1)
    y.sum().backward()


@drill()
def nan_in_backward(cured):
    x = torch.zeros(1, requires_grad=True)
    with torch.autograd.detect_anomaly(check_nan=True):
        ((x * x + 1e-12 * cured).sqrt() * x.detach()).backward()  # the slope of a root at 0 is infinite; times 0: NaN


@drill()
def scheduler_first(cured):
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for step in (optimizer, scheduler) if cured else (scheduler, optimizer):
        step.step()


# Mixed precision ------------------------------------------------------------------------------------------------------


def _scaled(model):
    """A scaler, an optimizer and gradients of the scaled loss."""
    scaler, optimizer = torch.amp.GradScaler("cpu"), torch.optim.SGD(model.parameters(), lr=0.1)
    p = next(model.parameters())
    scaler.scale(model(torch.ones(1, 2, dtype=p.dtype)).sum()).backward()
    return scaler, optimizer


@drill()
def unscaled_twice(cured):
    scaler, optimizer = _scaled(nn.Linear(2, 2))
    for _ in range(1 if cured else 2):
        scaler.unscale_(optimizer)
    scaler.step(optimizer)


@drill()
def scaler_without_gradients(cured):
    scaler, optimizer = _scaled(nn.Linear(2, 2))
    if not cured:
        optimizer.zero_grad()  # between backward and step
    scaler.step(optimizer)


@drill()
def half_parameters(cured):
    scaler, optimizer = _scaled(nn.Linear(2, 2) if cured else nn.Linear(2, 2).half())
    scaler.step(optimizer)


@drill()
def old_autocast(cured):
    with torch.amp.autocast("cpu", torch.bfloat16) if cured else torch.cpu.amp.autocast(dtype=torch.bfloat16):
        pass


# Saving and loading ---------------------------------------------------------------------------------------------------


class Settings:
    """What should have been saved as a dict."""


@drill()
def pickled_object(cured):
    return _saved_and_loaded({"settings": {} if cured else Settings()})


@drill()
def cut_short(cured):
    return _saved_and_loaded({"weight": torch.ones(1000)}, keep=1.0 if cured else 0.5)


@drill()
def cuda_file_on_cpu(cured):
    with mock.patch("torch.serialization.location_tag", return_value="cuda:0"):  # as if it lay on a GPU when saved
        data = io.BytesIO()
        torch.save(torch.ones(1), data)
    data.seek(0)
    torch.load(data, map_location="cpu" if cured else None)


def _saved_and_loaded(state: object, keep: float = 1.0) -> object:
    """What torch.load makes of the first share `keep` of the bytes that torch.save writes."""
    data = io.BytesIO()
    torch.save(state, data)
    return torch.load(io.BytesIO(data.getvalue()[: int(keep * len(data.getvalue()))]))


# More loading


@drill()
def empty_dataset(cured):
    DataLoader(TensorDataset(torch.ones(1 if cured else 0, 2)), shuffle=True)


@drill()
def sampler_and_shuffle(cured):
    samples = Sized()
    DataLoader(samples, sampler=RandomSampler(samples), shuffle=not cured)


@drill()
def odd_samples(cured):
    samples = [torch.ones(1) if cured else None, torch.ones(1)]  # None: what many return for a file that is broken
    next(iter(DataLoader(samples, batch_size=2, shuffle=False)))


class Slow(Sized):
    """Its items take seconds."""

    def __getitem__(self, i):
        time.sleep(3)
        return super().__getitem__(i)


@drill()
def slow_worker(cured):
    next(iter(DataLoader(Sized() if cured else Slow(), num_workers=1, timeout=1, multiprocessing_context="fork")))


@drill()
def needs_workers(cured):
    DataLoader(Sized(), num_workers=int(cured), prefetch_factor=2)


@drill()
def daemon_with_children(cured):
    return script(f"""
        import multiprocessing
        def inner(): pass
        def outer():
            child = multiprocessing.Process(target=inner)
            child.start()
            child.join()
        if __name__ == "__main__":
            process = multiprocessing.Process(target=outer, daemon={not cured})  # as a DataLoader's worker is
            process.start()
            process.join()
    """)


@drill()
def start_method_twice(cured):
    again = "" if cured else "multiprocessing.set_start_method('spawn')"
    return script(f"import multiprocessing\nmultiprocessing.set_start_method('fork')\n{again}\n")


@drill()
def long_socket_path(cured):
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        Listener(str(Path(folder, "s" * (10 if cured else 120))), family="AF_UNIX").close()


# More of a step


@drill()
def other_shape(cured):
    nn.Linear(8, 2)(torch.ones(1, 8 if cured else 9))


@drill()
def labels_of_wrong_type(cured):
    cross_entropy(torch.zeros(1, 10), torch.tensor([3], dtype=torch.int64 if cured else torch.int32))


@drill()
def format_without_kernel(cured):
    torch.ones(2, 2, dtype=torch.float32 if cured else torch.half).geqrf()


@drill()
def too_large_for_half(cured):
    x = torch.zeros(2, dtype=torch.half)
    x.masked_fill(torch.tensor([True, False]), torch.finfo(x.dtype).min if cured else -1e9)


@drill()
def numpy_of_a_gradient(cured):
    x = torch.ones(1, requires_grad=True) * 2
    (x.detach() if cured else x).numpy()


@drill()
def meta_tensor(cured):
    with torch.device("cpu" if cured else "meta"):
        model = nn.Linear(2, 2)
    model.to("cpu")


@drill()
def vector_loss(cured):
    loss = nn.Linear(2, 2)(torch.ones(3, 2)).sum(1)
    (loss.mean() if cured else loss).backward()


@drill()
def inference_tensor(cured):
    with torch.no_grad() if cured else torch.inference_mode():
        x = torch.ones(1, 2)
    nn.Linear(2, 2)(x).sum().backward()


@drill()
def recomputed_differently(cured):
    calls = []

    def part(x):
        calls.append(x)
        return x.sin().exp() if cured or len(calls) == 1 else x + 0

    checkpoint(part, torch.ones(1, requires_grad=True), use_reentrant=False).backward()


@drill()
def empty_optimizer(cured):
    layers = nn.ModuleList([nn.Linear(2, 2)])
    parameters = layers.parameters()
    if not cured:
        list(parameters)  # somebody counted them, and a generator gives each item once
    torch.optim.SGD(parameters, lr=0.1)


@drill()
def leaf_in_place(cured):
    w = torch.ones(2, requires_grad=True)
    with torch.set_grad_enabled(not cured):
        w.clamp_(0, 1)


@drill()
def unused_input(cured):
    x, y = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)
    torch.autograd.grad(x * y if cured else x * 2, [x, y])


@drill()
def view_of_transposed(cured):
    x = torch.ones(2, 3).t()
    (x.reshape if cured else x.view)(6)


@drill()
def scaler_out_of_order(cured):
    scaler, optimizer = _scaled(nn.Linear(2, 2))
    scaler.step(optimizer)
    if cured:
        scaler.update()
        scaler.scale(torch.ones(1))
    scaler.step(optimizer)


@drill()
def lacks_import(cured):
    return script(("import time\n" if cured else "") + "start = time.time()\n")  # the listing of article C


@drill()
def never_was(cured):
    with warnings.catch_warnings(action="ignore"):  # torch's own
        import torch.distributed.nn  # nothing else here imports it
        import torch.distributed.optim

    return torch.distributed.optim.ZeroRedundancyOptimizer if cured else torch.distributed.nn.init_distributed_optimizer


# More files


@drill()
def other_groups(cured):
    one, two = nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    state = torch.optim.SGD(one.parameters(), lr=0.1).state_dict()
    torch.optim.SGD((one if cured else two).parameters(), lr=0.1).load_state_dict(state)


@drill()
def no_folder(cured):
    with tempfile.TemporaryDirectory() as there:
        folder = Path(there, "run1")
        if cured:
            folder.mkdir(parents=True, exist_ok=True)
        torch.save({}, folder / "last.pt")


@drill()
def file_missing(cured):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "last.pt")
        if cured:
            torch.save({}, path)
        torch.load(path)


@drill()
def folder_twice(cured):
    with tempfile.TemporaryDirectory() as folder:
        for _rank in range(2):
            Path(folder, "run1").mkdir(exist_ok=cured)
