"""Running compile jobs outside the build process, several at a time; a crash takes down one model, not the build.

A job is a function's dotted name and a JSON-ready value for it; its result is a JSON-ready value, so the same job
runs in this process, in a local worker, or elsewhere. While it runs, a job reports the stage it is in with
`report_stage`.

The workers are forked from a nursery: one process that has imported what every job needs (seconds, for torch and its
compiler) and has done nothing else, so that each job still starts from the same state. The build talks to it through a
socket; each worker has a pipe to the build, for the stages it reports.

No worker outlives the build. When the build dies, however it does, the socket closes, and the nursery kills its
workers' process groups, compilers included; should the nursery be gone as well, each worker notices by itself that
its standard input, whose writing end only the build has, was closed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["Job", "Outcome", "default_job_count", "describe_exit", "kill_group", "report_stage", "run_jobs"]

_MEMORY_PER_JOB = 3 << 30  # bytes; one g++ on torch's headers takes about 1.5 GiB, torch itself another 0.5

_events: IO[str] | None = None  # in a worker: where stages are reported


@dataclasses.dataclass(frozen=True)
class Job:
    """A call of `function` ("package.module:name") with `payload`, in a process of its own.

    `directory` must exist; the job's own files go there. All that the process prints goes to `log`.
    """

    name: str
    function: str
    payload: Mapping[str, Any]
    directory: Path
    log: Path
    environ: Mapping[str, str]
    cwd: Path


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a job ended: with a `result`, or without one because its process did (`returncode`, in `stage`)."""

    job: Job
    result: Any
    returncode: int
    stage: str

    @property
    def crashed(self) -> bool:
        """Whether the process ended without leaving a result."""
        return self.result is None

    def describe_crash(self) -> str:
        """Say in words how the process ended."""
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


def default_job_count(count: int) -> int:
    """Return how many of `count` jobs to run at once: within the cores this process may use, and the memory free."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limit = cores
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                limit = min(limit, int(line.split()[1]) * 1024 // _MEMORY_PER_JOB)
    return max(1, min(count, limit))


def run_jobs(
    jobs: Sequence[Job],
    *,
    at_once: int,
    preload: str = "",
    on_stage: Callable[[Job, str], None] = lambda _job, _stage: None,
) -> list[Outcome]:
    """Run `jobs`, at most `at_once` at a time, and return their outcomes in the same order.

    `preload` ("package.module:name") is called without arguments before the first job, in the process that all workers
    are forked from; if it fails, the jobs are run all the same. `on_stage(job, stage)` is called from worker threads:
    at a job's start (`"start"`), whenever it reports a stage, and at its end (`"done"` or `"failed"`). On an interrupt
    all workers are killed with what they started.
    """
    if not jobs:
        return []
    stopped = threading.Event()

    def run(job: Job) -> Outcome:
        if stopped.is_set():
            return Outcome(job, None, -signal.SIGTERM, "start")
        return _run_job(job, nursery, on_stage)

    nursery = _Nursery(jobs, preload)
    with nursery, ThreadPoolExecutor(max_workers=max(1, at_once)) as pool:
        try:
            return list(pool.map(run, jobs))
        except BaseException:
            stopped.set()
            nursery.close()
            raise


def report_stage(stage: str) -> None:
    """Tell the build, from inside a job, which stage begins. Outside a worker this does nothing."""
    if _events is not None:
        with contextlib.suppress(OSError):
            _events.write(stage + "\n")
            _events.flush()


class _Nursery:
    """The build's end of the process that forks the workers."""

    def __init__(self, jobs: Sequence[Job], preload: str) -> None:
        self._control, theirs = socket.socketpair()
        self._guard = threading.Lock()
        # The very sys.path of this process: frontends arrange their build environments in different ways.
        boot = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); import hatch_aoti.workers as w; w._nurse()"
        arguments = [json.dumps(sys.path), str(theirs.fileno()), preload]
        with theirs, jobs[0].log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", boot, *arguments],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                # What all jobs have in common: a variable that is read on import must be the same for all.
                env=dict(set.intersection(*(set(job.environ.items()) for job in jobs))),
                cwd=jobs[0].cwd,
            )

    def start(self, task: Path, result: Path) -> IO[str]:
        """Have a worker forked for `task`; return the pipe with what it reports. Nothing comes if that fails."""
        read_end, write_end = os.pipe()
        try:
            with self._guard, contextlib.suppress(OSError):
                message = json.dumps([os.fspath(task), os.fspath(result)]) + "\n"
                socket.send_fds(self._control, [message.encode()], [write_end])
        finally:
            os.close(write_end)
        return os.fdopen(read_end, encoding="utf-8")

    def close(self) -> None:
        """End the nursery and with it all workers that still run."""
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)
        self._control.close()

    def returncode(self) -> int:
        """Return how the nursery ended, if it did so by itself."""
        return self._process.wait()

    def __enter__(self) -> _Nursery:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()


