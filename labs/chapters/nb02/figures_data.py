"""Figures and tables of notebook 02 about formats of a dataset, and about what goes wrong with workers."""

from __future__ import annotations

import re

import pandas

from labs.kit.check import Prediction
from labs.kit.display import say, show_table
from labs.kit.measure import Estimate, estimate, paired_ratio
from labs.kit.plot import SERIES, bars, curve, figure, log_axes, points, prediction, show
from labs.kit.record import Record, Records

FORMATS = ("JPEG folder", "tar shards", "memory map", "RAM cache")


def scaling(run: Records, guess: Prediction, workers: int = 8) -> None:
    """Figure: items per second by number of workers, for items that wait and for items that compute, and the limits."""
    sources = {"sleep": "items that wait", "compute": "items that compute"}
    found = {s: run.where("items_per_s", source=s) for s in sources}
    gain = {s: paired_ratio(rows[-1].samples, rows[0].samples) for s, rows in found.items()}
    most = found["sleep"][-1].case["workers"]
    waits, computes = gain["sleep"].value, gain["compute"].value
    message = f"{most} workers: {waits:.1f} times the speed if items wait, {computes:.1f} if they compute"
    fig, ax = figure(
        message, xlabel="num_workers", ylabel="items per second", records=run, size=(6.6, 3.5), legend_below=True
    )
    counts = [r.case["workers"] for r in found["sleep"]]
    for k, (source, label) in enumerate(sources.items()):
        points(ax, range(len(counts)), [estimate(r.samples) for r in found[source]], label=label, color=SERIES[k])
        limit = [run.one("predicted_items_per_s", source=source, workers=n).value for n in counts]
        curve(ax, range(len(counts)), limit, label=f"limit: {label}", color=SERIES[k])
    if workers in counts:
        prediction(ax, counts.index(workers), float(guess) * found["compute"][0].value, label="that compute")
    ax.set_xticks(range(len(counts)), [str(n) for n in counts])
    ax.set_ylim(bottom=0)
    rates = ", ".join(f"{label} {found[source][0].value:.0f}" for source, label in sources.items())
    show(fig, alt=f"{message}. Per second, without workers: {rates}.")
    say(_scaling_text(run, gain, guess))


def _scaling_text(run: Records, gain: dict[str, Estimate], guess: Prediction) -> str:
    """Whether items that wait gain more from the most workers than items that compute."""
    cores = int(run.provenance["cores"])
    told = "Which of the two gains more from workers cannot be told from this run."
    if gain["sleep"].low > gain["compute"].high:
        told = f"Items that wait gain more from workers than items that compute, which have {cores} cores to share."
    return f"{told} Items that compute gain {gain['compute']}. {guess.against(gain['compute'])}"


def _times(a: Record, b: Record) -> float:
    return a.value / b.value


def formats(run: Records, guess: Prediction) -> None:
    """Figure: images per second that one process reads, by format, warm and from the disk."""
    names = [f for f in (*FORMATS, "memory copy") if len(run.where("images_per_s", format=f, cache="warm"))]
    warm = {f: run.one("images_per_s", format=f, cache="warm") for f in names}
    times = {f: paired_ratio(r.samples, warm["JPEG folder"].samples) for f, r in warm.items()}  # taken in turn
    best = max((f for f in FORMATS if f in warm), key=lambda f: times[f].value)
    worker = _through_a_worker(run)
    message = f"Memory map over JPEG folder: {times['memory map'].value:,.3g} x in one process"
    message += f", {worker:,.3g} x through a worker" if worker else ""
    fig, ax = figure(
        message,
        xlabel="images per second of one process (logarithmic)",
        ylabel="format",
        records=run,
        legend_below=True,
    )
    labels = [f if f != "memory copy" else "copy of the bytes\nin memory (limit)" for f in names]
    bars(ax, labels, [estimate(r.samples) for r in warm.values()], label="page cache")
    cold = [run.where("images_per_s", format=f, cache="cold") for f in names]
    if any(len(c) for c in cold):
        bars(ax, labels, [estimate(c[0].samples) if len(c) else None for c in cold], label="disk")
    prediction(ax, float(guess) * warm["JPEG folder"].value, names.index("memory map"), label="memory map")
    log_axes(ax, [10.0**k for k in range(1, 8, 2) if 10.0**k < 3 * max(r.value for r in warm.values())])
    show(fig, alt=f"{message}. " + "; ".join(f"{f}: {r.value:,.0f}" for f, r in warm.items()))
    say(_formats_text(run, warm, times, best, guess))


