"""The process of one contender, which does nothing else; `BOOTSTRAP` starts it.

So little is imported before the clock is read, and afterwards what this contender needs and nothing more. The process
loads its model, calls it once, answers with what that took, and then measures what it is asked for, until its standard
input ends.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import statistics
import sys
import threading
import time
import traceback
from typing import TYPE_CHECKING, Any

from hatch_aoti.benchmark.answers import compare_answers
from hatch_aoti.benchmark.contender import describe_error
from hatch_aoti.benchmark.contenders import CONTENDERS
from hatch_aoti.benchmark.timing import calls_to_time, process_memory, time_calls

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["BOOTSTRAP", "main"]

# What a new Python runs, its task on the command line: hatch-aoti may lie where only the parent's paths lead.
BOOTSTRAP = """
import json, sys
task = json.loads(sys.argv[1])
sys.path[:] = task["paths"]
from hatch_aoti.benchmark.child import main
main(task)
"""


class _Process:
    """The contender of this process, ready to be measured."""

    def __init__(self, task: Mapping[str, Any]) -> None:
        self.contender = CONTENDERS[task["contender"]](task)

    def start(self) -> dict[str, int | None]:
        """Load the model and call it once; return the clock at each step, in ns."""
        contender, now = self.contender, time.monotonic_ns  # CLOCK_MONOTONIC: the parent reads the same clock
        contender.import_framework()
        imported = now()
        contender.read_inputs()
        begun = now()
        with contender.mode():
            contender.call = contender.load()
            loaded = now()
            self.first = contender.call()
            answered = now()
        return {"imported": imported, "begun": begun, "loaded": loaded, "answered": answered}

    def memory(self) -> dict[str, int] | None:
        return process_memory()

    def warm(self) -> int:
        """Return how many calls to time together."""
        with self.contender.mode():
            return calls_to_time(self.contender.call)

    def latency(self, seconds: float, batch: int) -> list[float]:
        with self.contender.mode():
            return time_calls(self.contender.call, seconds, batch)

    def compare(self, answers: str) -> dict[str, Any]:
        return compare_answers(self.first, answers)

    def calls(self, rounds: int, seconds: float) -> dict[str, list[float]]:
        """Return for each way to call the model the median times, in ns, of rounds in which they take turns."""
        import torch

        with torch.no_grad():
            ways = self.contender.ways_to_call()
            batches = {name: calls_to_time(call) for name, call in ways.items()}
            times: dict[str, list[float]] = {name: [] for name in ways}
            for _ in range(rounds):
                for name, call in ways.items():
                    times[name].append(statistics.median(time_calls(call, seconds, batches[name])))
        return times


def main(task: Mapping[str, Any]) -> None:
    """Serve the process that started this one, to its end. `task` says which contender and model this is."""
    # Answers go where standard output went; what libraries print, to the log.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    commands: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_read_commands, args=(commands,), daemon=True).start()
    process = _Process(task)
    command: dict[str, Any] = {"do": "start"}
    while True:
        try:
            answer = {"answer": getattr(process, command.pop("do"))(**command)}
        except Exception as error:  # noqa: BLE001 - whatever stops a contender is its result
            traceback.print_exc()
            answer = {"error": describe_error(error)}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
        command = json.loads(commands.get())


def _read_commands(commands: queue.SimpleQueue[str]) -> None:
    for line in sys.stdin:
        commands.put(line)
    os.killpg(0, signal.SIGKILL)  # the benchmark is gone: so is this process, with compilers that it may have started
