"""Detect ranks that train different models, from their weights, their exchanges and calls that bypass DDP."""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from labs.doctor.bottlenecks import TEXTS, Match, matched
from labs.doctor.probes.data import Data
from labs.doctor.probes.scene import DONE, Scene, some
from labs.kit import _compat

AT = (0, 1, 3, 7)
"""Steps after which weights are compared, right before the next step: by then, wrappers have sent theirs."""
SAME = 1e-6
"""Relative difference of sums up to which weights count as equal; ranks that exchange are equal bit for bit."""
LARGE = 1024  # Elements; a smaller tensor is a metric, not weights or gradients
EXCHANGES = (
    "all_reduce broadcast all_gather all_gather_into_tensor reduce reduce_scatter reduce_scatter_tensor all_to_all "
    "all_to_all_single"
).split()
POINT_TO_POINT = ("send", "recv", "batch_isend_irecv")
OTHERS = ("deepspeed", "horovod", "megatron", "colossalai", "pipelin", "model_averaging")
"""Words in scripts that exchange weights or gradients in other ways."""
KNOWN = (
    "rank group digests shapes outer outside grad_at bypass through_ddp forward_at backward_at exchange_at unsynced_at "
    "made_at"
).split()
"""Attributes that a rank passes to `compare`."""
BIG = 0.25  # Share of all elements: a call that sends more than this sends weights