def _through_a_worker(run: Records, name: str = "memory map") -> float | None:
    """Rate of a format over that of the JPEG folder, both through one worker; None where this was not measured."""
    both = [run.where("worker_images_per_s", format=f) for f in (name, "JPEG folder")]
    return _times(both[0][0], both[1][0]) if all(both) else None


def _formats_text(run: Records, warm: dict[str, Record], times: dict, best: str, guess: Prediction) -> str:
    limit = paired_ratio(warm[best].samples, warm["memory copy"].samples).scaled(100, "%")
    lines = [
        f"* Memory map over JPEG folder, in one process: {times['memory map']}. "
        f"{guess.against(times['memory map'])} The {best} reaches {limit} of the rate at which the "
        "same bytes can be copied in memory."
    ]
    if worker := _through_a_worker(run):
        rate = run.one("worker_images_per_s", format="memory map").value
        lines.append(
            f"* Through one worker, which hands every batch over, the map gives {rate:,.0f} images/s: "
            f"{worker:,.3g} x the folder's."
        )
    lines.append(f"* {_cold_text(run)}")
    whole, draft = (run.where("images_per_s", format=f, cache="warm") for f in ("photo", "photo, draft"))
    if len(whole) and len(draft):
        gain = paired_ratio(draft[0].samples, whole[0].samples)
        lines.append(
            f"* Whole photos: {whole[0].value:.0f} images/s; with `Image.draft`, which decodes at reduced size, "
            f"{draft[0].value:.0f}: {gain} for one line of code."
        )
    return "\n".join(lines)


def _cold_text(run: Records) -> str:
    """The memory map against the folder from this machine's disk, whose speed decides."""
    cold = {r.case["format"]: r for r in run.where("images_per_s", cache="cold")}
    if not {"memory map", "JPEG folder"} <= set(cold):
        return "From the disk: not measured, this system keeps the files in memory."
    speed = run.one("disk_bytes_per_s").value / 1e6
    told = [
        f"{name} {paired_ratio(r.samples, cold['JPEG folder'].samples)}"
        for name, r in cold.items()
        if name.startswith("memory map")
    ]
    return (
        f"From this disk, which gives {speed:,.0f} MB/s front to back, over the JPEG folder: {', '.join(told)}. "
        "A faster or slower disk gives other ratios."
    )


def formats_table(run: Records) -> None:
    """What each format costs beside time: disk, start-up, memory of a worker, and the rate through one worker."""
    rows = {}
    for f in FORMATS:
        rows[f] = {
            "on disk (MB)": f"{run.one('disk_bytes', format=f).value / 1e6:.0f}",
            "start-up": str(_plain(run.one("startup_s", format=f))),
            "private memory of a worker (MB)": _mb(run.where("worker_bytes", format=f)),
            "images/s through one worker": _mb(run.where("worker_images_per_s", format=f), 1.0),
        }
    show_table(pandas.DataFrame(rows).T)


def _plain(r: Record) -> str:
    return str(Estimate(r.value, r.value, r.value, 1, r.unit)).split(" [")[0]


def _mb(rows: Records, unit: float = 1e6) -> str:
    return f"{rows[0].value / unit:,.0f}" if len(rows) else ""


def who_reads(run: Records) -> pandas.DataFrame:
    """Workers asked for, processes that read, and whether the trainer was one of them. Deterministic."""
    rows = [
        {
            "num_workers": r.case["workers"],
            "processes that read": int(r.value),
            "the trainer reads": r.case["trainer_reads"],
            "the trainer has started them": r.case["started_by_trainer"],
        }
        for r in run.where("worker_processes")
    ]
    return pandas.DataFrame(rows).set_index("num_workers")


