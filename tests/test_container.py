"""Limits of a container, read from made-up control group trees of both layouts."""

from __future__ import annotations

import os

import pytest

from labs.kit import host


def tree(root, files):
    """Write {path: text} under `root` and return it."""
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return root


def test_quotas_and_limits_are_read_from_both_layouts():
    for text, cores in (("max 100000", None), ("150000 100000", 1.5), ("100000", 1.0), ("", None)):
        assert host.cpu_quota_v2(text) == cores
    for quota, cores in (("-1", None), ("50000", 0.5), ("0", None)):
        assert host.cpu_quota_v1(quota, "100000") == cores
    for text, limit in (("max", None), ("9223372036854771712", None), ("1073741824", 2**30), ("", None)):
        assert host.memory_limit(text) == limit


def test_usable_cores_respects_affinity_and_quota():
    assert host.usable_cores({0, 1, 2, 3}, None) == 4 and host.usable_cores({5}, 4.0) == 1
    assert host.usable_cores(range(64), 0.5) == 1 and host.usable_cores(range(8), 2.7) == 2


def test_v2_takes_the_tightest_limit_on_the_way_up(tmp_path):
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "0::/pod/app\n",
            "sys/fs/cgroup/cpu.max": "max 100000",
            "sys/fs/cgroup/pod/cpu.max": "200000 100000",
            "sys/fs/cgroup/pod/memory.max": "4294967296",
            "sys/fs/cgroup/pod/app/cpu.max": "800000 100000",
            "sys/fs/cgroup/pod/app/memory.max": "max",
        },
    )
    assert host.cpu_quota(root) == 2.0
    assert host.memory_limit_bytes(root) == 2**32


@pytest.mark.parametrize("names", host.MEMORY_FILES)
def test_what_the_group_uses_is_not_available(tmp_path, names):
    """Files that can be dropped are; of two limits on the way up the one that leaves less counts."""
    limit, used, cache = names
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/pod/app\n0::/pod/app\n",
            f"sys/fs/cgroup/memory/pod/{limit}": f"{2**32}",
            f"sys/fs/cgroup/memory/pod/{used}": f"{2**31}",
            "sys/fs/cgroup/memory/pod/memory.stat": f"anon 5\n{cache} {2**29}\n",
            f"sys/fs/cgroup/memory/pod/app/{limit}": f"{2**30}",
            f"sys/fs/cgroup/memory/pod/app/{used}": f"{2**30 - 7}",
        },
    )
    assert host.memory_room_bytes(root) == 7
    assert host.container(root).memory_available_bytes == 7
    (root / f"sys/fs/cgroup/memory/pod/app/{limit}").unlink()
    assert host.memory_room_bytes(root) == 2**32 - 2**31 + 2**29


def test_v1_with_joint_controllers(tmp_path):
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/box\n2:cpu,cpuacct:/box\n1:name=systemd:/\n",
            "sys/fs/cgroup/cpu,cpuacct/box/cpu.cfs_quota_us": "300000",
            "sys/fs/cgroup/cpu,cpuacct/box/cpu.cfs_period_us": "100000",
            "sys/fs/cgroup/memory/box/memory.limit_in_bytes": "2147483648",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
        },
    )
    assert host.cpu_quota(root) == 3.0
    assert host.memory_limit_bytes(root) == 2**31


def test_container_that_sees_only_the_top_of_its_tree(tmp_path):
    """Docker with v1: the path in /proc is the host's, and only the container's own group is mounted, as the top."""
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "2:cpu:/docker/0123abcd\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "150000",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
        },
    )
    assert host.cpu_quota(root) == 1.5


def test_no_control_groups_at_all(tmp_path):
    assert host.cpu_quota(tmp_path) is None and host.memory_limit_bytes(tmp_path) is None
    assert host.container(tmp_path).shm_bytes is None


def test_affinity_is_what_the_scheduler_allows():
    if not hasattr(os, "sched_setaffinity"):
        pytest.skip("no affinity on this system")
    allowed = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(allowed)})
        assert host.affinity() == (min(allowed),) and host.core_count() == 1
    finally:
        os.sched_setaffinity(0, allowed)
