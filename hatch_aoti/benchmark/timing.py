"""How long calls take, and how much memory a process has: read inside the process that is measured."""

from __future__ import annotations

import gc
import itertools
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["calls_to_time", "process_memory", "time_calls"]

# Calls are timed together until they take this long: the clock itself takes some 50 ns.
_LEAST_TIMED = 200_000  # ns


def time_calls(call: Callable[[], Any], seconds: float, batch: int = 0) -> list[float]:
    """Return how long a call takes, in ns, again and again for so long; `batch` calls are timed together."""
    batch = batch or calls_to_time(call)
    clock = time.perf_counter_ns
    samples: list[float] = []
    collecting = gc.isenabled()
    gc.disable()
    try:
        end = clock() + int(seconds * 1e9)
        while not samples or clock() < end:
            calls = itertools.repeat(None, batch)
            start = clock()
            for _ in calls:
                call()
            samples.append((clock() - start) / batch)
    finally:
        if collecting:
            gc.enable()
    return samples


def calls_to_time(call: Callable[[], Any]) -> int:
    """Return how many calls take long enough to be timed; makes them, so the model is warm afterwards."""
    batch = 1
    while True:
        start = time.perf_counter_ns()
        for _ in range(batch):
            call()
        if time.perf_counter_ns() - start >= _LEAST_TIMED:
            return batch
        batch *= 2


def process_memory() -> dict[str, int] | None:
    """Return this process's memory in bytes: its share of what several processes map, and what is its own."""
    try:
        lines = Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()[1:]
    except OSError:
        return None
    sizes = {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines)}
    return {"pss": sizes["Pss"], "private": sizes["Private_Clean"] + sizes["Private_Dirty"]}
