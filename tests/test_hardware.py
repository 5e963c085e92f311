"""Which devices ranks get, and which backend goes with them: decided without a GPU being present."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from fakes import FakeNvml, card

from labs.kit import hardware, nvml
from labs.kit.errors import BadInput
from labs.kit.hardware import one_per_core_first, place, runs_on, usable_affinity
from labs.kit.host import Core, cores, cpu_list
from labs.kit.launch import run_on_ranks
from labs.kit.rank import backend_for

H100 = "NVIDIA H100 80GB HBM3"
REPORT = nvml.report


def test_auto_takes_gpus_if_there_are_enough_otherwise_cores():
    found = hardware.devices(2, gpu_names=[H100] * 8, cores=range(1))
    assert [(d.kind, d.index, d.cores) for d in found] == [("cuda", i, ()) for i in range(2)]
    found = hardware.devices(2, gpu_names=[H100], cores=range(2))
    assert [(d.kind, d.cores) for d in found] == [("cpu", (i,)) for i in range(2)]
    for n_gpus, n_cores, most in ((8, 2, 8), (0, 2, 2)):
        with pytest.raises(BadInput, match=f"nproc={most}"):
            hardware.devices(64, gpu_names=[H100] * n_gpus, cores=range(n_cores))


def test_cores_are_those_of_the_affinity_not_the_first_numbers():
    assert [d.cores for d in hardware.devices(2, gpu_names=[], cores=(5, 9, 11))] == [(5,), (9,)]


def test_kind_cuda_names_every_way_out():
    with pytest.raises(BadInput, match=r'nproc=1, device="cuda-shared".*device="cpu"'):
        hardware.devices(2, kind="cuda", gpu_names=[H100], cores=range(8))
    with pytest.raises(BadInput, match='device="cpu"') as e:
        hardware.devices(1, kind="cuda", gpu_names=[], cores=range(8))
    assert "nproc=0" not in str(e.value)


def test_kind_cpu_ignores_gpus_and_unknown_kinds_are_refused():
    assert {d.kind for d in hardware.devices(2, kind="cpu", gpu_names=[H100] * 8, cores=range(4))} == {"cpu"}
    with pytest.raises(BadInput, match="tpu"):
        hardware.devices(1, kind="tpu", gpu_names=[], cores=[0])


def test_sharing_one_gpu_is_only_on_request():
    shared = hardware.devices(3, kind="cuda-shared", gpu_names=[H100, H100], cores=[0])
    assert [(d.kind, d.index) for d in shared] == [("cuda-shared", 0)] * 3
    with pytest.raises(BadInput, match="cuda-shared"):
        hardware.devices(1, kind="cuda-shared", gpu_names=[], cores=[0])


def test_backend_belongs_to_the_device():
    own, shared, core = (hardware.Device(k, 0, "") for k in ("cuda", "cuda-shared", "cpu"))
    assert backend_for(own, nccl=True) == "cpu:gloo,cuda:nccl"
    assert [backend_for(d, nccl) for d, nccl in ((own, False), (shared, True), (core, True))] == ["gloo"] * 3


def names(fake, monkeypatch, built=True, **environ):
    monkeypatch.setattr("torch.backends.cuda.is_built", lambda: built)
    return hardware.visible_gpu_names(nvml.report(fake), environ)


def test_visible_names_follow_cuda(monkeypatch):
    fake = FakeNvml([card("GPU-01", "A"), card("GPU-02", "B")])
    assert names(fake, monkeypatch, CUDA_DEVICE_ORDER="PCI_BUS_ID", CUDA_VISIBLE_DEVICES="1,0") == ["B", "A"]
    assert names(fake, monkeypatch, CUDA_VISIBLE_DEVICES="") == []
    assert names(fake, monkeypatch, built=False) == []
    assert names(fake, monkeypatch) == ["GPU 0", "GPU 1"]  # mixed cards: CUDA's order is not guessed


def test_a_mig_card_is_one_device(monkeypatch):
    fake = FakeNvml([card(mig=(1, 1), mig_uuids=["MIG-1", "MIG-2"])])
    assert len(names(fake, monkeypatch)) == 1


def test_without_nvml_torch_counts(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert names(FakeNvml(init_error=12), monkeypatch) == ["GPU 0", "GPU 1"]


@pytest.mark.parametrize(
    "capability, arch_list, how",
    [
        ((8, 9), ["sm_80", "sm_86"], "native"),
        ((9, 0), ["sm_80"], None),
        ((9, 0), ["sm_80", "compute_80"], "ptx"),
        ((10, 3), ["sm_100a"], None),
        ((8, 0), ["sm_86"], None),
        ((9, 0), ["gfx90a"], None),
    ],
)
def test_kernels_for_a_card(capability, arch_list, how):
    assert runs_on(capability, arch_list) == how


def test_starting_no_cuda_holds_in_a_build_with_cudnn(monkeypatch):
    """torch.backends.cudnn.version() asks each GPU for its capability in torch 2.13, which starts CUDA."""
    import torch

    def started(*_):
        raise AssertionError("CUDA was started")

    for name in ("get_device_capability", "get_device_properties", "_lazy_init", "current_device"):
        monkeypatch.setattr(torch.cuda, name, started)
    monkeypatch.setattr(torch.backends.cudnn, "version", started)
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    monkeypatch.setattr(torch._C, "_cudnn", type("Cudnn", (), {"getVersionInt": staticmethod(lambda: 91002)}), False)
    assert hardware.build()["cudnn"] == 91002


def test_a_kernel_that_reads_all_of_the_hardware_has_no_cuda_driver_mapped():
    code = (
        "import torch; from labs.kit import hardware, launch, preflight, record;"
        "hardware.place(1); hardware.summary(); preflight.gather();"
        "hardware.why_cores(hardware.place(1)); assert not torch.cuda.is_initialized();"
        "maps = open('/proc/self/maps').read() if __import__('os').path.exists('/proc/self/maps') else '';"
        "assert 'libcuda.so' not in maps"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=250)


def gpus(monkeypatch, n, **changes):
    """This torch has CUDA, and NVML lists `n` cards."""
    fake = FakeNvml([card(f"GPU-0{i}", **changes) for i in range(n)])
    monkeypatch.setattr(hardware.nvml, "report", lambda *_, **how: REPORT(fake, **how))
    monkeypatch.setattr("torch.backends.cuda.is_built", lambda: True)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("COURSE_OVERSUBSCRIBE", raising=False)


def test_a_gpu_that_ranks_must_share_is_cuda_shared(monkeypatch):
    """NCCL refuses two ranks on one GPU; with gloo all ranks must use it, also the one that has a GPU to itself."""
    gpus(monkeypatch, 2)
    found = hardware.place(3, "cuda", oversubscribe=True)
    assert [(d.kind, d.index) for d in found] == [("cuda-shared", 0), ("cuda-shared", 1), ("cuda-shared", 0)]
    assert {backend_for(d, nccl=True) for d in found} == {"gloo"}
    assert [d.kind for d in hardware.place(2, "cuda", oversubscribe=True)] == ["cuda"] * 2
    gpus(monkeypatch, 1)
    assert [d.kind for d in hardware.place(2, "cuda", oversubscribe=True)] == ["cuda-shared"] * 2


def test_an_exclusive_gpu_is_not_shared(monkeypatch):
    gpus(monkeypatch, 1, mode=3)
    assert hardware.place(1)[0].kind == "cuda"
    for args in ((2, "cuda-shared"), (2, "cuda", True)):
        with pytest.raises(BadInput, match=r"exclusive-process mode.*nvidia-smi -c DEFAULT") as e:
            hardware.place(*args)
        assert "\n" not in str(e.value)
    with pytest.raises(BadInput, match="GPU 0"):
        hardware.require_shareable({0})
    hardware.require_shareable(set())


def test_ranks_that_run_on_cores_beside_too_few_gpus_are_told_of(monkeypatch):
    gpus(monkeypatch, 1)
    two = [hardware.Device("cpu", i, "", (i,)) for i in range(2)]
    assert hardware.why_cores(two) == (
        "2 ranks run on CPU cores because torch sees 1 GPU and each rank needs its own: nproc=1 uses it, "
        'device="cuda-shared" lets all ranks share GPU 0'
    )
    assert hardware.why_cores(two, "cpu") == "" == hardware.why_cores([hardware.Device("cuda", 0, "")])
    gpus(monkeypatch, 0)
    assert hardware.why_cores(two) == ""


# -- cores, hyper-threads and NUMA nodes


def machine_tree(root: Path, sockets: int = 2, per_socket: int = 4, adjacent: bool = False) -> Path:
    """A /sys of a machine with 2 hyper-threads per core: numbered (0, n), (1, n + 1)... or `adjacent` (0, 1), (2, 3)...

    Each socket is a NUMA node.
    """
    n = sockets * per_socket
    threads = [(2 * core, 2 * core + 1) if adjacent else (core, core + n) for core in range(n)]
    for siblings in threads:
        for cpu in siblings:
            write(root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list", siblings)
    for node in range(sockets):
        own = threads[node * per_socket : (node + 1) * per_socket]
        write(root / f"sys/devices/system/node/node{node}/cpulist", sum(own, ()))
    return root


def write(path: Path, cpus: tuple[int, ...]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(",".join(map(str, cpus)) + "\n")


@pytest.mark.parametrize("adjacent", [False, True])
def test_hyper_threads_are_one_core_and_nodes_are_known(tmp_path, adjacent):
    found = cores(range(16), machine_tree(tmp_path, adjacent=adjacent))
    assert [c.cpus for c in found][:2] == ([(0, 1), (2, 3)] if adjacent else [(0, 8), (1, 9)])
    assert [c.node for c in found] == [0] * 4 + [1] * 4
    assert cores([9], machine_tree(tmp_path)) == [Core(1, (9,), 0)], "one thread of it may be used"


@pytest.mark.parametrize("adjacent", [False, True])
def test_ranks_meet_on_a_core_only_when_no_other_is_left(tmp_path, adjacent):
    root = machine_tree(tmp_path, sockets=1, adjacent=adjacent)
    firsts, seconds = ((0, 2, 4, 6), (1, 3, 5, 7)) if adjacent else ((0, 1, 2, 3), (4, 5, 6, 7))
    assert one_per_core_first(range(8), root) == firsts + seconds
    assert one_per_core_first((2, 3, 5), root) == ((2, 5, 3) if adjacent else (2, 3, 5))
    assert one_per_core_first(range(8), tmp_path / "nothing") == tuple(range(8)), "nothing is known"


def test_ranks_get_cores_of_their_own_also_under_a_quota(tmp_path, monkeypatch):
    root = machine_tree(tmp_path, sockets=1, adjacent=True)
    monkeypatch.setattr(hardware, "affinity", lambda: tuple(range(8)))
    for quota, expected in ((8, (0, 2, 4, 6, 1, 3, 5, 7)), (3, (0, 2, 4))):
        monkeypatch.setattr(hardware, "core_count", lambda quota=quota: quota)
        assert usable_affinity(root) == expected


def test_without_sys_every_cpu_is_a_core(tmp_path):
    assert cores([0, 1], tmp_path) == [Core(0, (0,), 0), Core(1, (1,), 0)]
    assert cpu_list("0-2,8\n") == (0, 1, 2, 8) and cpu_list("") == ()


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system has no affinity")
def test_ranks_stay_on_the_cores_of_their_launcher():
    all_cores = os.sched_getaffinity(0)
    own = {max(all_cores)}
    os.sched_setaffinity(0, own)
    try:
        assert [d.cores for d in place(1, "cpu")] == [(max(all_cores),)]
        assert run_on_ranks(lambda: os.sched_getaffinity(0), 2) == [own, own]
        if len(all_cores) > 1:
            with pytest.raises(BadInput, match="this machine has 1 usable core"):
                place(2, "cpu")
    finally:
        os.sched_setaffinity(0, all_cores)
