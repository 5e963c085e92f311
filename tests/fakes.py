"""Stand-ins for hardware that a test machine does not have: an NVML with any cards, broken in any way."""

from __future__ import annotations

from types import SimpleNamespace

NOT_SUPPORTED, NO_PERMISSION, LIBRARY_NOT_FOUND, GPU_IS_LOST, MISMATCH = 3, 4, 12, 15, 18


class NVMLError(Exception):
    """As pynvml's: carries the code in `value`."""

    def __init__(self, value: int) -> None:
        super().__init__(f"NVML error {value}")
        self.value = value


def card(uuid: str = "GPU-0000", name: str = "NVIDIA H100 80GB HBM3", **changes) -> SimpleNamespace:
    """A card that answers everything; `changes` override single answers."""
    facts = {
        "uuid": uuid,
        "name": name,
        "capability": (9, 0),
        "mig": (0, 0),
        "mig_uuids": [],
        "processes": [],
        "throttle": 1,
        "lost": False,
        "mode": 0,
        "mig_gib": 10,
    }
    return SimpleNamespace(**(facts | changes))


class FakeNvml:
    """The part of pynvml that the course calls.

    `unsupported` names functions that raise NotSupported; `missing` ones are absent, as in an old binding;
    `init_error` is the code nvmlInit fails with.
    """

    NVMLError = NVMLError

    def __init__(self, cards=(), *, init_error=None, unsupported=(), missing=()) -> None:
        self.cards, self.init_error, self.unsupported, self.missing = list(cards), init_error, unsupported, missing
        self.open = 0
        self.calls = 0
        """Queries so far."""

    def __getattribute__(self, name):
        get = object.__getattribute__
        if name.startswith("nvml"):
            self.calls += 1
        if name.startswith("nvml") and name in get(self, "missing"):
            raise AttributeError(name)
        if name.startswith("nvml") and name in get(self, "unsupported"):
            return _raise_not_supported
        return get(self, name)

    def nvmlInit(self):
        if self.init_error is not None:
            raise NVMLError(self.init_error)
        self.open += 1

    def nvmlShutdown(self):
        self.open -= 1

    def nvmlSystemGetDriverVersion(self):
        return "580.1"

    def nvmlSystemGetCudaDriverVersion_v2(self):
        return 13000

    def nvmlDeviceGetCount(self):
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, i):
        if self.cards[i].lost:
            raise NVMLError(GPU_IS_LOST)
        return self.cards[i]

    def nvmlDeviceGetName(self, h):
        return h.name

    def nvmlDeviceGetUUID(self, h):
        return h if isinstance(h, str) else h.uuid  # a MIG handle is its UUID here

    def nvmlDeviceGetHandleByUUID(self, uuid):
        return uuid

    def nvmlDeviceGetComputeMode(self, h):
        return h.mode

    def nvmlDeviceGetMemoryInfo(self, h):
        if isinstance(h, str):  # a MIG instance
            gib = next(c.mig_gib for c in self.cards if h in c.mig_uuids)
            return SimpleNamespace(total=gib * 2**30, used=2**20)
        return SimpleNamespace(total=80 * 2**30, used=2**30)

    def nvmlDeviceGetCudaComputeCapability(self, h):
        return h.capability

    def nvmlDeviceGetPowerUsage(self, h):
        return 70_500

    def nvmlDeviceGetEnforcedPowerLimit(self, h):
        return 700_000

    def nvmlDeviceGetClockInfo(self, h, kind):
        return 345

    def nvmlDeviceGetMaxClockInfo(self, h, kind):
        return 1980

    def nvmlDeviceGetTemperature(self, h, sensor):
        return 30

    def nvmlDeviceGetUtilizationRates(self, h):
        return SimpleNamespace(gpu=7, memory=0)

    def nvmlDeviceGetMigMode(self, h):
        return h.mig

    def nvmlDeviceGetMaxMigDeviceCount(self, h):
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, h, i):
        if i >= len(h.mig_uuids):
            raise NVMLError(6)
        return h.mig_uuids[i]

    def nvmlDeviceGetCurrentClocksEventReasons(self, h):
        return h.throttle

    def nvmlDeviceGetComputeRunningProcesses(self, h):
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in h.processes]

    def nvmlDeviceGetGraphicsRunningProcesses(self, h):
        return []


def _raise_not_supported(*_):
    raise NVMLError(NOT_SUPPORTED)
