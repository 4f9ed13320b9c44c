"""What is run when: builds first, then for each model the start of each contender, and all contenders in turns."""

from __future__ import annotations

import compileall
import contextlib
import dataclasses
import importlib
import importlib.util
import json
import os
import platform
import shutil
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hatch_aoti import __version__
from hatch_aoti.benchmark.contender import CONTENDERS
from hatch_aoti.benchmark.figures import (
    OURS,
    Builds,
    Calls,
    ContenderFigures,
    Machine,
    Memory,
    ModelFigures,
    Report,
    Spread,
    Start,
)
from hatch_aoti.benchmark.processes import ContenderError, Fresh, run_job
from hatch_aoti.benchmark.reference import ANSWERS, INPUTS
from hatch_aoti.errors import AotiError, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from hatch_aoti.build.progress import Reporter
    from hatch_aoti.plugin.project import Project

__all__ = ["Options", "available_contenders", "measure_package", "measure_project"]

_PROCESSES = 4
_ROUND = 0.3  # seconds in which one contender is called again and again before it is the next one's turn
_PACKAGE_NAMES = {"aotinductor": "load()"}  # what a contender is called where it is part of the wheel


@dataclasses.dataclass(frozen=True)
class Options:
    """What to measure: contenders by key, how many threads each may use, how often each start and round is repeated.

    `models` are names, empty for all; `builds` says whether builds are compared.
    """

    contenders: tuple[str, ...]
    threads: int
    models: tuple[str, ...] = ()
    rounds: int = 10
    repeats: int = 3
    builds: bool = True


def available_contenders(asked: Sequence[str], *, package: bool) -> tuple[str, ...]:
    """Return the keys of the contenders to measure: those asked for, or else all that can run here.

    Raises `AotiError` for a key that does not exist, that a package cannot be measured with, or that needs something
    that is not installed.
    """
    possible = (OURS, *_PACKAGE_NAMES) if package else tuple(CONTENDERS)
    for key in asked:
        if key not in CONTENDERS:
            raise AotiError(
                f"there is no contender `{key}`.{did_you_mean(key, possible)} There are: {', '.join(possible)}"
            )
        if key not in possible:
            raise AotiError(
                f"the contender `{key}` needs the model's source, which an installed package does not have; there are: "
                f"{', '.join(possible)}. Measure the project instead, without --package"
            )
        missing = [name for name in CONTENDERS[key].requires if importlib.util.find_spec(name) is None]
        if missing:
            raise AotiError(
                f"the contender `{key}` needs {', '.join(missing)}, not installed here; "
                'pip install "hatch-aoti[bench]" has it'
            )
    if asked:
        return tuple(key for key in CONTENDERS if key in asked)
    return tuple(key for key in possible if all(map(importlib.util.find_spec, CONTENDERS[key].requires)))


def measure_project(
    project: Project, options: Options, reporter: Reporter, *, command: str, environ: Mapping[str, str]
) -> Report:
    """Build a project's wheel, make the other contenders' artifacts, and measure. Raises `AotiError`.

    Nothing is written into the project; everything temporary is removed, and no process is left, however this ends.
    """
    settings = project.settings
    names = _chosen(options.models, settings.models)
    with _scratch() as scratch:
        bench = _Bench(scratch, options, reporter, dict(environ), project.root)
        builds, wheel = _build_wheels(bench, project, names)
        site = _unpacked(wheel, scratch / "site")
        folder = site.joinpath(*project.layout.package.split("."))
        if not (folder / "_models.json").is_file():
            raise AotiError(
                "the wheel has no compiled models: turn the build hook on with [tool.hatch.build.targets.wheel.hooks."
                "aoti] in pyproject.toml"
            )
        roots = {"paths": project.layout.import_paths, "packages": project.layout.import_packages}
        models = []
        for name in names:
            _require_cpu(folder, name)
            entry = settings.models[name].to_json()
            payload = {"entry": entry, "root": str(project.root), "roots": roots, "model": name}
            models.append(
                _Subject(name, project.layout.package, folder, payload, bench.reference("from_module", payload), site)
            )
        # The script of the comparison compiles what the wheel has; otherwise only what is measured is needed.
        entries = {name: settings.models[name].to_json() for name in (settings.models if options.builds else names)}
        failures, scripts = _prepare(bench, entries, roots)
        report = _measure(bench, project.root.name, command, models, failures)
        if builds is not None:
            builds = dataclasses.replace(builds, script_cold=scripts[0], script_warm=scripts[1])
        return dataclasses.replace(report, builds=builds, wheel_bytes=wheel.stat().st_size)


