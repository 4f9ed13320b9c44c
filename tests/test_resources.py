"""How many models are compiled at once, by what the system says of cores and memory, inside of containers too."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from conftest import write_files

from hatch_aoti.build.resources import Resources, choose_job_count, memory_kills, read_resources

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

GIB = 1 << 30
MEMINFO = f"MemTotal: {256 * GIB >> 10} kB\nMemAvailable: {200 * GIB >> 10} kB\n"
V2 = "30 23 0:26 / /sys/fs/cgroup ro,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = (
    "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755\n"
    "32 31 0:29 {root} /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
    "35 31 0:32 {root} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
)


@pytest.fixture(autouse=True)
def _many_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(64), raising=False)


def system(folder: Path, files: Mapping[str, object], *, cgroup: str = "0::/\n", mountinfo: str = V2) -> Path:
    """Make a folder with the files of a system: those of control groups, below sys/fs/cgroup, are `files`."""
    proc = {"proc/meminfo": MEMINFO, "proc/self/cgroup": cgroup, "proc/self/mountinfo": mountinfo}
    return write_files(folder, proc | {f"sys/fs/cgroup/{name}": f"{text}\n" for name, text in files.items()})


def test_outside_of_containers_memory_and_cores_count(tmp_path: Path):
    found = read_resources(system(tmp_path, {}))
    assert (found.cores, found.memory) == (64, 200 * GIB)
    assert choose_job_count(100, found).count == 64
    assert choose_job_count(100, found).reason == "64 cores for this process"
    assert choose_job_count(3, found) == choose_job_count(3, Resources(3, "", None, ""))


def test_a_container_of_version_2_with_8_gb_gets_two_jobs_and_the_reason(tmp_path: Path):
    files = {"memory.max": 8 * GIB, "memory.current": GIB, "memory.stat": f"anon 5\ninactive_file {GIB // 2}"}
    found = read_resources(system(tmp_path, files))
    assert found.memory == 8 * GIB - GIB + GIB // 2
    chosen = choose_job_count(64, found)
    assert chosen.count == 2
    assert chosen.reason == "7.5 GiB of memory free below the limit of its control group, 3 GiB for each"


def test_processor_time_of_version_2_counts_in_cores(tmp_path: Path):
    found = read_resources(system(tmp_path, {"cpu.max": "350000 100000", "memory.max": "max"}))
    assert choose_job_count(64, found).count == 3
    assert choose_job_count(64, found).reason == "3 cores (the limit of its control group is 3.5)"
    assert read_resources(system(tmp_path, {"cpu.max": "max 100000"})).cores == 64
    assert read_resources(system(tmp_path, {"cpu.max": "50000 100000"})).cores == 1


def test_the_narrowest_of_nested_groups_counts(tmp_path: Path):
    files = {
        "memory.max": "max",
        "pod/memory.max": 20 * GIB,
        "pod/memory.current": 10 * GIB,
        "pod/box/memory.max": 16 * GIB,
        "pod/box/memory.high": 14 * GIB,
        "pod/box/memory.current": 2 * GIB,
        "pod/cpu.max": "200000 100000",
        "pod/box/cpu.max": "max 100000",
        "other/memory.max": 1,
    }
    found = read_resources(system(tmp_path, files, cgroup="0::/pod/box\n"))
    assert (found.cores, found.memory) == (2, 10 * GIB)


def test_a_full_group_still_gets_one_job(tmp_path: Path):
    found = read_resources(system(tmp_path, {"memory.max": GIB, "memory.current": 2 * GIB}))
    assert found.memory == 0
    assert choose_job_count(5, found).count == 1


@pytest.mark.parametrize("root", ["/", "/docker/0123"])
def test_version_1_has_other_files_and_a_mount_may_show_a_part(tmp_path: Path, root: str):
    cgroup = "9:name=systemd:/\n5:memory:/docker/0123\n4:cpu,cpuacct:/docker/0123\n"
    inside = "" if root != "/" else "docker/0123/"
    files = {
        f"memory/{inside}memory.limit_in_bytes": 9 * GIB,
        f"memory/{inside}memory.usage_in_bytes": 2 * GIB,
        f"memory/{inside}memory.stat": f"cache 1\ntotal_inactive_file {GIB}",
        f"cpu,cpuacct/{inside}cpu.cfs_quota_us": 400000,
        f"cpu,cpuacct/{inside}cpu.cfs_period_us": 100000,
        f"memory/{inside}memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 3",
    }
    home = system(tmp_path, files, cgroup=cgroup, mountinfo=V1.format(root=root))
    found = read_resources(home)
    assert (found.cores, found.memory) == (4, 8 * GIB)
    assert memory_kills(home) == 3


def test_without_a_limit_version_1_has_a_large_number_and_minus_one(tmp_path: Path):
    files = {
        "memory/memory.limit_in_bytes": 9223372036854771712,
        "memory/memory.usage_in_bytes": GIB,
        "cpu,cpuacct/cpu.cfs_quota_us": -1,
        "cpu,cpuacct/cpu.cfs_period_us": 100000,
    }
    mountinfo = V1.format(root="/")
    found = read_resources(system(tmp_path, files, cgroup="5:memory:/\n4:cpu,cpuacct:/\n", mountinfo=mountinfo))
    assert (found.cores, found.memory) == (64, 200 * GIB)


def test_in_a_namespace_of_its_own_the_mount_is_the_group(tmp_path: Path):
    found = read_resources(system(tmp_path, {"memory.max": 6 * GIB}, cgroup="0::/../../elsewhere\n"))
    assert found.memory == 6 * GIB


def test_kills_for_memory_are_counted_where_the_system_counts_them(tmp_path: Path):
    assert memory_kills(system(tmp_path / "a", {"memory.events": "low 0\noom 5\noom_kill 2"})) == 2
    assert memory_kills(system(tmp_path / "b", {"memory.max": "max"})) is None


def test_a_system_that_says_nothing_or_nonsense_limits_nothing(tmp_path: Path):
    assert read_resources(tmp_path).memory is None
    files = {"memory.max": "plenty", "cpu.max": "1 0", "memory.stat": "\n\nx"}
    found = read_resources(
        system(tmp_path, files, cgroup="\n:\n0::\n", mountinfo="nonsense\n" + V2 + " - \n1 2 3 - x\n")
    )
    assert (found.cores, found.memory) == (64, 200 * GIB)
