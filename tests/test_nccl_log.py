"""NCCL's log and nvidia-smi's table in words, on samples of four machines and on lines of many versions."""

from __future__ import annotations

import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import nccl_samples
import pytest

from labs import nccl_log
from labs.kit import supervise
from labs.kit.errors import BadInput
from labs.kit.record import Record, Records
from labs.nccl_log import nccl

TOLD = {
    "2xRTX4090": (
        "2 ranks; ran on 1 machine.",
        "2 of 2 links (SHM/direct: 2) go through the host's memory",
        "1 pair of GPUs: PHB",
    ),
    "8xA100": (
        "8 ranks; ran on 1 machine.",
        "24 channels",
        "go from GPU memory to GPU memory",
        "28 pairs of GPUs: NV12",
        "12 links each",
    ),
    "8xH100": ("8 ranks; ran on 1 machine.", "P2P/CUMEM: 8", "28 pairs of GPUs: NV18"),
    "2x8xH100": ("16 ranks; ran on 2 machines.", "2 of 16 links (NET/IB/GDRDMA: 2) go through a network card"),
}


@pytest.mark.parametrize("sample", TOLD)
def test_what_is_said_of_each_machine(sample):
    text = "\n".join(nccl_log.answer(*nccl_samples.SAMPLES[sample]))
    assert all(words in text for words in TOLD[sample])
    assert "not understood" not in text
    assert ("No pair of GPUs talks directly" in text) == (sample == "2xRTX4090")


def words(*lines: str) -> str:
    log = nccl.read(f"node0:1:2 [0] NCCL INFO {line}" for line in lines)
    return "\n".join(nccl.in_words(log))


@pytest.mark.parametrize(
    "line, link",
    [
        ("Channel 00/0 : 1[1] -> 0[0] via P2P/CUMEM/read", nccl.Link(1, 0, "P2P/CUMEM")),
        ("Channel 02 : 3[3] -> 0[0] via SHM/direct/direct", nccl.Link(3, 0, "SHM/direct")),
        ("Ring 00 : 34 -> 33 [send] via NET/Socket/0", nccl.Link(34, 33, "NET/Socket")),
        ("Channel 00 : 2[a000] -> 3[b000] via P2P/direct pointer", nccl.Link(2, 3, "P2P/direct")),
        ("Channel 00 : 2[a000] -> 3[b000] via direct shared memory", nccl.Link(2, 3, "SHM/direct")),
        ("Channel 03/0 : 13[5] -> 4[4] [receive] via NET/IB/3/GDRDMA", nccl.Link(13, 4, "NET/IB/GDRDMA")),
        ("Channel 03/0 : 13[5] -> 4[4] [send] via NET/IB/3(1)/GDRDMA/Shared", nccl.Link(13, 4, "NET/IB/GDRDMA/Shared")),
        (
            "Channel 01/0 : 8[0] -> 0[0] [send] via NET/AWS Libfabric/1/GDRDMA",
            nccl.Link(8, 0, "NET/AWS Libfabric/GDRDMA"),
        ),
    ],
)
def test_links_as_versions_write_them(line, link):
    assert list(nccl.read([f"host-7:60725:60750 [2] NCCL INFO {line}"]).links) == [link]


def test_what_is_before_a_line_does_not_matter():
    line = "[1,0]<stdout>:5873af64cf59:10158:10560 [0] NCCL INFO Channel 00/02 :    0   1"
    assert nccl.read([line, "epoch 1 loss 0.5"]).channels == {0: (0, 1)}