class Replicas:
    """Digest the weights that should be the same on all ranks."""

    def __init__(self, scene: Scene, data: Data) -> None:
        self.scene, self.data = scene, data
        self.ddp: list[weakref.ref] = []
        self.digests: dict[str, list[list[float]]] = {}  # By step: sums of each parameter in DDP, or of all
        self.outer: dict[str, list[list[float]]] = {}  # The same for those trained outside DDP
        self.shapes: list[list[int]] = []
        self.bypass: tuple[str, int] | None = None
        self.forward_at = self.backward_at = self.exchange_at = self.made_at = ("", 0)
        self.last_at = self.unsynced_at = ("", 0)
        """Line of the latest backward pass, and of the latest before a step, if it ran in no_sync()."""
        self.backwards = self.synced = self.through_ddp = 0
        self.large = self.weights = self.point_to_point = self.any = False
        self.reduced: set[int] = set()
        self.grad_at = ("", 0)
        """Line where torch.autograd.grad computes a wrapped model's gradients, which DDP's hooks don't see."""
        self.outside = ("", ("", 0))  # Name and line of the first module or parameter that is trained outside DDP
        self.fsdp = False
        self.rank, self.group = 0, [0]

    def install(self) -> None:
        """Note which models are wrapped, and what the script itself sends."""
        dist = torch.distributed
        self.scene.listen(torch.autograd, "grad", self._grading)
        ddp = torch.nn.parallel.DistributedDataParallel
        self.scene.listen(ddp, "__init__", after=lambda _, ddp, *args, **kwargs: self.ddp.append(weakref.ref(ddp)))
        for name in (*EXCHANGES, *POINT_TO_POINT):
            if hasattr(dist, name):
                self.scene.listen(dist, name, functools.partial(self._sending, name))

    def _grading(self, outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> None:
        if self.ddp and not self.grad_at[0]:
            given = {id(i) for i in (inputs if isinstance(inputs, list | tuple) else [inputs])}
            if any(id(p) in given for m in self.wrapped() for p in m.parameters()):
                self.grad_at = self.scene.line()

    def _sending(self, name: str, *args: Any, **kwargs: Any) -> None:
        if not self.scene.step:
            return
        given, self.any = [*args, *kwargs.values()], True
        self.point_to_point = self.point_to_point or name in POINT_TO_POINT
        tensors = [t for a in given for t in (a if isinstance(a, list) else [a]) if hasattr(t, "numel")]
        pointers = {t.data_ptr() for t in tensors if t.numel()}
        if self.weights or (name == "all_reduce" and pointers <= self.reduced):
            return  # nothing new
        parameters = self.scene.parameters()
        grads = {p.grad.data_ptr() for p in parameters if p.grad is not None}
        if name == "all_reduce" and pointers and pointers <= grads:
            self.reduced |= pointers
            self.exchange_at = self.scene.line()
        elif any(t.numel() > LARGE for t in tensors):
            self.large = True
            all_of_it = sum(p.numel() for p in parameters)
            big = name in ("all_reduce", "broadcast") and any(t.numel() > BIG * all_of_it for t in tensors)
            self.weights = self.weights or big or bool(pointers & {p.data_ptr() for p in parameters})

    def wrapped(self) -> list[Any]:
        """Return the live DDP modules, in order of creation."""
        return [m for m in (ref() for ref in self.ddp) if m is not None and hasattr(m, "module")]

    def forward(self, module: Any, training: bool, again: bool, *rest: Any) -> object:
        """Note whether a model is called directly, bypassing the DDP that wraps it."""
        if self.scene.step > AT[-1]:
            return DONE
        if not training or again:
            return None
        self.forward_at = self.scene.line()
        inner = {id(m.module) for m in self.wrapped()}
        if id(getattr(module, "_orig_mod", module)) in inner and self.bypass is None:
            self.bypass = self.forward_at
        self.through_ddp += type(module).__name__ == "DistributedDataParallel"
        return None

    def before_backward(self, losses: list[Any]) -> object:
        """Count backward passes, and those in which DDP exchanges gradients."""
        if self.scene.step > AT[-1]:
            return DONE
        wrapped = self.wrapped()
        self.backwards += 1
        synced = any(m.require_backward_grad_sync for m in wrapped)
        self.synced += synced
        self.last_at = ("", 0) if synced or not wrapped else self.scene.line()
        if not self.backward_at[0]:
            self.backward_at = self.scene.line()
        return None

    def before_step(self, optimizer: Any, number: int) -> object:
        """Sum up the parameters at the steps in AT."""
        if self.scene.step > AT[-1]:
            return DONE
        self.unsynced_at = self.last_at
        if self.scene.step not in AT or not self._several():
            return None
        inside, outside = self._compared()
        self.made_at = self.scene.maker_of(inside[0])[1] if inside and not self.made_at[0] else self.made_at
        for parameters, digests in ((inside, self.digests), (outside, self.outer)):
            with torch.no_grad():
                parts = [some(p).double() for p in parameters]
                sums = [torch.stack([x.sum(), x.abs().sum()]).cpu() for x in parts]
            digests |= {str(self.scene.step): [s.tolist() for s in sums]} if sums else {}
        self.shapes = [list(p.shape) for p in inside]
        if outside and not self.outside[0]:
            self.outside = self.scene.maker_of(outside[0])
        wrapped, dist = self.wrapped(), torch.distributed
        self.rank = dist.get_rank()  # read now, because a script leaves its group before it ends
        self.group = [*range(dist.get_world_size())]
        if wrapped:
            self.group = dist.get_process_group_ranks(wrapped[0].process_group)
        return None

    def _several(self) -> bool:
        dist = torch.distributed
        return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1

    def _compared(self) -> tuple[list[Any], list[Any]]:
        """Return parameters of DDP models and those trained outside them; without DDP, all parameters and none."""
        inside: dict[int, Any] = {}
        ignored: set[int] = set()
        for m in self.wrapped():
            names = getattr(m, "parameters_to_ignore", ())
            ignored |= {id(p) for name, p in m.module.named_parameters() if name in names}
            inside |= {id(p): p for p in m.module.parameters() if id(p) not in ignored}
        others = [p for p in self.scene.parameters() if id(p) not in inside.keys() | ignored and p.requires_grad]
        both = [list(inside.values()), others] if inside else [others, []]
        every = [p for of in both for p in of]
        self.fsdp = self.fsdp or any(hasattr(p, "to_local") or type(p).__name__ == "FlatParameter" for p in every)
        return tuple([p for p in of if not p.is_sparse] for of in both)

    def findings(self) -> list[dict[str, Any]]:
        """Return what this rank knows; `compare` decides."""
        if not self.digests:
            return []
        wrapped = self.wrapped()
        hooks = str([_compat.comm_hooks(m) for m in wrapped]).lower()
        grads = sum(p.grad is not None for p in self.scene.parameters())
        text = self.scene.text()
        others = self.large or self.point_to_point or any(word in text for word in OTHERS)
        row = {name: getattr(self, name) for name in KNOWN} | {
            "ddp": bool(wrapped),
            "others": others,
            "shared": self.data.shared_out(),
            "unsynced": bool(wrapped) and self.backwards > 0 and not self.synced,
            "by_hand": self.fsdp or self.weights or "local" in hooks or (others and not wrapped),
            "averages": any(word in text for word in ("all_reduce", "averag")),
            "cooperate": self.any or "DistributedSampler" in text,
            "reduced": len(self.reduced) / grads if grads else 0.0,
        }
        return [{"probe": "_replicas", **row}]


def compare(per_rank: Sequence[Sequence[dict[str, Any]]]) -> list[Match]:
    """Return the findings from the digests of one process group's ranks."""
    rows = [row for of in per_rank for row in of if row["probe"] == "_replicas"]
    rows = [row for row in rows if row["rank"] in rows[0]["group"]] if rows else []
    if len(rows) < 2 or any(row["shapes"] != rows[0]["shapes"] or row["ddp"] != rows[0]["ddp"] for row in rows):
        return []
    if any(row["by_hand"] for row in rows):
        return []
    apart = {number: _apart([row["digests"].get(number) for row in rows]) for number in rows[0]["digests"]}
    later = [n for n in apart if n != "0" and apart[n] and apart[n][0]]
    if not later or apart.get("0") is None:
        return _outside(rows)
    first = next((row for row in rows if row["bypass"]), rows[0])
    reason, place = _reason(first, bool(apart["0"][0]))
    words = {"different": apart[later[-1]][0], "tensors": len(first["shapes"]), "step": int(later[-1])}
    words["relative"] = max(apart[n][1] for n in later)
    return [matched("ranks-differ", tuple(place), **TEXTS["replicas"][reason], **words)] if reason else []


def _reason(row: dict[str, Any], start_differs: bool) -> tuple[str, Sequence[Any]]:
    """Return why the ranks' models differ, as a name in texts.toml, and the line; "" if it may be on purpose."""
    forward_at, backward_at, exchange_at = (row[f"{what}_at"] for what in ("forward", "backward", "exchange"))
    if not row["ddp"] and row["reduced"] >= 0.9:
        made_at = row["made_at"]
        started = "averaged-from-different-weights", made_at if made_at[0] else exchange_at
        return started if start_differs else ("averaged-late", exchange_at)
    if not row["ddp"]:
        meant = row["reduced"] or not (row["cooperate"] and (row["shared"] or not start_differs))
        return "" if meant else "not-wrapped", forward_at
    if row["bypass"]:
        return "bypassed", row["bypass"]
    if row["grad_at"][0]:
        return "autograd-grad", row["grad_at"]
    if row["unsynced"]:
        return "" if row["averages"] else "never-synchronised", backward_at
    if row["unsynced_at"][0]:
        return "last-not-synchronised", row["unsynced_at"]
    if start_differs:
        return "other-weights", forward_at
    return "wrapped", forward_at if row["through_ddp"] else backward_at


def _outside(rows: list[dict[str, Any]]) -> list[Match]:
    """Return a finding if parameters outside DDP differ at the last step but not the first (or data is split)."""
    first, steps = rows[0], list(rows[0]["outer"])
    if not first["ddp"] or len(steps) < 2 or any(row["others"] or list(row["outer"]) != steps for row in rows):
        return []
    apart = [_apart([row["outer"][n] for row in rows]) for n in steps]
    if not apart[0] or (apart[0][0] and not first["shared"]) or not apart[-1] or not apart[-1][0]:
        return []
    name, place = first["outside"]
    where = tuple(place) if place[0] else tuple(first["forward_at"])
    return [matched("outside-ddp", where, name=name or "what", different=apart[-1][0], step=steps[-1])]


def _apart(digests: list[list[list[float]] | None]) -> tuple[int, float] | None:
    """Return (tensors that differ between ranks, largest relative difference); None without comparable digests."""
    if any(d is None or len(d) != len(digests[0]) for d in digests):
        return None
    different, most = 0, 0.0
    for of in zip(*digests, strict=True):
        size = max(abs(s[1]) for s in of)
        gap = max(max(s[i] for s in of) - min(s[i] for s in of) for i in (0, 1))
        if math.isfinite(gap) and gap > SAME * size:
            different, most = different + 1, max(most, gap / size)
    return different, most
