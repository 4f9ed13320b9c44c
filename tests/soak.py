"""Models of one wheel under load for a long time: `hatch run soak [--seconds N]`, ten minutes by default.

Eight threads call four models, rightly and wrongly, make new instances of them and drop them; meanwhile processes are
spawned that do the same once. At the end: no wrong answer, no file left in TMPDIR, and memory that does not grow. Prints
the figures and exits 1 on a fault.
"""

from __future__ import annotations

import argparse
import importlib
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch

_MODELS = ("mlp", "embedding", "select", "attention")
_THREADS = 8
_MOST_GROWTH = 2.0  # MB a minute


def same(got, want):
    return all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(got, want, strict=True))


class Work:
    """What one model is called with, and what it must answer, as eager computed it before."""

    def __init__(self, name, kind, model):
        torch.manual_seed(0)
        eager = kind.make().eval()
        self.name, self.kind, self.model = name, kind, model
        self.good = []
        for copies in (1, 2, 5) if name in {"mlp", "embedding"} else (1,):
            args = tuple(torch.cat([x] * copies) for x in kind.inputs())
            with torch.no_grad():
                self.good.append((args, eager(*args)))
        args = kind.inputs()
        self.bad: list[tuple[tuple[Any, ...], Any]] = [
            ((args[0].to(torch.complex64), *args[1:]), TypeError),
            ((args[0].unsqueeze(0), *args[1:]), ValueError),
            ((args[0].to_sparse() if args[0].is_floating_point() else args[0].to("meta"), *args[1:]), Exception),
            ((), TypeError),
        ]
        for place in kind.indices:
            for number in (-kind.high - 1, kind.high, 2**62):
                wrong = [x.clone() for x in args]
                wrong[place].view(-1)[-1] = number
                self.bad.append((tuple(wrong), (IndexError, RuntimeError)))

    def once(self, chance, model):
        """Make one call; return what is wrong with the answer, if anything."""
        if chance.random() < 0.7:
            args, want = chance.choice(self.good)
            got = model(*args)
            return "" if same([got], [want]) else f"{self.name} answers {got} for {want}"
        args, error = chance.choice(self.bad)
        try:
            answer = model(*args)
        except error as raised:
            return "" if self.name in str(raised) or not args else f"{self.name} is not named in: {raised}"
        except BaseException as raised:  # noqa: BLE001
            return f"{self.name} raises {raised!r}"
        return f"{self.name} answers {answer} to a bad call"


def works(folder, names):
    sys.path.insert(0, folder)
    kinds = importlib.import_module("hostile_wheel.kinds").KINDS
    models = importlib.import_module("hostile_wheel._models")
    return [Work(name, kinds[name], getattr(models, name)) for name in names]


def resident():
    """Return the process's memory without what is shared with others, in MB."""
    pages, shared = map(int, Path("/proc/self/statm").read_text().split()[1:3])
    return (pages - shared) * os.sysconf("SC_PAGE_SIZE") / 1e6


def slope(points):
    """Return the slope of the line that fits (seconds, MB) best, in MB a minute."""
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    above = sum((x - mean_x) * (y - mean_y) for x, y in points)
    return 60 * above / (sum((x - mean_x) ** 2 for x, _ in points) or 1.0)


def soak(folder, seconds, names):
    """Run; return the faults that were found, and print figures."""
    place = tempfile.mkdtemp(prefix="soak-")
    os.environ["TMPDIR"] = tempfile.tempdir = place
    todo, end = works(folder, names), time.monotonic() + seconds
    faults: list[str] = []
    counts, loads, children = [0] * _THREADS, [0] * _THREADS, 0

    def thread(number):
        chance = random.Random(number)
        instances = {work.name: work.model for work in todo}
        while time.monotonic() < end and len(faults) < 20:
            work = chance.choice(todo)
            if chance.random() < 0.001:
                instances[work.name] = work.model.with_options(num_runners=chance.choice([1, 2]))
                loads[number] += 1
            if wrong := work.once(chance, instances[work.name]):
                faults.append(wrong)
            counts[number] += 1

    threads = [threading.Thread(target=thread, args=(number,)) for number in range(_THREADS)]
    started = time.monotonic()
    for each in threads:
        each.start()
    points, next_child = [], started
    command = [sys.executable, __file__, "--folder", folder, "--child", "--models", *names]
    while any(each.is_alive() for each in threads):
        points.append((time.monotonic() - started, resident()))
        if time.monotonic() >= next_child and time.monotonic() < end - 10:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
            children += 1
            if done.returncode:
                faults.append(f"a child ends with {done.returncode}: {(done.stdout + done.stderr)[-500:]}")
            next_child = time.monotonic() + 15
        time.sleep(0.5)
    warm = [point for point in points if point[0] > seconds / 3]
    growth = slope(warm) if len(warm) > 2 else 0.0
    left = sorted(path.name for path in Path(place).rglob("*"))
    if left:
        faults.append(f"left in TMPDIR: {left}")
    if growth > _MOST_GROWTH:
        faults.append(f"memory grows by {growth:.2f} MB a minute")
    print(
        f"{seconds} s, {_THREADS} threads, {len(todo)} models: {sum(counts)} calls, {sum(loads)} new instances, "
        f"{children} children; memory {warm[0][1]:.1f} -> {warm[-1][1]:.1f} MB, {growth:+.2f} MB/min; "
        f"{len(left)} files left; {len(faults)} faults"
    )
    return faults


def child(folder, names):
    chance = random.Random(os.getpid())
    return [wrong for work in works(folder, names) for _ in range(50) if (wrong := work.once(chance, work.model))]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, default=600)
    parser.add_argument("--models", nargs="+", default=_MODELS, help="kinds with one result")
    parser.add_argument("--folder", help="an installed wheel of hostile_calls/project.py; built if it is not given")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        faults = child(options.folder, options.models)
    elif options.folder:
        faults = soak(options.folder, options.seconds, options.models)
    else:
        from hostile_calls.project import build_wheel, write_project

        with tempfile.TemporaryDirectory() as scratch:
            installed = build_wheel(
                write_project(Path(scratch, "project"), tuple(options.models)), Path(scratch, "installed")
            )
            faults = soak(os.fspath(installed), options.seconds, options.models)
    for fault in faults:
        print(f"FAULT: {fault}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
