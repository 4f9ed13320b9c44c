"""What the benchmark asks of one way to run one model; `contenders` has those that there are."""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any, ClassVar

from hatch_aoti.benchmark.eager import install_roots

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractContextManager
    from pathlib import Path

    from hatch_aoti.benchmark.tasks import ProjectModel

__all__ = ["Contender", "describe_error"]


class Contender:
    """One way to run a model. `task` says which (see `bench.Subject.task`), `call` is set by `load`.

    `artifact` is the suffix of the file that `prepare` makes, empty for a contender that needs none; `requires` are the
    modules, apart from torch, without which it cannot run.
    """

    name: ClassVar[str]
    artifact: ClassVar[str] = ""
    requires: ClassVar[tuple[str, ...]] = ()

    def __init__(self, task: Mapping[str, Any]) -> None:
        self.task = task

    @staticmethod
    def prepare(model: ProjectModel, path: Path) -> None:
        """Make the artifact of a project's model."""
        raise NotImplementedError

    def import_framework(self) -> None:
        """Import what every program that runs models this way imports first."""
        import torch

        torch.set_num_threads(self.task["threads"])
        torch.manual_seed(0)

    def read_inputs(self) -> None:
        """Read the inputs and do what is the benchmark's own business; no clock runs."""
        import torch

        project = self.project()
        if project is not None and project.roots.packages:  # inputs may have classes from there
            install_roots(project.roots)
        self.args, self.kwargs = torch.load(self.task["inputs"], weights_only=False)

    def project(self) -> ProjectModel | None:
        """Return the project's model that this is, if it is one; what reads it is imported while no clock runs."""
        if self.task["project"] is None:
            return None
        from hatch_aoti.benchmark.tasks import ProjectModel
        from hatch_aoti.codec import decode

        return decode(ProjectModel, self.task["project"])

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


def describe_error(error: BaseException) -> str:
    """Return the type and first line of an error, as tables have it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
