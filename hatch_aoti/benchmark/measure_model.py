"""One model: the start of each contender, all of them called in turns, and hatch-aoti's ways to be called."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
from typing import TYPE_CHECKING, Any

from hatch_aoti.benchmark.contenders import CONTENDERS
from hatch_aoti.benchmark.figures import OURS, Calls, ContenderFigures, Memory, ModelFigures, Spread, Start
from hatch_aoti.benchmark.options import PACKAGE_NAMES
from hatch_aoti.benchmark.processes import ContenderError
from hatch_aoti.benchmark.reference import ANSWERS
from hatch_aoti.benchmark.sizes import artifact_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from hatch_aoti.benchmark.bench import Bench, Subject
    from hatch_aoti.benchmark.processes import Fresh

__all__ = ["measure_model"]

_PROCESSES = 4
_ROUND = 0.3  # seconds in which one contender is called again and again before it is the next one's turn


def measure_model(bench: Bench, subject: Subject, failures: Mapping[tuple[str, str], str]) -> ModelFigures:
    """Measure a model with all contenders; `failures` says why some have no artifact, by contender and model."""
    figures: dict[str, ContenderFigures] = {}
    warm: dict[str, Path] = {}
    for key in bench.options.contenders:
        name = CONTENDERS[key].name if subject.project else PACKAGE_NAMES.get(key, CONTENDERS[key].name)
        found = ContenderFigures(key, name, artifact_bytes=artifact_bytes(bench, subject, key))
        warm[key] = bench.directory("warm", key)
        try:
            if (key, subject.name) in failures:
                raise ContenderError(failures[key, subject.name])
            bench.reporter.note(f"{subject.name}: {name}: starting")
            start, memory = _start(bench, subject, key, warm[key])
            found = dataclasses.replace(found, start=start, memory=memory)
        except ContenderError as error:
            found = dataclasses.replace(found, error=str(error))
        figures[key] = found
    bench.reporter.note(f"{subject.name}: calling all contenders in turns")
    figures = _latency(bench, subject, figures, warm)
    calls = None
    if OURS in figures and not figures[OURS].error:
        bench.reporter.note(f"{subject.name}: calling it in different ways")
        calls = _calls(bench, subject, warm[OURS])
    for directory in warm.values():
        shutil.rmtree(directory, ignore_errors=True)
    return ModelFigures(subject.name, subject.inputs[1], tuple(figures.values()), calls)


def _start(bench: Bench, subject: Subject, key: str, warm: Path) -> tuple[Start, Memory | None]:
    """Start a contender again and again, each time as on a machine that has never seen the model.

    Returns what that took, and the memory of one process and of several, None if it cannot be told. The last start
    leaves its caches in `warm`.
    """
    steps: list[dict[str, Any]] = []

    def start(directory: Path) -> Fresh:
        process = stack.enter_context(bench.fresh(subject, key, directory))
        steps.append({"spawned": process.spawned, **process.answer()})
        return process

    for _ in range(bench.options.repeats - 1):
        directory = bench.directory("start", key)
        with contextlib.ExitStack() as stack:
            start(directory)
        shutil.rmtree(directory, ignore_errors=True)
    with contextlib.ExitStack() as stack:
        memory = _memory(bench, subject, key, warm, start(warm), stack)

    def between(begin: str, end: str, *, without: tuple[str, str] | None = None) -> Spread:
        spans = [step[end] - step[begin] - (step[without[1]] - step[without[0]] if without else 0) for step in steps]
        return Spread.of([span / 1e9 for span in spans])

    return Start(
        framework=between("spawned", "imported"),
        load=None if steps[0]["loaded"] is None else between("begun", "loaded"),
        result=between("begun", "answered"),
        total=between("spawned", "answered", without=("imported", "begun")),
    ), memory


def _memory(
    bench: Bench, subject: Subject, key: str, warm: Path, first: Fresh, stack: contextlib.ExitStack
) -> Memory | None:
    """Measure the one process that there is, and together with others that start now; None if it cannot be told."""
    one = first.ask("memory")
    if one is None:
        return None
    others = [stack.enter_context(bench.fresh(subject, key, warm)) for _ in range(_PROCESSES - 1)]
    for process in others:
        process.answer()
    each = [process.ask("memory") for process in [first, *others]]
    return Memory(one["pss"], one["private"], sum(item["pss"] for item in each), sum(item["private"] for item in each))


def _latency(
    bench: Bench, subject: Subject, figures: Mapping[str, ContenderFigures], warm: Mapping[str, Path]
) -> dict[str, ContenderFigures]:
    """Call the contenders in turns, all in processes that stay alive, and compare their answers."""
    found = dict(figures)
    samples: dict[str, list[list[float]]] = {}
    with contextlib.ExitStack() as stack:
        processes: dict[str, tuple[Fresh, int]] = {}

        @contextlib.contextmanager
        def noting(key: str) -> Iterator[None]:
            try:
                yield
            except ContenderError as error:
                found[key] = dataclasses.replace(found[key], error=str(error))
                processes.pop(key, None)

        for key in [key for key, item in figures.items() if not item.error]:
            with noting(key):
                process = stack.enter_context(bench.fresh(subject, key, warm[key]))
                process.answer()
                processes[key] = process, process.ask("warm")
        for number in range(bench.options.rounds):
            keys = list(processes)
            for key in keys[number % len(keys) :] + keys[: number % len(keys)] if keys else ():
                with noting(key):
                    process, batch = processes[key]
                    samples.setdefault(key, []).append(process.ask("latency", seconds=_ROUND, batch=batch))
        for key in list(processes):
            with noting(key):
                compared = processes[key][0].ask("compare", answers=str(subject.inputs[0] / ANSWERS))
                times = [[time / 1e9 for time in one_round] for one_round in samples[key]]
                found[key] = dataclasses.replace(
                    found[key],
                    latency=Spread.of([time for one_round in times for time in one_round]),
                    rounds=tuple(Spread.of(one_round).median for one_round in times),
                    **compared,
                )
    return found


def _calls(bench: Bench, subject: Subject, directory: Path) -> Calls | None:
    try:
        with bench.fresh(subject, OURS, directory, threads=1) as process:
            process.answer()
            times = process.ask("calls", rounds=4 * bench.options.rounds, seconds=_ROUND / 10)
    except ContenderError as error:
        bench.reporter.warn(f"{subject.name}: the ways to call it cannot be compared: {error}")
        return None
    spreads = {name: Spread.of([value / 1e9 for value in values]) for name, values in times.items()}

    def ratio(other: str) -> float:
        return Spread.of([a / b for a, b in zip(times["validated"], times[other], strict=True)]).median

    return Calls(**spreads, validated_to_bare=ratio("bare"), validated_to_stock=ratio("stock"))