def measure_package(
    package: str, options: Options, reporter: Reporter, *, command: str, environ: Mapping[str, str]
) -> Report:
    """Measure the models of an installed package: the wheel's call against its `load()`. Raises `AotiError`."""
    try:
        module = importlib.import_module(f"{package}._models")
        folder, available = Path(module.__file__ or "").parent, module.MODELS
    except (ImportError, AttributeError) as error:
        raise AotiError(
            f"{package}._models cannot be imported here ({error}): name the import package of an installed wheel that "
            "hatch-aoti built, in the environment that hatch-aoti runs in"
        ) from error
    names = _chosen(options.models, available)
    with _scratch() as scratch:
        bench = _Bench(scratch, options, reporter, dict(environ), Path.cwd())
        models = []
        for name in names:
            _require_cpu(folder, name)
            payload = {"package": package, "model": name}
            models.append(_Subject(name, package, folder, {}, bench.reference("from_signature", payload)))
        return _measure(bench, package, command, models, {})


@dataclasses.dataclass(frozen=True)
class _Subject:
    """A model that is measured. `folder` has its files, `site` is put on hatch-aoti's import path."""

    name: str
    package: str
    folder: Path
    source: dict[str, Any]  # entry, root and roots of a project's model
    inputs: tuple[Path, tuple[str, ...]]  # the directory with inputs and answers; what the inputs are
    site: Path | None = None

    def task(self, key: str, threads: int, artifact: Path | None) -> dict[str, Any]:
        """Return what the process of a contender needs to know."""
        paths = [path or os.getcwd() for path in sys.path]  # noqa: PTH109 - strings, as in sys.path
        roots = self.source.get("roots")
        if self.site is not None and key == OURS:
            paths, roots = [str(self.site), *paths], None
        return {
            "contender": key,
            "paths": [*paths, *(self.source["roots"]["paths"] if self.source else ())],
            "threads": threads,
            "model": self.name,
            "package": self.package,
            "inputs": str(self.inputs[0] / INPUTS),
            "artifact": None if artifact is None else str(artifact),
            "entry": self.source.get("entry"),
            "root": self.source.get("root"),
            "roots": roots,
        }


@dataclasses.dataclass(frozen=True)
class _Bench:
    """One run: where it works, what for, and whom it tells."""

    scratch: Path
    options: Options
    reporter: Reporter
    environ: dict[str, str]
    cwd: Path

    def directory(self, *names: str) -> Path:
        """Return a new directory."""
        path = Path(tempfile.mkdtemp(prefix="-".join((*names, "")), dir=self.scratch))
        path.chmod(0o700)
        return path

    def reference(self, function: str, payload: Mapping[str, Any]) -> tuple[Path, tuple[str, ...]]:
        """Have the inputs and answers of a model written."""
        directory = self.directory("reference")
        outcome, _ = run_job(
            f"reference:{function}",
            {**payload, "directory": str(directory)},
            directory,
            environ=self.environ,
            cwd=self.cwd,
        )
        if outcome.crashed:
            raise AotiError(
                f"model `{payload['model']}` cannot be called on its inputs here: {outcome.describe_crash()}\n"
                f"{_tail(directory)}"
            )
        return directory, tuple(outcome.result)

    def fresh(self, subject: _Subject, key: str, directory: Path, threads: int | None = None) -> Fresh:
        """Start a contender."""
        suffix = CONTENDERS[key].artifact
        artifact = self.scratch / "artifacts" / key / f"{subject.name}{suffix}" if suffix and subject.source else None
        task = subject.task(key, threads or self.options.threads, artifact)
        return Fresh(task, directory, environ=self.environ, cwd=self.cwd)