@pytest.mark.parametrize(
    "lines, told, untold",
    [
        (["Channel 00/0 : 0[0] -> 8[0] [send] via NET/Socket/0"], "The network is TCP", "GPUDirect"),
        (["Channel 00/0 : 0[0] -> 8[0] [send] via NET/IB/0"], "without GPUDirect RDMA", "TCP"),
        (["Channel 00/0 : 0[0] -> 8[0] [send] via NET/IB/0/GDRDMA"], "NET", "without GPUDirect"),
        (
            ["Channel 00/0 : 0[0] -> 1[1] via P2P/IPC", "Channel 00/0 : 1[1] -> 2[2] via SHM/direct"],
            "slowest link",
            "No pair of GPUs",
        ),
        (["NCCL_P2P_DISABLE set by environment to 1."], "NCCL_P2P_DISABLE=1 is set: it forbids", "NCCL_IB"),
        (["NCCL_IB_DISABLE set by environment to 0."], "NCCL_IB_DISABLE=0 is set.", "forbids"),
        (["NCCL_DEBUG set by environment to INFO."], "NCCL_DEBUG=INFO is set.", "forbids"),
        (["something new that no version wrote"], "1 of 1 NCCL lines were not understood", "links"),
    ],
)
def test_findings(lines, told, untold):
    said = words(*lines)
    assert told in said and untold not in said


@pytest.mark.parametrize("place", ["transport/p2p.cc:275 ", "transport/p2p.cc:275 (p2pMap) ", "", "init.cc:9 "])
def test_warnings_are_counted_with_the_place_in_the_source_before_them(place):
    log = nccl.read([f"a:1:2 [-1] {place}NCCL WARN Cuda failure 'peer access'"] * 3)  # all that NCCL_DEBUG=WARN writes
    assert "Warned 3 times: Cuda failure 'peer access'" in list(nccl.in_words(log))


@pytest.mark.parametrize(
    "written, told",
    [
        (
            "   0   1   2   3",
            "each with a ring: 0 -> 1 -> 2 -> 3 and so on (NCCL wrote 4 of 64 ranks)",
        ),  # up to 2.2x: 20 ranks
        ("  0  1  2  3  ...", "each with a ring: 0 -> 1 -> 2 and so on (NCCL wrote 3 of 64 ranks)"),
        (
            "  0  1  2 63...",
            "each with a ring: 0 -> 1 -> 2 and so on (NCCL wrote 3 of 64 ranks)",
        ),  # 63 may have been 630
    ],
)
def test_a_ring_of_many_ranks_is_cut_by_nccl(written, told):
    size = "comm 0x7f rank 0 nranks 64 cudaDev 0 nvmlDev 0 busId 1000 commId 0xa - Init START"
    said = words(size, f"Channel 00/02 :{written}", f"Channel 01/02 :{written}")
    assert told in said and "not understood" not in said


@pytest.mark.parametrize("largest_first", [True, False])
def test_rings_are_those_of_the_largest_communicator(largest_first):
    size = "ncclCommInitRankConfig comm 0x7f rank 0 nranks {} cudaDev 0 nvmlDev 0 busId 1000 commId {} - Init START"
    world = [size.format(4, "0xa"), "Channel 00/01 : 0 1 3 2"]
    pair = [size.format(2, "0xb"), "Channel 00/02 : 0 1", "Channel 01/02 : 0 1", size.format(2, "0xc")]
    said = words(*world, *pair) if largest_first else words(*pair, *world)
    assert "3 communicators (1 of 4, 2 of 2 ranks)" in said and "1 channel, each with a ring: 0 -> 1 -> 3" in said


@pytest.mark.parametrize("text", ["", "loss 0.5\n" * 100, "\x00\xff", "NCCL_DEBUG=INFO"])
def test_a_file_that_is_no_log(text):
    with pytest.raises(BadInput, match="it contains no NCCL lines"):
        nccl.read(text.splitlines())


def test_topology_with_network_cards_and_underlined_head():
    text = "\x1b[4m\tGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\x1b[0m\nGPU0\t X \tNV12\tSYS\tPXB\t0-15\n"
    text += "GPU1\tNV12\t X \tSYS\tPXB\t0-15\nGPU2\tSYS\tSYS\t X \tSYS\t16-31\nNIC0\tPXB\tPXB\tSYS\t X \n"
    assert nccl.read_topology(text) == {("GPU0", "GPU1"): "NV12", ("GPU0", "GPU2"): "SYS", ("GPU1", "GPU2"): "SYS"}
    assert "The pairs differ" in " ".join(nccl.topology_in_words(nccl.read_topology(text)))


