"""How many models are compiled at once: what cores and memory allow, where limits of a container count as well.

Linux says so in files: what is free in /proc/meminfo, what this process may use in the folders of its control groups,
version 1 or 2 (https://docs.kernel.org/admin-guide/cgroup-v2.html, and cgroup-v1/memory.html beside it).
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["JobCount", "Resources", "choose_job_count", "memory_kills", "read_resources"]

_MEMORY_PER_JOB = 3 << 30  # bytes; one g++ on torch's headers takes about 1.5 GiB, torch itself another 0.5
_LEAST_UNLIMITED = 1 << 60  # version 1 has no word for "no limit", but a number of this size


@dataclasses.dataclass(frozen=True)
class Resources:
    """What a build may use: `cores`, and `memory` in bytes (None: unknown), each with what the figure comes from."""

    cores: int
    cores_from: str
    memory: int | None
    memory_from: str


@dataclasses.dataclass(frozen=True)
class JobCount:
    """How many jobs run at once, and what limits them (empty where nothing does)."""

    count: int
    reason: str


def choose_job_count(wanted: int, resources: Resources) -> JobCount:
    """Return how many of `wanted` jobs to run at once, at least one: no more than there are cores, and memory for."""
    by_memory = wanted if resources.memory is None else max(1, resources.memory // _MEMORY_PER_JOB)
    count = max(1, min(wanted, resources.cores, by_memory))
    if count >= wanted:
        return JobCount(count, "")
    if resources.memory is not None and by_memory < resources.cores:
        free = f"{resources.memory / (1 << 30):.1f} GiB of memory"
        return JobCount(count, f"{free} {resources.memory_from}, {_MEMORY_PER_JOB >> 30} GiB for each")
    return JobCount(count, f"{resources.cores} core{'s' * (resources.cores > 1)} {resources.cores_from}")


def read_resources(system: Path = Path("/")) -> Resources:
    """Return what this process may use. `system` is the folder with `proc` and `sys`, for tests."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    cores_from = "for this process"
    memory, memory_from = _available(system), "free"
    for group in _groups(system):
        quota = group.cores()
        if quota is not None and max(1, int(quota)) < cores:
            cores, cores_from = max(1, int(quota)), f"(the limit of its control group is {quota:.3g})"
        free = group.free_memory()
        if free is not None and (memory is None or free < memory):
            memory, memory_from = free, "free below the limit of its control group"
    return Resources(cores, cores_from, memory, memory_from)


def memory_kills(system: Path = Path("/")) -> int | None:
    """Return how often the system has killed a process of this one's control group for memory; None if unknown."""
    for group in _groups(system):  # the innermost first, which counts those in groups below it
        for name in ("memory.events", "memory.oom_control"):
            words = dict(line.split()[:2] for line in _lines(group.folder / name) if len(line.split()) == 2)
            with contextlib.suppress(ValueError):
                if "oom_kill" in words:
                    return int(words["oom_kill"])
    return None


def _available(system: Path) -> int | None:
    for line in _lines(system / "proc" / "meminfo"):
        if line.startswith("MemAvailable:"):
            with contextlib.suppress(ValueError, IndexError):
                return int(line.split()[1]) * 1024
    return None


@dataclasses.dataclass(frozen=True)
class _Group:
    """A control group: the folder that says what it may use."""

    folder: Path

    def cores(self) -> float | None:
        """Return the processor time that the group may use, in cores; None if that is not limited."""
        words = " ".join(_lines(self.folder / "cpu.max")).split()
        if not words:
            words = [self._word("cpu.cfs_quota_us"), self._word("cpu.cfs_period_us")]
        with contextlib.suppress(ValueError, ZeroDivisionError, IndexError):
            cores = int(words[0]) / int(words[1])  # no limit is "max", or -1
            return cores if cores > 0 else None
        return None

    def free_memory(self) -> int | None:
        """Return how many bytes the group may use besides those in use; None if that is not limited.

        Pages of files that have not been used lately count as free, as the system drops them first.
        """
        limits = [self._number(name) for name in ("memory.max", "memory.high", "memory.limit_in_bytes")]
        limit = min((limit for limit in limits if limit is not None), default=math.inf)
        if limit >= _LEAST_UNLIMITED:
            return None
        used = self._number("memory.current") or self._number("memory.usage_in_bytes") or 0
        words = dict(line.split()[:2] for line in _lines(self.folder / "memory.stat") if len(line.split()) == 2)
        with contextlib.suppress(ValueError):
            used -= int(words.get("total_inactive_file", words.get("inactive_file", "0")))
        return max(0, int(limit) - max(0, used))

    def _word(self, name: str) -> str:
        return next(iter(_lines(self.folder / name)), "").strip()

    def _number(self, name: str) -> int | None:
        word = self._word(name)
        return int(word) if word.isdigit() else None


def _groups(system: Path) -> Iterator[_Group]:
    """Yield the control groups that this process is in, each before those around it."""
    places = {}  # controller ("" for version 2) -> path of this process's group
    for line in _lines(system / "proc" / "self" / "cgroup"):
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        for controller in controllers.split(","):
            places[controller] = path
    for line in _lines(system / "proc" / "self" / "mountinfo"):
        before, _, after = line.partition(" - ")
        fields, (kind, *rest) = before.split(), (after.split() or [""])
        if len(fields) < 5 or kind not in {"cgroup", "cgroup2"}:
            continue
        options = set(rest[-1].split(",")) if rest else set()
        wanted = {""} if kind == "cgroup2" else {"memory", "cpu"} & options
        for path in {places[controller] for controller in wanted if controller in places}:
            top = system / _unescaped(fields[4]).lstrip("/")
            # In a namespace, the mount may show a part of the tree that the path does not start in.
            inside = os.path.relpath(path or "/", _unescaped(fields[3]))
            folder = top if inside.startswith("..") else top / inside
            while folder.is_relative_to(top):
                yield _Group(folder)
                folder = folder.parent


def _unescaped(text: str) -> str:
    """Undo what the kernel makes of spaces in paths."""
    return text.replace("\\040", " ").replace("\\011", "\t").replace("\\134", "\\")


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
