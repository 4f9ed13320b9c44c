"""What a call costs, side by side in one process: `python tests/benchmark_calls.py INSTALLED`.

INSTALLED is a directory with the example's wheel installed. Prints, for the guide's MLP (`ranker`), the median time of
a call in microseconds, and its ratio to the bare C++ loader: the loader alone (`boxed_run`), the accessor's validated
call, and PyTorch's own object (`aoti_load_package`). The three take turns, so that a machine that changes its speed
changes it for all.
"""

from __future__ import annotations

import statistics
import sys
import timeit

import torch

ROUNDS, CALLS = 60, 2000


def main(installed: str) -> None:
    sys.path.insert(0, installed)
    from example_project._models import load, ranker

    torch.set_num_threads(1)
    x = torch.randn(8, 10)
    stock = load("ranker")
    run = stock.loader.boxed_run
    contenders = {
        "bare boxed_run": lambda: run([x])[0],
        "validated call": lambda: ranker(x),
        "stock __call__": lambda: stock(x),
    }
    times: dict[str, list[float]] = {name: [] for name in contenders}
    with torch.no_grad():
        for call in contenders.values():
            timeit.timeit(call, number=CALLS)
        for _ in range(ROUNDS):
            for name, call in contenders.items():
                times[name].append(timeit.timeit(call, number=CALLS) / CALLS * 1e6)
    bare = times["bare boxed_run"]
    for name, values in times.items():
        ratio = statistics.median(a / b for a, b in zip(values, bare, strict=True))
        print(f"{name:16} {statistics.median(values):7.2f} µs  ({min(values):.2f} to {max(values):.2f})  {ratio:.2f} x")


if __name__ == "__main__":
    main(sys.argv[1])
