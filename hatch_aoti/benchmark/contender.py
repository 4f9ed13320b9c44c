"""One way to run one model, in a process that does nothing else: started as a script, by its path.

So little is imported before the clock has been read, and afterwards what this contender needs and nothing more:
hatch-aoti's imports torch and the generated `_models.py`, but not hatch-aoti. The process loads its model, calls it
once, answers with what that took, and then measures what it is asked for, until its standard input ends.

The functions `prepare`, which makes the artifacts that some contenders load, run before that in other processes (see
`prepare_all`), and may import what they like.
"""

from __future__ import annotations

import time

_STARTED = time.monotonic_ns()  # CLOCK_MONOTONIC: the parent reads the same clock

import contextlib  # noqa: E402
import functools  # noqa: E402
import gc  # noqa: E402
import importlib  # noqa: E402
import itertools  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import queue  # noqa: E402
import signal  # noqa: E402
import sys  # noqa: E402
import threading  # noqa: E402
import traceback  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import TYPE_CHECKING, Any, ClassVar  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractContextManager

    import torch

    from hatch_aoti.export.program import EagerModel

__all__ = ["CONTENDERS", "Contender", "install_roots", "leaves", "prepare_all"]

# Calls are timed together until they take this long: the clock itself takes some 50 ns.
_LEAST_TIMED = 200_000  # ns


class Contender:
    """One way to run a model. `task` says which (see `measure.Task`), `call` is set by `load`.

    `artifact` is the suffix of the file that `prepare` makes, empty for a contender that needs none; `requires` are the
    modules, apart from torch, without which it cannot run.
    """

    name: ClassVar[str]
    artifact: ClassVar[str] = ""
    requires: ClassVar[tuple[str, ...]] = ()

    def __init__(self, task: Mapping[str, Any]) -> None:
        self.task = task

    @staticmethod
    def prepare(entry: Any, root: Path, path: Path) -> None:
        """Make the artifact of a model (a `ModelSettings`) of the project in `root`."""
        raise NotImplementedError

    def import_framework(self) -> None:
        """Import what every program that runs models this way imports first."""
        import torch

        torch.set_num_threads(self.task["threads"])
        torch.manual_seed(0)

    def read_inputs(self) -> None:
        """Read the inputs and do what is the benchmark's own business; no clock runs."""
        import torch

        roots = self.task["roots"]
        if roots is not None and roots["packages"]:  # inputs may have classes from there
            install_roots(roots)
        self.args, self.kwargs = torch.load(self.task["inputs"], weights_only=False)

    def load(self) -> Callable[[], Any]:
        """Load the model and return a call of it."""
        raise NotImplementedError

    def mode(self) -> AbstractContextManager[Any]:
        """Return the context in which the model is called."""
        return contextlib.nullcontext()

    call: Callable[[], Any]

    def ways_to_call(self) -> dict[str, Callable[[], Any]]:
        """Return calls of the same model that differ in what they do besides; most contenders have one."""
        return {"call": self.call}

    def bind(self, function: Callable[..., Any]) -> Callable[[], Any]:
        """Return `function` with the inputs: what a call costs beyond it is next to nothing."""
        return functools.partial(function, *self.args, **self.kwargs)


class HatchAoti(Contender):
    """A model of a wheel, called as its users do."""

    name = "hatch-aoti"

    def load(self) -> Callable[[], Any]:
        """Import the generated module and load the model."""
        model = importlib.import_module(f"{self.task['package']}._models").MODELS[self.task["model"]]
        return self.bind(model.load())

    def ways_to_call(self) -> dict[str, Callable[[], Any]]:
        """Return the bare C++ loader's call, the call that users make, and that of PyTorch's own object."""
        module = importlib.import_module(f"{self.task['package']}._models")
        package = module.load(self.task["model"])
        loader, taken = package.loader, []

        class Recorder:
            def __getattr__(self, name: str) -> Any:
                return getattr(loader, name)

            def boxed_run(self, flat: list[torch.Tensor]) -> Any:
                taken.extend(flat)
                return loader.boxed_run(flat)

        package.loader = Recorder()
        package(*self.args, **self.kwargs)
        package.loader = loader
        run = loader.boxed_run  # it empties the list that it is given
        return {"bare": lambda: run(taken.copy()), "validated": self.call, "stock": self.bind(package)}


