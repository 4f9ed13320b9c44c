"""Fresh processes for the benchmark: contenders that answer questions, and jobs that are timed. None outlives it."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from typing import IO, TYPE_CHECKING, Any

from hatch_aoti.benchmark import child
from hatch_aoti.build.fork_server import kill_group
from hatch_aoti.build.workers import Job, describe_exit, run_jobs
from hatch_aoti.codec import pack

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path
    from types import TracebackType

    from hatch_aoti.build.workers import Outcome

__all__ = ["ContenderError", "Fresh", "run_job"]


class ContenderError(Exception):
    """A contender cannot go on. The text is the reason, for the table."""


class Fresh:
    """A process of one contender. It has been started, not waited for: `answer` is what loading and calling took.

    Everything temporary that it writes goes into `directory`; an empty one is a machine that has never seen the model.
    """

    def __init__(self, task: Mapping[str, Any], directory: Path, *, environ: Mapping[str, str], cwd: Path) -> None:
        self.log = directory / "log.txt"
        with self.log.open("ab") as log:
            self.spawned = time.monotonic_ns()
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-c", child.BOOTSTRAP, json.dumps(task)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
                env=scratch_environ(directory, environ, threads=task["threads"]),
                cwd=cwd,
                text=True,
            )
        self._stdin, self._stdout = _pipe(self.process.stdin), _pipe(self.process.stdout)

    def __enter__(self) -> Fresh:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.returncode is None:
            kill_group(self.process.pid)
            self.process.wait()
        for pipe in (self._stdin, self._stdout):
            with contextlib.suppress(OSError):
                pipe.close()

    def answer(self) -> Any:
        """Wait for the next answer. Raises `ContenderError` if the process failed, or is no more."""
        line = self._stdout.readline()
        if not line:
            # Not `wait`: as long as it has not been waited for, the number of its group is its own.
            os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)
            kill_group(self.process.pid)
            lines = self.log.read_text(encoding="utf-8", errors="replace").split("\n")
            said = next((f" ({line.strip()})" for line in reversed(lines) if line.strip()), "")
            raise ContenderError(f"{describe_exit(self.process.wait())}{said}")
        answer = json.loads(line)
        if "error" in answer:
            raise ContenderError(answer["error"])
        return answer["answer"]

    def ask(self, what: str, **arguments: Any) -> Any:
        """Have the process measure something (a method of `child._Process`), and wait for the answer."""
        with contextlib.suppress(BrokenPipeError):  # `answer` says what became of it
            self._stdin.write(json.dumps({"do": what, **arguments}) + "\n")
            self._stdin.flush()
        return self.answer()


def run_job(
    function: str, task: Any, directory: Path, *, environ: Mapping[str, str], cwd: Path
) -> tuple[Outcome, float]:
    """Run a function of this package in a process of its own; return how it ended and after how many seconds.

    `task` is one of those in `tasks`; the function gets it packed.
    """
    job = Job(
        directory.name, f"hatch_aoti.benchmark.{function}", pack(task), directory, directory / "log.txt",
        scratch_environ(directory, environ), cwd,
    )  # fmt: skip
    (directory / "result.json").unlink(missing_ok=True)  # of an earlier run
    start = time.monotonic()
    [outcome] = run_jobs([job], at_once=1)
    return outcome, time.monotonic() - start


def scratch_environ(directory: Path, environ: Mapping[str, str], *, threads: int | None = None) -> dict[str, str]:
    """Return the environment of a process whose temporary files and caches lie in a directory of its own."""
    folders = {"TMPDIR": "tmp", "TORCHINDUCTOR_CACHE_DIR": "inductor"}
    paths = {name: directory / folder for name, folder in folders.items()}
    for path in paths.values():
        path.mkdir(parents=True, exist_ok=True)
    counts = {} if threads is None else {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    return {**environ, **counts, **{name: os.fspath(path) for name, path in paths.items()}}


def _pipe(pipe: IO[str] | None) -> IO[str]:
    if pipe is None:
        raise ValueError("the process was started without pipes")
    return pipe