def random_table(run: Records) -> None:
    """Share of draws that another worker, or the former epoch, drew too. Deterministic."""
    ways = list(dict.fromkeys(r.case["way"] for r in run.where("duplicate_share", across="workers")))
    rows = {way: {f"as in other {a}": f"{_share(run, way, a):.0%}" for a in ("workers", "epochs")} for way in ways}
    table = pandas.DataFrame(rows).T
    table.index.name = "draws from"
    show_table(table)


def _share(run: Records, way: str, across: str) -> float:
    return run.one("duplicate_share", way=way, across=across).value


def copy_on_write(run: Records, guess: Prediction) -> None:
    """Figure: private memory of a worker while it reads what it shares with the trainer."""
    held = [r.case["held"] for r in run.where("private_growth_bytes")]
    grown = {h: [v / 1e6 for v in run.one("private_growth_bytes", held=h).samples] for h in held}
    objects = run.where("private_growth_bytes")[0].case["objects"]
    text, array = grown["list of str"][-1], grown["NumPy array"][-1]
    message = f"Reading a list of str costs {text:.1f} MB per worker, an array {array:.1f}"
    fig, ax = figure(
        message,
        xlabel="share of the items read (%)",
        ylabel="private memory\ngained (MB)",
        records=run,
        size=(6.6, 3.5),
        legend_below=True,
    )
    for k, h in enumerate(held):
        share = [100 * i / (len(grown[h]) - 1) for i in range(len(grown[h]))]
        points(ax, share, grown[h], label=h, line=True, color=SERIES[k])
    prediction(ax, 100, guess, label="list of str")
    show(fig, alt=f"{message}. " + "; ".join(f"{h}: {v[-1]:.1f} MB" for h, v in grown.items()))
    modelled = run.one("predicted_growth_bytes", held="list of str").value / 1e6
    say(
        f"{objects:,} objects. Closed form for the list of str: {modelled:.1f} MB, every page of it. "
        f"{guess.against(grown['list of str'][-1])}"
    )


FAILURES = {
    "raises": "an item raises",
    "unreadable_jpeg": "a JPEG is damaged",
    "killed": "a worker is killed (SIGKILL)",
    "exits": "a worker exits",
    "exits_with_0": "a worker exits with code 0",
    "hangs": "a worker hangs",
}


def failures_table(run: Records) -> None:
    """What reaches the trainer, from torch alone and with `named_items`. Deterministic: no pids, paths or times."""
    rows = {}
    for r in run.where("seconds_until_error", trap="failures", named=False):
        named = run.one("seconds_until_error", trap="failures", failure=r.case["failure"], named=True)
        name = FAILURES[r.case["failure"]]
        if r.case["failure"] == "hangs":
            name += f" (here timeout={r.config.get('loader_timeout_s', 0):g} s; by default torch waits for ever)"
        rows[name] = {
            "torch says": neutral(r.case["words"]),
            "names the item": r.case["names_item"],
            "with named_items": neutral(named.case["words"]),
            "within 10 s": max(r.value, named.value) < 10,
        }
    show_table(pandas.DataFrame(rows).T)


def neutral(words: str) -> str:
    """Error words without what changes from run to run: process ids, folders, names of shared memory."""
    words = re.sub(r"\((pid(?:\(s\))?) [\d, ]+\)", r"(\1 N)", words)
    words = re.sub(r"process \d+", "process N", words)
    words = re.sub(r"/?(?:[\w.-]+/)+([\w-]+\.\w+)", r"\1", words)
    words = re.sub(r"</torch_[\w]+>", "<...>", words)
    return words.removeprefix("labs.common.loading.named_items.").strip()


TIMEOUT = " (the timeout that was set here: by default it waits for ever)"


def shm_table(run: Records) -> None:
    """What a small /dev/shm does to each setting; empty where it could not be limited."""
    rows = {}
    for r in run.where("batches_received", trap="shm"):
        words = neutral(r.case["words"]) or "all batches arrive"
        rows[r.case["setting"]] = {
            "batch (MiB)": f"{r.case['batch_bytes'] / 2**20:.2f}",
            "in flight at most (MiB)": f"{r.case['in_flight_bytes'] / 2**20:.1f}",
            "what the trainer sees": words + TIMEOUT * ("timed out" in words),
        }
    if not rows:
        return say("Here /dev/shm cannot be limited for one process, so this trap was not run.")
    return show_table(pandas.DataFrame(rows).T)
