"""Running compile jobs outside the build process, several at a time; a crash takes down one model, not the build.

A job is a function's dotted name and a JSON-ready value for it; its result is a JSON-ready value, so the same job
runs in this process, in a local worker, or elsewhere. While it runs, a job reports the stage it is in with
`report_stage`.

The workers are forked from a fork server: one process that has imported what every job needs (seconds, for torch and
its compiler) and has done nothing else, so that each job still starts from the same state. The build talks to it
through a socket; each worker has a pipe to the build, for the stages it reports.

Nothing outlives the build. When the build dies, however it does, the socket closes, and the fork server kills its
workers' process groups, compilers included; should the fork server be gone as well, each worker notices by itself that
a pipe, whose writing end only the build has, was closed. What a worker started in a session of its own comes to the
fork server when the worker ends (on Linux, which has `PR_SET_CHILD_SUBREAPER`), and is killed there.

A model's code is nobody to rely on: its standard input is empty, and the descriptors that a worker needs are not among
the low ones that programs close wholesale.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import IO, TYPE_CHECKING, Any

from hatch_aoti.build.fork_server import EXIT, RESULT, Task
from hatch_aoti.build.resources import memory_kills
from hatch_aoti.codec import pack

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

__all__ = ["Job", "Outcome", "describe_exit", "run_jobs"]


@dataclasses.dataclass(frozen=True)
class Job:
    """A call of `function` ("package.module:name") with `payload`, in a process of its own.

    `directory` must exist; the job's own files go there. All that the process prints goes to `log`. It is killed, with
    all that it started, when it takes longer than `timeout` seconds.
    """

    name: str
    function: str
    payload: Mapping[str, Any]
    directory: Path
    log: Path
    environ: Mapping[str, str]
    cwd: Path
    timeout: int | None = None


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a job ended: with a `result`, or without one because its process did (`returncode`, in `stage`).

    `timed_out`: it was killed because its time was up. `memory`: the system has killed processes for memory meanwhile.
    One that is not `begun` has not been run, because of how another one ended.
    """

    job: Job
    result: Any
    returncode: int
    stage: str
    timed_out: bool = False
    memory: bool = False
    begun: bool = True

    @property
    def crashed(self) -> bool:
        """Whether the process ended without leaving a result."""
        return self.result is None

    @property
    def killed(self) -> bool:
        """Whether it was killed by another than the build: as good as always the system, for want of memory."""
        return self.crashed and self.begun and self.returncode == -signal.SIGKILL and not self.timed_out

    def describe_crash(self) -> str:
        """Say in words how the process ended."""
        if self.timed_out:
            return f"it was stopped after {self.job.timeout} s, the `build-timeout`"
        if self.killed and self.memory:
            return "the worker process was killed by the system, which ran out of memory"
        return describe_exit(self.returncode)


def describe_exit(returncode: int) -> str:
    """Say in words how a worker process ended that left no result; `returncode` as `subprocess` has it."""
    if returncode >= 0:
        return f"the worker process exited with status {returncode} before it had a result"
    try:
        name = signal.Signals(-returncode).name
    except ValueError:
        name = f"signal {-returncode}"
    if name == "SIGKILL":
        return "the worker process was killed (SIGKILL), most likely because the machine ran out of memory"
    return f"the worker process crashed ({name})"


def run_jobs(
    jobs: Sequence[Job],
    *,
    at_once: int,
    preload: str = "",
    on_stage: Callable[[Job, str], None] = lambda _job, _stage: None,
    stop_after: Callable[[Outcome], bool] = lambda _outcome: False,
) -> list[Outcome]:
    """Run `jobs`, at most `at_once` at a time, and return their outcomes in the same order.

    `preload` ("package.module:name") is called without arguments before the first job, in the process that all workers
    are forked from; if it fails, the jobs are run all the same. `on_stage(job, stage)` is called from worker threads:
    at a job's start (`"start"`), whenever it reports a stage, and at its end (`"done"` or `"failed"`). After an outcome
    of which `stop_after` is true, no other job is begun. On an interrupt all workers are killed with what they started.
    """
    if not jobs:
        return []
    stopped = threading.Event()

    def run(job: Job) -> Outcome:
        if stopped.is_set():
            return Outcome(job, None, -signal.SIGTERM, "start", begun=False)
        outcome = _run_job(job, server, on_stage)
        if stop_after(outcome):
            stopped.set()
        return outcome

    server = _ForkServer(jobs, preload)
    with server, ThreadPoolExecutor(max_workers=max(1, at_once)) as pool:
        try:
            return list(pool.map(run, jobs))
        except BaseException:
            stopped.set()
            server.close()
            raise