def test_more_than_ten_gpus_are_all_read():
    assert len(nccl.read_topology(nccl_samples.topology(16, "NV6"))) == 16 * 15 / 2


def test_no_topology():
    with pytest.raises(BadInput, match="no table of GPUs"):
        nccl.read_topology("No devices were found")


@pytest.mark.parametrize(
    "arguments, told",
    [
        ((), "name a log"),
        (("nowhere.log",), "nowhere.log: No such file"),
        (("--sample", "a.log"), "name a log, or --sample"),
    ],
)
def test_the_command_refuses_in_one_line(arguments, told, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "labs.nccl_log", *arguments], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 2 and told in done.stderr and not done.stdout
    assert "Traceback" not in done.stderr


def test_the_command_reads_what_ranks_wrote_into_many_files(tmp_path):
    log, topology = nccl_samples.SAMPLES["8xA100"]
    lines = log.splitlines(keepends=True)
    for name, text in (("a.log", lines[:40]), ("b.log", lines[40:]), ("topology.txt", [topology])):
        (tmp_path / name).write_text("".join(text))
    command = [sys.executable, "-m", "labs.nccl_log", "a.log", "b.log", "--topology", "topology.txt"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0 and done.stdout.splitlines() == list(nccl_log.answer(log, topology))


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        (["4 Bytes -> Algo 0 proto 0 time 25.2", "65536 Bytes -> Algo 0 proto 1 time 30.1"],
         "For collectives, NCCL chose Tree with LL at 4 B; Tree with LL128 at 64 KiB."),
        (["AllReduce: 4096 Bytes -> Algo RING proto LL channel{Lo..Hi}={0..3}",
          "AllReduce: 8192 Bytes -> Algo RING proto LL channel{Lo..Hi}={0..3}",
          "AllReduce: 1073741824 Bytes -> Algo NVLS proto SIMPLE channel{Lo..Hi}={0..15}"],
         "For AllReduce, NCCL chose Ring with LL from 4 KiB to 8 KiB; NVLS with Simple at 1 GiB."),
        (["Connected all rings"], "add NCCL_DEBUG_SUBSYS=INIT,GRAPH,TUNING"),
    ],
)  # fmt: skip
def test_what_nccl_chose_for_each_size(lines, told):
    assert told in words(*lines)


def fake_process(monkeypatch, writes: str | None, code: int | None):
    """A sweep that writes one record and this log into its folder, and ends with `code`; None: it never ends."""
    asked = {}

    class Process:
        def wait(self, seconds):
            if code is None:
                raise subprocess.TimeoutExpired("sweep", seconds)
            return code

    @contextmanager
    def started(command, **options):
        asked.update(command=command, **options)
        if writes is not None:
            Records([Record("hardware_probe", "busbw_b_s", "B/s", (1e9,))]).save(command[command.index("--out") + 1])
            Path(options["env"]["NCCL_DEBUG_FILE"].replace("%p", "7")).write_text(writes)
        yield Process()

    monkeypatch.setattr(supervise, "started", started)
    return asked


def test_a_sweep_returns_its_records_and_nccls_log(monkeypatch):
    asked = fake_process(monkeypatch, "a:1:2 [0] NCCL INFO Connected all rings\n", 1)  # 1: the machine lacks something
    records, log = nccl_log.all_reduce_sweep(2)
    assert records.one("busbw_b_s").value == 1e9 and "Connected all rings" in log
    assert asked["env"]["NCCL_DEBUG_SUBSYS"] == "INIT,GRAPH,TUNING" and "--nproc" in asked["command"]
    assert asked["command"][asked["command"].index("--nproc") + 1] == "2"


@pytest.mark.parametrize(("code", "told"), [(1, "exit code 1"), (None, "took more than")])
def test_a_sweep_that_fails_says_how_to_see_why(monkeypatch, code, told):
    fake_process(monkeypatch, None, code)
    with pytest.raises(RuntimeError, match=f"{told}.*in a terminal to see why"):
        nccl_log.all_reduce_sweep(2)