class Eager(Contender):
    """The module as it is."""

    name = "eager"

    def read_inputs(self) -> None:
        """Import how hatch-aoti builds a project's module: the same in every contender that has one."""
        super().read_inputs()
        from hatch_aoti.export.program import build_module
        from hatch_aoti.settings.model import ModelSettings

        install_roots(self.task["roots"])
        entry = ModelSettings.from_json(self.task["entry"])
        self.build = functools.partial(build_module, entry, root=Path(self.task["root"]), device="cpu")

    def load(self) -> Callable[[], Any]:
        """Import and build the module, and load its weights."""
        return self.bind(self.build())

    def mode(self) -> AbstractContextManager[Any]:
        """Return PyTorch's fastest mode for inference."""
        import torch

        return torch.inference_mode()


class Compile(Eager):
    """The module, compiled when it is first called."""

    name = "torch.compile"

    def load(self) -> Callable[[], Any]:
        """Build the module; it compiles at its first call."""
        import torch

        return self.bind(torch.compile(self.build()))

    def mode(self) -> AbstractContextManager[Any]:
        """Return the mode that its compiler supports best."""
        import torch

        return torch.no_grad()


class TorchScript(Contender):
    """The module traced, frozen and saved."""

    name = "TorchScript"
    artifact = ".pt"

    @staticmethod
    def prepare(entry: Any, root: Path, path: Path) -> None:
        """Trace a model; note in the file whether `optimize_for_inference` makes it faster, as it often does not."""
        import torch

        jit: Any = torch.jit  # without annotations
        prepared = _eager_model(entry, root)
        flat, module = _flattened(prepared)
        with torch.inference_mode():
            traced = jit.trace(module, tuple(flat), strict=False, check_trace=False)
            jit.save(jit.freeze(traced), path)
            plain, tuned = jit.load(path), jit.optimize_for_inference(jit.load(path))
            times = {False: plain, True: tuned}
            best = {key: min(_time(functools.partial(value, *flat), 0.5)) for key, value in times.items()}
        path.with_suffix(".json").write_text(json.dumps(best[True] < best[False]), encoding="utf-8")

    def read_inputs(self) -> None:
        """Lay the tensors out."""
        super().read_inputs()
        self.flat = _tensors((self.args, self.kwargs))

    def load(self) -> Callable[[], Any]:
        """Load the saved module."""
        import torch

        jit: Any = torch.jit
        path = Path(self.task["artifact"])
        module = jit.load(path)
        if json.loads(path.with_suffix(".json").read_text(encoding="utf-8")):
            module = jit.optimize_for_inference(module)
        return functools.partial(module, *self.flat)

    def mode(self) -> AbstractContextManager[Any]:
        """Return PyTorch's fastest mode for inference."""
        import torch

        return torch.inference_mode()


class AotInductor(Contender):
    """`torch._inductor.aoti_compile_and_package` and `aoti_load_package`, as PyTorch's guide has it."""

    name = "AOTInductor"
    artifact = ".pt2"

    @staticmethod
    def prepare(entry: Any, root: Path, path: Path) -> None:
        """Export and compile a model."""
        import torch

        from hatch_aoti.export.program import load_program

        with torch.no_grad():
            if entry.exported is not None:
                program = load_program(entry, root=root, device="cpu").program
            else:
                model = _eager_model(entry, root)
                program = torch.export.export(
                    model.module, model.args, model.kwargs, dynamic_shapes=model.dynamic_shapes, strict=False
                )
            torch._inductor.aoti_compile_and_package(program, package_path=os.fspath(path))  # noqa: SLF001

    def load(self) -> Callable[[], Any]:
        """Load the package; for an installed wheel, through its `load()`, which knows where the constants are."""
        import torch

        if self.task["artifact"] is None:
            module = importlib.import_module(f"{self.task['package']}._models")
            return self.bind(module.load(self.task["model"]))
        return self.bind(torch._inductor.aoti_load_package(self.task["artifact"]))  # noqa: SLF001


