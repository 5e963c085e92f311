"""The preflight's checks of the GPUs, and of what the ranks have done."""

from __future__ import annotations

from collections.abc import Iterator

from labs.kit import build, checks, nvml
from labs.kit.checks import GIB, Check, Facts
from labs.kit.record import Records
from labs.kit.trials import guarded

UNHIDE = "check CUDA_VISIBLE_DEVICES, MIG instances (nvidia-smi -L) and what the scheduler gave you"


def machine_checks(facts: Facts) -> list[Check]:
    """Judge everything that needs no running rank."""
    found = [c for check in (*checks.ALL, gpus) for c in guarded(check.__name__, lambda check=check: check(facts))]
    used = {v.nvml_index for v in facts.visible or ()} if facts.gpus_for_torch else set()
    for card in facts.report.gpus:
        if card.index in used or (used == {None}):
            found += guarded(f"GPU {card.index}", lambda card=card: list(gpu_checks(card, facts)))
    return found


def gpus(facts: Facts) -> Check:
    """How many GPUs torch can use, and whether that is what was asked for."""
    n, here = facts.gpus_for_torch, len(facts.report.gpus)
    enough = n >= facts.require_gpus
    wanted = "" if enough else f", {facts.require_gpus} required"
    if n:
        names = ", ".join(v.name or "a GPU" for v in facts.visible or ())
        detail = f"{n} for torch: {names} (driver {facts.report.driver}){wanted}"
        return Check("GPUs", "pass", detail) if enough else Check("GPUs", "fail", detail, UNHIDE)
    bad = "warn" if enough else "fail"
    if here and not facts.build["cuda"] and not facts.build["rocm"]:
        detail = f"{here} here, but this torch is a CPU build ({facts.build['torch']}){wanted}"
        return Check("GPUs", bad, detail, "install a CUDA build: see pytorch.org/get-started")
    if here:
        return Check("GPUs", bad, f"{here} here, none visible to CUDA{wanted}", UNHIDE)
    if enough:
        return Check("GPUs", "pass", "no GPU here: devices are CPU cores, every notebook runs")
    detail = f"no GPU here{wanted}: {facts.report.problem or 'the driver lists none'}"
    return Check("GPUs", "fail", detail, facts.report.remedy or "run nvidia-smi: it should list the cards")


def gpu_checks(card: nvml.Gpu, facts: Facts) -> Iterator[Check]:
    """Checks of one GPU that torch will use."""
    where = f"GPU {card.index}"
    yield driver(where, facts)
    if card.compute_capability:
        yield architecture(where, card.compute_capability, facts.build["arch_list"])
    yield neighbours(where, card, facts.my_pids)
    if card.mig:
        detail = f"MIG mode, {len(card.mig_uuids)} instances: a process sees at most one of them"
        remedy = "choose one with CUDA_VISIBLE_DEVICES=MIG-...; several ranks need several jobs"
        yield Check(where, "warn" if card.mig_uuids else "fail", detail, remedy)
    if card.persistence is False:
        yield Check(where, "warn", "persistence mode is off: the first use takes seconds", "nvidia-smi -pm 1")
    if slow := set(card.throttle or ()) - {"application clocks setting", "display clock setting"}:
        yield Check(where, "warn", f"clocks are held down: {', '.join(sorted(slow))}", "check cooling and power")
    if card.pcie_width and card.pcie_width_max and card.pcie_width < card.pcie_width_max:
        detail = f"PCIe x{card.pcie_width} of x{card.pcie_width_max}"
        yield Check(where, "warn", detail, "look again under load; if it stays, check the slot")


def driver(where: str, facts: Facts) -> Check:
    """The driver is as new as the CUDA that torch was built with (minor versions are compatible)."""
    have, built = facts.report.cuda_driver, facts.build["cuda"]
    if not have or not built:
        return Check(where, "pass", "driver and build cannot be compared")
    want = tuple(int(part) for part in built.split(".")[:2])
    detail = f"driver for CUDA {have[0]}.{have[1]}, torch built with {built}"
    if have[0] >= want[0]:
        return Check(where, "pass", detail)
    return Check(where, "fail", detail, f"update the driver, or install a torch built with CUDA {have[0]}")


def architecture(where: str, capability: tuple[int, int], arch_list: list[str]) -> Check:
    """torch holds kernels that this card can run."""
    name = f"sm_{capability[0]}{capability[1]}"
    how = build.runs_on(capability, arch_list)
    if how == "native":
        return Check(where, "pass", f"kernels for {name} are in this torch")
    if how == "ptx":
        return Check(where, "warn", f"no kernels for {name} in this torch: PTX is compiled at first use",
                     "the first start is slow; a newer torch build avoids it")  # fmt: skip
    have = ", ".join(arch_list) or "none"
    return Check(where, "fail", f"no kernels for {name} in this torch (it has {have})", "install a torch for this card")


def neighbours(where: str, card: nvml.Gpu, mine: frozenset[int]) -> Check:
    """Somebody else's job on the card takes memory and spoils timings."""
    if card.processes is None:
        return Check(where, "pass", "other processes cannot be listed here")
    others = [p for p in card.processes if p.pid not in mine]
    if not others:
        return Check(where, "pass", "nobody else on it")
    who = ", ".join(f"pid {p.pid}" + (f" {p.memory_bytes / GIB:.1f} GiB" if p.memory_bytes else "") for p in others)
    return Check(where, "warn", f"also used by {who}", "timings will suffer: take another card or wait")


def rank_checks(records: Records, seconds: float, facts: Facts) -> list[Check]:
    """Judge what the ranks have done: a process group, its backend, right answers."""
    layout = records[0].layout
    n, backend, device = layout["world_size"], layout["backend"], layout["device"]
    found = [Check("process group", "pass", f"{n} ranks on {device} through {backend} in {seconds:.1f} s")]
    if device == "cuda" and "nccl" not in backend and not facts.build["nccl"]:
        found = [Check("process group", "warn", f"{n} ranks on GPUs without NCCL", "install a torch with NCCL")]
    product = max(r.value for r in records.where("matmul_relative_error"))
    reduced = max(r.value for r in records.where("all_reduce_error"))
    found.append(_right("matrix product", product, 1e-2, f"relative error {product:.0e} on {device}"))
    found.append(_right("all-reduce", reduced, 0.0, f"sum over {n} ranks is " + ("right" if reduced == 0 else "wrong")))
    return found


def _right(name: str, error: float, allowed: float, detail: str) -> Check:
    if error <= allowed:  # NaN is not
        return Check(name, "pass", detail)
    return Check(name, "fail", detail, "the hardware or the build computes wrong: do not train on it")