# --- Builds and artifacts -----------------------------------------------------------------------------------------


def _build_wheels(bench: _Bench, project: Project, names: Sequence[str]) -> tuple[Builds | None, Path]:
    """Build the wheel; with `builds`, from an empty cache, then changed and unchanged, each timed."""

    def build(say: str, changed: str | None = None) -> tuple[Path, float]:
        bench.reporter.note(say)
        directory = bench.directory("wheel")
        cache = {"HATCH_AOTI_CACHE_DIR": str(bench.scratch / "cache")} if bench.options.builds else {}
        payload = {"output": str(directory), "changed": changed}
        outcome, seconds = run_job(
            "wheel:build", payload, directory, environ={**bench.environ, **cache}, cwd=project.root
        )
        if outcome.crashed:
            raise AotiError(f"the wheel of {project.root} cannot be built:\n{_tail(directory)}")
        return directory / outcome.result, seconds

    if not bench.options.builds:
        return None, build("building the wheel")[0]
    wheel, cold = build("building the wheel, with an empty cache")
    _, one_changed = build(f"building the wheel again, with another seed for {names[0]}", names[0])
    _, unchanged = build("building the wheel again, unchanged")
    return Builds(len(project.settings.models), names[0], cold, one_changed, unchanged, None, None), wheel


def _prepare(
    bench: _Bench, entries: Mapping[str, Mapping[str, Any]], roots: Mapping[str, Any]
) -> tuple[dict[tuple[str, str], str], list[float | None]]:
    """Make the artifacts of the contenders that need some.

    Returns why that failed, by contender and model, and how long stock AOTInductor's script took, with cold caches and
    with warm ones.
    """
    failures: dict[tuple[str, str], str] = {}
    times: list[float | None] = [None, None]
    keys = [key for key in bench.options.contenders if CONTENDERS[key].artifact]
    if bench.options.builds and "aotinductor" not in keys:
        keys.append("aotinductor")
    for key in keys:
        directory, artifacts = bench.directory(key), bench.scratch / "artifacts" / key
        artifacts.mkdir(parents=True)
        payload = {
            "contender": key, "entries": list(entries.values()), "directory": str(artifacts), "root": str(bench.cwd),
            "roots": roots,
        }  # fmt: skip
        timed = bench.options.builds and key == "aotinductor"
        for number, caches in enumerate(("cold", "warm") if timed else ("",)):
            name = CONTENDERS[key].name
            bench.reporter.note(f"{name}: compiling {len(entries)} in one script{caches and f', {caches} caches'}")
            outcome, seconds = run_job(
                "contender:prepare_all", payload, directory, environ=bench.environ, cwd=bench.cwd
            )
            reasons = dict.fromkeys(entries, outcome.describe_crash()) if outcome.crashed else outcome.result
            failed = {(key, model): reason for model, reason in reasons.items() if reason is not None}
            failures |= failed
            if timed and not failed:
                times[number] = seconds
        shutil.rmtree(directory, ignore_errors=True)
    return failures, times


# --- Models -------------------------------------------------------------------------------------------------------


def _measure(
    bench: _Bench, subject: str, command: str, models: Iterable[_Subject], failures: Mapping[tuple[str, str], str]
) -> Report:
    measured = tuple(_measure_model(bench, model, failures) for model in models)
    return Report(subject, command, _machine(bench.options.threads), measured)