class OnnxRuntime(Contender):
    """The module exported to ONNX, without torch in the process that runs it."""

    name = "ONNX Runtime"
    artifact = ".onnx"
    requires = ("onnx", "onnxruntime", "onnxscript")

    @staticmethod
    def prepare(entry: Any, root: Path, path: Path) -> None:
        """Export a model, and save its inputs in a form that needs no torch."""
        import numpy as np
        import torch

        prepared = _eager_model(entry, root)
        with torch.no_grad():
            torch.onnx.export(
                prepared.module, prepared.args, path, kwargs=prepared.kwargs, dynamo=True, verbose=False,
                dynamic_shapes=prepared.dynamic_shapes,
            )  # fmt: skip
        np.savez(path.with_suffix(".npz"), *(x.numpy() for x in _tensors((prepared.args, prepared.kwargs))))

    def import_framework(self) -> None:
        """Import ONNX Runtime."""
        import onnxruntime

        del onnxruntime

    def read_inputs(self) -> None:
        """Read the inputs as arrays."""
        import numpy as np

        with np.load(Path(self.task["artifact"]).with_suffix(".npz")) as arrays:
            self.arrays = [arrays[f"arr_{i}"] for i in range(len(arrays.files))]

    def load(self) -> Callable[[], Any]:
        """Make a session with as many threads as the others have."""
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = self.task["threads"]
        session = onnxruntime.InferenceSession(self.task["artifact"], options, providers=["CPUExecutionProvider"])
        names = [item.name for item in session.get_inputs()]
        return functools.partial(session.run, None, dict(zip(names, self.arrays, strict=True)))


CONTENDERS: dict[str, type[Contender]] = {
    "hatch-aoti": HatchAoti,
    "eager": Eager,
    "compile": Compile,
    "torchscript": TorchScript,
    "aotinductor": AotInductor,
    "onnxruntime": OnnxRuntime,
}


# --- Before: artifacts ------------------------------------------------------------------------------------------------


def prepare_all(payload: Mapping[str, Any]) -> dict[str, str | None]:
    """Make one contender's artifacts for several models in this process, the way a script would; a job for a worker.

    Returns for each model why that failed, or None.
    """
    from hatch_aoti.settings.model import ModelSettings
    from hatch_aoti.stages import report_stage

    install_roots(payload["roots"])
    contender = CONTENDERS[payload["contender"]]
    failures: dict[str, str | None] = {}
    for data in payload["entries"]:
        entry = ModelSettings.from_json(data)
        path = Path(payload["directory"], f"{entry.name}{contender.artifact}")
        try:
            contender.prepare(entry, Path(payload["root"]), path)
            failures[entry.name] = None
        except Exception as error:  # noqa: BLE001 - whatever stops a contender is its result
            traceback.print_exc()
            failures[entry.name] = _reason(error)
        report_stage(entry.name)
    return failures


def install_roots(roots: Mapping[str, Any]) -> None:
    """Make the project's modules importable before they are installed."""
    from hatch_aoti.export.importing import ImportRoots

    sys.dont_write_bytecode = True  # the project's tree is not ours
    ImportRoots(tuple(roots["paths"]), roots["packages"]).install()


def _eager_model(entry: Any, root: Path) -> EagerModel:
    from hatch_aoti.export.program import prepare_model

    return prepare_model(entry, root=root, device="cpu")


def _flattened(prepared: EagerModel) -> tuple[list[torch.Tensor], torch.nn.Module]:
    """Return the tensors among the inputs, and a module that takes them as they are and has the rest built in."""
    import torch
    from torch.utils import _pytree

    leaves, spec = _pytree.tree_flatten((prepared.args, prepared.kwargs))

    class Flat(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = prepared.module

        def forward(self, *tensors: torch.Tensor) -> Any:
            given = iter(tensors)
            args, kwargs = _pytree.tree_unflatten(
                [next(given) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], spec
            )
            return self.module(*args, **kwargs)

    return _tensors((prepared.args, prepared.kwargs)), Flat().eval()


def _tensors(call: Any) -> list[torch.Tensor]:
    import torch
    from torch.utils import _pytree

    return [leaf for leaf in _pytree.tree_leaves(call) if isinstance(leaf, torch.Tensor)]


# --- In the fresh process ---------------------------------------------------------------------------------------------


def _time(call: Callable[[], Any], seconds: float, batch: int = 0) -> list[float]:
    """Return how long a call takes, in ns, again and again for so long; `batch` calls are timed together."""
    batch = batch or _batch(call)
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


def _batch(call: Callable[[], Any]) -> int:
    """Return how many calls take long enough to be timed; makes them, so the model is warm afterwards."""
    batch = 1
    while True:
        start = time.perf_counter_ns()
        for _ in range(batch):
            call()
        if time.perf_counter_ns() - start >= _LEAST_TIMED:
            return batch
        batch *= 2


def _memory() -> dict[str, int] | None:
    """Return this process's memory in bytes: its share of what several processes map, and what is its own."""
    try:
        lines = Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()[1:]
    except OSError:
        return None
    sizes = {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines)}
    return {"pss": sizes["Pss"], "private": sizes["Private_Clean"] + sizes["Private_Dirty"]}