class _ForkServer:
    """The build's end of the process that forks the workers."""

    def __init__(self, jobs: Sequence[Job], preload: str) -> None:
        self._control, theirs = socket.socketpair()
        watched, self._alive = os.pipe()  # the writing end is this process's alone
        self._guard = threading.Lock()
        # The sys.path of this process, as frontends arrange their build environments in different ways.
        boot = "import json, sys; sys.path[:] = json.loads(sys.argv[1])"
        boot += "; from hatch_aoti.build.fork_server import serve; serve()"
        path = json.dumps(_search_path(sys.path, jobs[0].cwd))
        with theirs, jobs[0].log.open("ab") as log, os.fdopen(watched):
            self._process = subprocess.Popen(
                # -P: without the current directory, where the project may have a module of any name.
                [sys.executable, "-P", "-c", boot, path, str(theirs.fileno()), str(watched), preload],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(theirs.fileno(), watched),
                start_new_session=True,
                # What all jobs have in common: a variable that is read on import must be the same for all.
                env=dict(set.intersection(*(set(job.environ.items()) for job in jobs))),
                cwd=jobs[0].cwd,
            )

    def start(self, task: Path, result: Path, timeout: int | None) -> IO[str]:
        """Have a worker forked for `task`; return the pipe with what it reports. Nothing comes if that fails."""
        read_end, write_end = os.pipe()
        try:
            with self._guard, contextlib.suppress(OSError):
                message = json.dumps([os.fspath(task), os.fspath(result), timeout]) + "\n"
                socket.send_fds(self._control, [message.encode()], [write_end])
        finally:
            os.close(write_end)
        return os.fdopen(read_end, encoding="utf-8")

    def close(self) -> None:
        """End the fork server and with it all workers that still run."""
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)
        self._control.close()

    def returncode(self) -> int:
        """Return how the fork server ended, if it did so by itself."""
        return self._process.wait()

    def __enter__(self) -> _ForkServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        self._process.wait()
        os.close(self._alive)


def _search_path(path: Sequence[str], root: Path) -> list[str]:
    """Return `path` with the project's root last, where a frontend may have put it first: its modules hide no others.

    Where the project's own modules are, and before what, is for the job to arrange.
    """
    here = {"", os.path.abspath(root), os.path.realpath(root)}  # noqa: PTH100 (with and without links)
    return [entry for entry in path if entry not in here] + ([os.fspath(root)] if here.intersection(path) else [])


def _run_job(job: Job, server: _ForkServer, on_stage: Callable[[Job, str], None]) -> Outcome:
    file = job.directory / "job.json"
    result = job.directory / "result.json"
    task = Task(job.function, job.payload, dict(job.environ), job.cwd, job.log)
    file.write_text(json.dumps(pack(task)), encoding="utf-8")
    on_stage(job, "start")
    kills = memory_kills()
    stage, returncode, timed_out, value = "start", None, False, None
    with server.start(file, result, job.timeout) as events:
        for line in events:
            word, _, rest = line.strip().partition(" ")
            if word == EXIT:
                returncode, timed_out = json.loads(rest)
            elif word == RESULT:
                value = json.loads(rest)
            else:
                stage = line.strip()
                on_stage(job, stage)
    with contextlib.suppress(OSError, ValueError):
        value = json.loads(result.read_text(encoding="utf-8"))
    on_stage(job, "failed" if value is None else "done")
    if returncode is None:  # without the fork server's last word on the worker, the fork server itself is gone
        returncode = server.returncode() if value is None else 0
    return Outcome(job, value, returncode, stage, timed_out=timed_out, memory=(memory_kills() or 0) > (kills or 0))