def _measure_model(bench: _Bench, subject: _Subject, failures: Mapping[tuple[str, str], str]) -> ModelFigures:
    figures: dict[str, ContenderFigures] = {}
    warm: dict[str, Path] = {}
    for key in bench.options.contenders:
        name = CONTENDERS[key].name if subject.source else _PACKAGE_NAMES.get(key, CONTENDERS[key].name)
        found = ContenderFigures(key, name, artifact_bytes=_artifact_bytes(bench, subject, key))
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


def _start(bench: _Bench, subject: _Subject, key: str, warm: Path) -> tuple[Start, Memory | None]:
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
    bench: _Bench, subject: _Subject, key: str, warm: Path, first: Fresh, stack: contextlib.ExitStack
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
    bench: _Bench, subject: _Subject, figures: Mapping[str, ContenderFigures], warm: Mapping[str, Path]
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


def _calls(bench: _Bench, subject: _Subject, directory: Path) -> Calls | None:
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


# --- Files and facts ----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _scratch() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="hatch-aoti-bench-", ignore_cleanup_errors=True) as directory:
        yield Path(directory)


def _chosen(asked: Sequence[str], available: Mapping[str, Any]) -> list[str]:
    for name in asked:
        if name not in available:
            raise AotiError(
                f"there is no model `{name}`.{did_you_mean(name, available)} There are: {', '.join(available)}"
            )
    return [name for name in available if not asked or name in asked]


def _unpacked(wheel: Path, directory: Path) -> Path:
    """Unpack a wheel as installers do, bytecode included."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(directory)
    compileall.compile_dir(directory, quiet=2)
    return directory


def _require_cpu(folder: Path, name: str) -> None:
    device = _manifest(folder)["models"][name]["device"]
    if device != "cpu":
        raise AotiError(
            f"`{name}` is compiled for {device}, and bench measures models for the CPU; leave it out with --model"
        )


def _manifest(folder: Path) -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads((folder / "_models.json").read_text(encoding="utf-8"))
    return manifest


def _artifact_bytes(bench: _Bench, subject: _Subject, key: str) -> int | None:
    """Return the size of what a contender loads; None if that is the source. Models share the file of constants."""
    if key == OURS or not subject.source:
        manifest = _manifest(subject.folder)
        model = manifest["models"][subject.name]
        size = sum(_entry_bytes(subject.folder / item["file"], item["entry"]) for item in model["artifacts"])
        if model["external_constants"]:
            size += _constants_bytes(subject.folder / manifest["constants_file"]["file"], subject.name)
        return size
    suffix = CONTENDERS[key].artifact
    files = [
        path
        for path in (bench.scratch / "artifacts" / key).glob(f"{subject.name}{suffix}*")
        if path.suffix not in {".json", ".npz"}
    ]
    return sum(path.stat().st_size for path in files) or None


def _entry_bytes(path: Path, entry: str) -> int:
    """Return the size of a `.pt2`, or of what is one model's where it has several."""
    with zipfile.ZipFile(path) as archive:
        places = [(info.filename.partition("/data/aotinductor/")[2], info.compress_size) for info in archive.infolist()]
    models = [(name, size) for name, size in places if name]
    mine = [size for name, size in models if name.startswith(f"{entry}/")]
    return path.stat().st_size if len(mine) == len(models) else sum(mine)


def _constants_bytes(path: Path, name: str) -> int:
    """Return how much of a file with external constants is one model's (see `artifact.constants_file`)."""
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    tensors = {entry["tensor"] for entry in json.loads(header["__metadata__"][name]).values()}
    spans = [header[tensor]["data_offsets"] for tensor in tensors]
    return int(sum(end - begin for begin, end in spans))


def _machine(threads: int) -> Machine:
    from importlib.metadata import version

    name = platform.processor()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), name)
    system = f"{platform.system()} {platform.machine()}"
    python = platform.python_version()
    cores = os.cpu_count() or 1
    return Machine(name or "unknown", cores, threads, system, python, version("torch"), __version__)


def _tail(directory: Path) -> str:
    log = (directory / "log.txt").read_text(encoding="utf-8", errors="replace")
    return "\n".join(log.splitlines()[-25:])