def _compare(got: Any, answers: str) -> dict[str, Any]:
    """Compare a result with the expected one, leaf by leaf; say how far they are apart, and where too far."""
    import torch

    # Weights-only: the file has tensors, numbers and lists.
    expected, tolerances = torch.load(answers)
    found, largest = leaves(got), 0.0
    if len(found) != len(expected):
        return {"difference": f"{len(found)} tensors instead of {len(expected)}", "max_error": None}
    for number, (a, b, (rtol, atol)) in enumerate(zip(found, expected, tolerances, strict=True)):
        which = f"output {number}: " if len(expected) > 1 else ""
        if a.dtype != b.dtype or a.shape != b.shape:
            kinds = [f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}" for x in (a, b)]
            return {"difference": f"{which}{kinds[0]} instead of {kinds[1]}", "max_error": None}
        wide = torch.complex128 if b.is_complex() else torch.float64
        a, b = a.detach().to(wide), b.to(wide)  # noqa: PLW2901
        error = (a - b).abs()
        same = (a == b) | (a.isnan() & b.isnan())
        finite = error[~same & error.isfinite()]
        largest = max(largest, float(finite.max()) if finite.numel() else 0.0)
        wrong = int((~same & ~(error <= atol + rtol * b.abs())).sum())
        if wrong:
            return {
                "difference": f"{which}{wrong} of {b.numel()} elements differ, by up to {largest:.3g}",
                "max_error": largest,
            }
    return {"difference": "", "max_error": largest}


def leaves(value: Any) -> list[torch.Tensor]:
    """Return the tensors in a result, arrays included, in order; values of other types are left out."""
    import torch

    if isinstance(value, torch.Tensor):
        return [value]
    if hasattr(value, "__array_interface__"):
        return [torch.from_numpy(value)]
    if isinstance(value, dict):
        value = list(value.values())
    elif hasattr(value, "__dataclass_fields__"):
        value = [getattr(value, name) for name in value.__dataclass_fields__]
    return [leaf for item in value for leaf in leaves(item)] if isinstance(value, (list, tuple)) else []


def _reason(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


class _Process:
    """The contender of this process, ready to be measured."""

    def __init__(self, task: Mapping[str, Any]) -> None:
        self.contender = CONTENDERS[task["contender"]](task)

    def start(self) -> dict[str, int | None]:
        """Load the model and call it once; return the clock at each step, in ns."""
        contender, now = self.contender, time.monotonic_ns
        contender.import_framework()
        imported = now()
        contender.read_inputs()
        begun = now()
        with contender.mode():
            contender.call = contender.load()
            loaded = now()
            self.first = contender.call()
            answered = now()
        return {
            "started": _STARTED, "imported": imported, "begun": begun,
            "loaded": loaded, "answered": answered,
        }  # fmt: skip

    def memory(self) -> dict[str, int] | None:
        return _memory()

    def warm(self) -> int:
        """Return how many calls to time together."""
        with self.contender.mode():
            return _batch(self.contender.call)

    def latency(self, seconds: float, batch: int) -> list[float]:
        with self.contender.mode():
            return _time(self.contender.call, seconds, batch)

    def compare(self, answers: str) -> dict[str, Any]:
        return _compare(self.first, answers)

    def calls(self, rounds: int, seconds: float) -> dict[str, list[float]]:
        """Return for each way to call the model the median times, in ns, of rounds in which they take turns."""
        import statistics

        import torch

        with torch.no_grad():
            ways = self.contender.ways_to_call()
            batches = {name: _batch(call) for name, call in ways.items()}
            times: dict[str, list[float]] = {name: [] for name in ways}
            for _ in range(rounds):
                for name, call in ways.items():
                    times[name].append(statistics.median(_time(call, seconds, batches[name])))
        return times


def _read_commands(commands: queue.SimpleQueue[str]) -> None:
    for line in sys.stdin:
        commands.put(line)
    os.killpg(0, signal.SIGKILL)  # the benchmark is gone: so is this process, with compilers that it may have started


def _main(arguments: Sequence[str]) -> None:
    task = json.loads(arguments[1])
    sys.path[:] = task["paths"]
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
            answer = {"error": _reason(error)}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
        command = json.loads(commands.get())


if __name__ == "__main__":
    _main(sys.argv)