def _run_job(job: Job, nursery: _Nursery, on_stage: Callable[[Job, str], None]) -> Outcome:
    task = job.directory / "job.json"
    result = job.directory / "result.json"
    text = {
        "function": job.function,
        "payload": job.payload,
        "environ": dict(job.environ),
        "cwd": os.fspath(job.cwd),
        "log": os.fspath(job.log),
    }
    task.write_text(json.dumps(text), encoding="utf-8")
    on_stage(job, "start")
    stage, returncode = "start", None
    with nursery.start(task, result) as events:
        for line in events:
            word, _, rest = line.strip().partition(" ")
            if word == _EXIT:
                returncode = int(rest)
            else:
                stage = line.strip()
                on_stage(job, stage)
    value = None
    with contextlib.suppress(OSError, ValueError):
        value = json.loads(result.read_text(encoding="utf-8"))
    on_stage(job, "failed" if value is None else "done")
    # Without the nursery's last word on the worker, the nursery itself is gone.
    return Outcome(job, value, nursery.returncode() if returncode is None and value is None else returncode or 0, stage)


# --- In the nursery and its workers ---------------------------------------------------------------------------------


_EXIT = "exit"  # the last line about a worker: "exit", and its status as `subprocess` has it


def _call(reference: str, *arguments: Any) -> Any:
    module, _, name = reference.partition(":")
    return getattr(importlib.import_module(module), name)(*arguments)


def _nurse() -> None:
    """Be the nursery: `sys.argv[1:]` is the search path (used already), the socket, and what to call first.

    Has no threads, which a fork would leave behind in an undefined state.
    """
    control, preload = socket.socket(fileno=int(sys.argv[2])), sys.argv[3]
    os.set_inheritable(control.fileno(), False)
    wake, wakened = os.pipe()
    os.set_blocking(wakened, False)
    signal.set_wakeup_fd(wakened)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    if preload:
        try:
            _call(preload)
        except Exception:  # noqa: BLE001 - each job will meet it again, and say for which model
            traceback.print_exc()
    workers: dict[int, int] = {}  # process -> its pipe to the build
    while True:
        ready, _, _ = select.select([control.fileno(), wake], [], [])
        if wake in ready:
            os.read(wake, 1 << 12)
            _reap(workers)
        if control.fileno() in ready:
            message, pipes, _, _ = socket.recv_fds(control, 1 << 16, 1)
            if not message:  # the build has ended
                for pid in workers:
                    kill_group(pid)
                os._exit(0)
            task, result = map(Path, json.loads(message))
            os.set_inheritable(pipes[0], False)  # a compiler that lingers must not hold it open
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for other in (wake, wakened, control.fileno(), *workers.values()):
                    os.close(other)
                _work(task, result, pipes[0])
            with contextlib.suppress(OSError):  # the worker does the same: whoever comes first
                os.setpgid(pid, pid)
            workers[pid] = pipes[0]


def _reap(workers: dict[int, int]) -> None:
    """Tell the build of workers that have ended, and kill what they started and left running."""
    for pid, pipe in list(workers.items()):
        if hasattr(os, "waitid"):  # macOS has none
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                continue
            kill_group(pid)  # it is not yet waited for, so its group's number is still its own
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            del workers[pid]
            with contextlib.suppress(OSError):
                os.write(pipe, f"{_EXIT} {os.waitstatus_to_exitcode(status)}\n".encode())
            os.close(pipe)


def kill_group(pid: int) -> None:
    """Kill a process that leads a group and has not been waited for, and all that it started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _work(task: Path, result: Path, pipe: int) -> None:
    """Be a worker, and never return."""
    global _events  # noqa: PLW0603 - a process has one build to report to
    status = 1
    try:
        with contextlib.suppress(OSError):
            os.setpgid(0, 0)
        job = json.loads(task.read_text(encoding="utf-8"))
        log = os.open(job["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        _events = os.fdopen(pipe, "w", encoding="utf-8")
        threading.Thread(target=_die_with_the_build, daemon=True).start()
        os.environ.clear()
        os.environ.update(job["environ"])
        os.chdir(job["cwd"])
        tempfile.tempdir = None  # the nursery's, if it asked
        value = _call(job["function"], job["payload"])
        partial = result.with_suffix(".partial")
        partial.write_text(json.dumps(value), encoding="utf-8")
        partial.replace(result)
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
    except BaseException:  # noqa: BLE001 - for the log
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        # Skip interpreter shutdown: there is nothing left to save, and user code may have left threads behind.
        os._exit(status)


def _die_with_the_build() -> None:
    os.read(0, 1)  # blocks until the build closes the pipe, or dies
    os.killpg(0, signal.SIGKILL)
