"""The ways to run a model that are compared: how each is made, loaded and called.

Imports that only one of them needs lie inside its methods: the process that measures one has no other's, and
hatch-aoti's own imports torch and the generated `_models.py`, but none of what compiles models.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hatch_aoti.benchmark.contender import Contender
from hatch_aoti.benchmark.eager import eager_model, flattened, install_roots, tensors
from hatch_aoti.benchmark.timing import time_calls

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    import torch

    from hatch_aoti.benchmark.tasks import ProjectModel

__all__ = ["CONTENDERS"]


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

        project = self.project()
        if project is None:
            raise ValueError(f"{self.name} needs the model's source")
        install_roots(project.roots)
        self.build = functools.partial(build_module, project.entry, root=project.root, device="cpu")

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
    def prepare(model: ProjectModel, path: Path) -> None:
        """Trace a model; note in the file whether `optimize_for_inference` makes it faster, as it often does not."""
        import torch

        jit: Any = torch.jit  # without annotations
        prepared = eager_model(model)
        flat, module = flattened(prepared)
        with torch.inference_mode():
            traced = jit.trace(module, tuple(flat), strict=False, check_trace=False)
            jit.save(jit.freeze(traced), path)
            plain, tuned = jit.load(path), jit.optimize_for_inference(jit.load(path))
            times = {False: plain, True: tuned}
            best = {key: min(time_calls(functools.partial(value, *flat), 0.5)) for key, value in times.items()}
        path.with_suffix(".json").write_text(json.dumps(best[True] < best[False]), encoding="utf-8")

    def read_inputs(self) -> None:
        """Lay the tensors out."""
        super().read_inputs()
        self.flat = tensors((self.args, self.kwargs))

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
    def prepare(model: ProjectModel, path: Path) -> None:
        """Export and compile a model."""
        import torch

        from hatch_aoti.export.program import load_program

        with torch.no_grad():
            if model.entry.exported is not None:
                program = load_program(model.entry, root=model.root, device="cpu").program
            else:
                eager = eager_model(model)
                program = torch.export.export(
                    eager.module, eager.args, eager.kwargs, dynamic_shapes=eager.dynamic_shapes, strict=False
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
    def prepare(model: ProjectModel, path: Path) -> None:
        """Export a model, and save its inputs in a form that needs no torch."""
        import numpy as np
        import torch

        prepared = eager_model(model)
        with torch.no_grad():
            torch.onnx.export(
                prepared.module, prepared.args, path, kwargs=prepared.kwargs, dynamo=True, verbose=False,
                dynamic_shapes=prepared.dynamic_shapes,
            )  # fmt: skip
        np.savez(path.with_suffix(".npz"), *(x.numpy() for x in tensors((prepared.args, prepared.kwargs))))

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
