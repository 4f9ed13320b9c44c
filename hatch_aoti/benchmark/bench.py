"""One run of the benchmark: where it works, which models it has, and how their processes are started."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hatch_aoti.benchmark.contenders import CONTENDERS
from hatch_aoti.benchmark.figures import OURS
from hatch_aoti.benchmark.processes import Fresh, run_job
from hatch_aoti.benchmark.reference import INPUTS
from hatch_aoti.benchmark.tasks import ReferenceTask
from hatch_aoti.codec import encode
from hatch_aoti.errors import AotiError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hatch_aoti.benchmark.options import Options
    from hatch_aoti.benchmark.tasks import ProjectModel
    from hatch_aoti.build.progress import Reporter

__all__ = ["Bench", "Subject", "log_tail", "scratch_directory"]


@dataclasses.dataclass(frozen=True)
class Subject:
    """A model that is measured. `folder` has its files, `site` is put on hatch-aoti's import path."""

    name: str
    package: str
    folder: Path
    project: ProjectModel | None
    inputs: tuple[Path, tuple[str, ...]]  # the directory with inputs and answers; what the inputs are
    site: Path | None = None

    def task(self, key: str, threads: int, artifact: Path | None) -> dict[str, Any]:
        """Return what the process of a contender needs to know."""
        paths = [path or os.getcwd() for path in sys.path]  # noqa: PTH109 - strings, as in sys.path
        paths += [] if self.project is None else self.project.roots.paths
        project = self.project
        if self.site is not None and key == OURS:
            paths, project = [str(self.site), *paths], None
        return {
            "contender": key,
            "paths": paths,
            "threads": threads,
            "model": self.name,
            "package": self.package,
            "inputs": str(self.inputs[0] / INPUTS),
            "artifact": None if artifact is None else str(artifact),
            "project": encode(project),
        }


@dataclasses.dataclass(frozen=True)
class Bench:
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

    def reference(
        self, model: str, project: ProjectModel | None = None, package: str = ""
    ) -> tuple[Path, tuple[str, ...]]:
        """Have the inputs and answers of a model written: a project's, or one of an installed package."""
        directory = self.directory("reference")
        function = "reference:from_signature" if project is None else "reference:from_module"
        task = ReferenceTask(model, directory, project, package)
        outcome, _ = run_job(function, task, directory, environ=self.environ, cwd=self.cwd)
        if outcome.crashed:
            raise AotiError(
                f"model `{model}` cannot be called on its inputs here: {outcome.describe_crash()}\n"
                f"{log_tail(directory)}"
            )
        return directory, tuple(outcome.result)

    def fresh(self, subject: Subject, key: str, directory: Path, threads: int | None = None) -> Fresh:
        """Start a contender."""
        suffix = CONTENDERS[key].artifact
        artifact = self.scratch / "artifacts" / key / f"{subject.name}{suffix}" if suffix and subject.project else None
        task = subject.task(key, threads or self.options.threads, artifact)
        return Fresh(task, directory, environ=self.environ, cwd=self.cwd)


@contextlib.contextmanager
def scratch_directory() -> Iterator[Path]:
    """Make a directory for everything temporary; it goes when the block ends."""
    with tempfile.TemporaryDirectory(prefix="hatch-aoti-bench-", ignore_cleanup_errors=True) as directory:
        yield Path(directory)


def log_tail(directory: Path) -> str:
    """Return the end of what a job that ran in a directory has printed."""
    log = (directory / "log.txt").read_text(encoding="utf-8", errors="replace")
    return "\n".join(log.splitlines()[-25:])
