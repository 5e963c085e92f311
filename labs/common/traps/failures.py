"""What a learner sees when a DataLoader fails: an item that raises, a worker that dies or hangs."""

from __future__ import annotations

import sys
import tempfile
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader

from labs.common.data import photos
from labs.common.loading.named_items import ItemFailed, NamedItems, loader_error, release_queues
from labs.common.traps.datasets import Fails, Failure, last_line, no_worker_left, print_to, workers_now

# Item BAD is in a worker's first batch: of that worker nothing is on its way while it dies. Otherwise torch says, by
# chance, "[Errno 104] Connection reset by peer" (the batch's memory is fetched from a worker that is gone) instead of
# what became of the worker, which its handler of SIGCHLD knows.
ITEMS, BAD, BATCH = 16, 5, 4
WORDS = 200
"""Longest text of an error in a record, in characters."""


def words(error: BaseException) -> str:
    """The one line that says it: of an error from a worker the last line, otherwise what torch says of the worker."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    if lines[0].startswith("Caught "):
        return lines[-1][:WORDS]
    of_worker = "" if isinstance(error, ItemFailed | ConnectionError | EOFError) else loader_error(error)
    return (of_worker or lines[0])[:WORDS]


def pictures(folder: Path) -> list[Path]:
    """ITEMS small JPEG files, parts of the course's photographs; file BAD is cut off in the middle."""
    from PIL import Image

    paths = [folder / f"tile-{i:02d}.jpg" for i in range(ITEMS)]
    with Image.open(photos()[0]) as image:
        image.draft("RGB", (400, 400))
        for i, path in enumerate(paths):
            image.convert("RGB").crop((8 * i, 0, 8 * i + 64, 64)).save(path)
    data = paths[BAD].read_bytes()
    paths[BAD].write_bytes(data[: len(data) // 2])
    return paths


def fail(how: Failure, named: bool, workers: int, timeout_s: float, hang_s: float) -> dict[str, Any]:
    """Read items until one fails, as a plain loop does or with NamedItems: what was raised, when and with what left.

    Returns seconds (from the start of the loop to the error in the caller's hands), error, words, names_item,
    batches (that came before), left (workers still alive while nothing is done about it), printed (their last line).
    """
    with tempfile.TemporaryDirectory() as folder, no_worker_left():
        paths = pictures(Path(folder)) if how == "unreadable_jpeg" else []
        dataset: Any = Fails(ITEMS, how, BAD, hang_s, paths)
        dataset = NamedItems(dataset) if named else dataset
        timeout = timeout_s if how == "hangs" else 0.0  # 0: none
        log = Path(folder) / "printed"
        loader = DataLoader(dataset, BATCH, num_workers=workers, timeout=timeout, worker_init_fn=partial(print_to, log))
        found = caught(loader, dataset.named() if named else None)
        text = found.pop("text")
        names = f"item {BAD}" in text or any(str(p) in text for p in paths[BAD : BAD + 1])
        return {**found, "names_item": names, "printed": last_line(log)[:WORDS]}


def caught(loader: DataLoader, guard: Any = None, step_s: float = 0.0) -> dict[str, Any]:
    """Loop over `loader` inside of `guard` and describe the error; `left` are workers that live on with it.

    `step_s` is how long the training step of a batch takes.
    """
    before, batches, start = workers_now(), 0, time.perf_counter()
    # torch may tell a second time that a worker died, while the iterator is freed: Python would print it, no more.
    hook, sys.unraisablehook = sys.unraisablehook, lambda told: None
    found: dict[str, Any] = {"error": "none", "words": "", "text": ""}
    try:
        with guard or nullcontext():
            for _ in loader:
                batches += 1
                time.sleep(step_s)
    except Exception as e:
        release_queues(e)  # or this run may wait for ever, as a learner's may
        found = {"error": type(e).__name__, "words": words(e), "text": f"{e}\n{e.__cause__}"}
    finally:
        sys.unraisablehook = hook
    seconds = time.perf_counter() - start
    return {**found, "seconds": seconds, "batches": batches, "left": len(set(workers_now()) - set(before))}
