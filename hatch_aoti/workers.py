"""Running compile jobs outside the build process, several at a time; a crash takes down one model, not the build.

A job is a function's dotted name and a JSON-ready value for it; its result is a JSON-ready value, so the same job
runs in this process, in a local worker, or elsewhere. While it runs, a job reports the stage it is in with
`report_stage`.

The workers are forked from a nursery: one process that has imported what every job needs (seconds, for torch and its
compiler) and has done nothing else, so that each job still starts from the same state. The build talks to it through a
socket; each worker has a pipe to the build, for the stages it reports.

Nothing outlives the build. When the build dies, however it does, the socket closes, and the nursery kills its workers'
process groups, compilers included; should the nursery be gone as well, each worker notices by itself that a pipe, whose
writing end only the build has, was closed. What a worker started in a session of its own comes to the nursery when the
worker ends (on Linux, which has `PR_SET_CHILD_SUBREAPER`), and is killed there.

A model's code is nobody to rely on: its standard input is empty, and the descriptors that a worker needs are not among
the low ones that programs close wholesale.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import importlib
import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from hatch_aoti.resources import memory_kills

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

__all__ = ["Job", "Outcome", "describe_exit", "kill_group", "last_stage", "report_stage", "run_jobs"]

_events: IO[str] | None = None  # in a worker: where stages are reported
_stages = ["start"]  # in a worker: those reported


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
        outcome = _run_job(job, nursery, on_stage)
        if stop_after(outcome):
            stopped.set()
        return outcome

    nursery = _Nursery(jobs, preload)
    with nursery, ThreadPoolExecutor(max_workers=max(1, at_once)) as pool:
        try:
            return list(pool.map(run, jobs))
        except BaseException:
            stopped.set()
            nursery.close()
            raise


def report_stage(stage: str) -> None:
    """Tell the build, from inside a job, which stage begins. Outside a worker nobody hears it."""
    _stages.append(stage)
    _send(stage)


def report_to(build: IO[str]) -> None:
    """Have stages written to `build`, a line each: a process has one build to report to."""
    global _events  # noqa: PLW0603
    _events = build


def last_stage() -> str:
    """Return the stage that a job reported last."""
    return _stages[-1]


def _send(line: str) -> None:
    if _events is not None:
        with contextlib.suppress(OSError):
            _events.write(line + "\n")
            _events.flush()


class _Nursery:
    """The build's end of the process that forks the workers."""

    def __init__(self, jobs: Sequence[Job], preload: str) -> None:
        self._control, theirs = socket.socketpair()
        watched, self._alive = os.pipe()  # the writing end is this process's alone
        self._guard = threading.Lock()
        # The sys.path of this process, as frontends arrange their build environments in different ways.
        boot = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); import hatch_aoti.workers as w; w._nurse()"
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
        os.close(self._alive)


def _search_path(path: Sequence[str], root: Path) -> list[str]:
    """Return `path` with the project's root last, where a frontend may have put it first: its modules hide no others.

    Where the project's own modules are, and before what, is for the job to arrange.
    """
    here = {"", os.path.abspath(root), os.path.realpath(root)}  # noqa: PTH100 (with and without links)
    return [entry for entry in path if entry not in here] + ([os.fspath(root)] if here.intersection(path) else [])


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
    kills = memory_kills()
    stage, returncode, timed_out, value = "start", None, False, None
    with nursery.start(task, result, job.timeout) as events:
        for line in events:
            word, _, rest = line.strip().partition(" ")
            if word == _EXIT:
                returncode, timed_out = json.loads(rest)
            elif word == _RESULT:
                value = json.loads(rest)
            else:
                stage = line.strip()
                on_stage(job, stage)
    with contextlib.suppress(OSError, ValueError):
        value = json.loads(result.read_text(encoding="utf-8"))
    on_stage(job, "failed" if value is None else "done")
    if returncode is None:  # without the nursery's last word on the worker, the nursery itself is gone
        returncode = nursery.returncode() if value is None else 0
    return Outcome(job, value, returncode, stage, timed_out=timed_out, memory=(memory_kills() or 0) > (kills or 0))


# --- In the nursery and its workers ---------------------------------------------------------------------------------


_EXIT = "exit"  # the last line about a worker: "exit", its status as `subprocess` has it, and whether its time was up
_RESULT = "result"  # a line with the result, where its file could not be written

_BECOME_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER, <linux/prctl.h>
_PATIENCE = 10.0  # seconds; a killed process that the kernel keeps for longer is waiting for a broken device


@dataclasses.dataclass
class _Worker:
    """What the nursery knows of a worker: its pipe to the build, and when its time is up."""

    pipe: int
    deadline: float | None
    timed_out: bool = False


def _call(reference: str, *arguments: Any) -> Any:
    module, _, name = reference.partition(":")
    return getattr(importlib.import_module(module), name)(*arguments)


def _nurse() -> None:
    """Be the nursery: `sys.argv[1:]` is the search path (used already), a socket, a pipe, and what to call first.

    Has no threads, which a fork would leave behind in an undefined state.
    """
    control, watched, preload = socket.socket(fileno=int(sys.argv[2])), int(sys.argv[3]), sys.argv[4]
    for descriptor in (control.fileno(), watched):
        os.set_inheritable(descriptor, False)
    wake, wakened = os.pipe()
    os.set_blocking(wakened, False)
    signal.set_wakeup_fd(wakened)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    _adopt_orphans()
    if preload:
        try:
            _call(preload)
        except Exception:  # noqa: BLE001 - each job will meet it again, and say for which model
            traceback.print_exc()
    workers: dict[int, _Worker] = {}
    while True:
        deadlines = [worker.deadline for worker in workers.values() if worker.deadline is not None]
        patience = max(0.0, min(deadlines) - time.monotonic()) if deadlines else None
        ready, _, _ = select.select([control.fileno(), wake], [], [], patience)
        for pid, worker in workers.items():
            if worker.deadline is not None and worker.deadline <= time.monotonic():
                worker.deadline, worker.timed_out = None, True
                kill_group(pid)
        if wake in ready:
            os.read(wake, 1 << 12)
            _reap(workers)
        if control.fileno() in ready:
            message, pipes, _, _ = socket.recv_fds(control, 1 << 16, 1)
            if not message:  # the build has ended
                for pid in workers:
                    kill_group(pid)
                _kill_children()
                os._exit(0)
            task, result, timeout = json.loads(message)
            os.set_inheritable(pipes[0], False)  # a compiler that lingers must not hold it open
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for other in (wake, wakened, control.fileno(), *(worker.pipe for worker in workers.values())):
                    os.close(other)
                _work(Path(task), Path(result), pipes[0], watched)
            with contextlib.suppress(OSError):  # the worker does the same: whoever comes first
                os.setpgid(pid, pid)
            workers[pid] = _Worker(pipes[0], None if timeout is None else time.monotonic() + timeout)


def _reap(workers: dict[int, _Worker]) -> None:
    """Tell the build of workers that have ended, and kill what they started and left running."""
    for pid, worker in list(workers.items()):
        if hasattr(os, "waitid"):  # macOS has none
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                continue
            kill_group(pid)  # it is not yet waited for, so its group's number is still its own
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            del workers[pid]
            _kill_children(but=workers)
            with contextlib.suppress(OSError):
                last = json.dumps([os.waitstatus_to_exitcode(status), worker.timed_out])
                os.write(worker.pipe, f"{_EXIT} {last}\n".encode())
            os.close(worker.pipe)


def kill_group(pid: int) -> None:
    """Kill a process that leads a group and has not been waited for, and all that it started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _adopt_orphans() -> None:
    """Have what descendants of this process leave behind become its children, where the system can do that."""
    if sys.platform == "linux":
        import ctypes

        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_BECOME_SUBREAPER, 1, 0, 0, 0)


def _kill_children(*, but: Collection[int] = ()) -> None:
    """Kill this process's children `but` some, and then theirs, who have become its own, until there are none."""
    give_up = time.monotonic() + _PATIENCE
    while (children := _children() - set(but)) and time.monotonic() < give_up:
        for pid in children:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(OSError):
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.005)


def _children() -> set[int]:
    """Return this process's children, ended ones included, where there is a /proc that knows them."""
    found = set()
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc"):  # noqa: PTH208 - names are all that is needed
            if name.isdigit():
                with contextlib.suppress(OSError, IndexError):
                    # proc_pid_stat(5): the command in parentheses may have any character in it; then state and parent.
                    text = Path("/proc", name, "stat").read_text(encoding="utf-8", errors="replace")
                    if int(text.rpartition(")")[2].split()[1]) == os.getpid():
                        found.add(int(name))
    return found


def _work(task: Path, result: Path, pipe: int, watched: int) -> None:
    """Be a worker, and never return."""
    status = 1
    try:
        with contextlib.suppress(OSError):
            os.setpgid(0, 0)
        _adopt_orphans()  # until this process ends, when the nursery does
        job = json.loads(task.read_text(encoding="utf-8"))
        log = os.open(job["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        report_to(os.fdopen(_out_of_the_way(pipe), "w", encoding="utf-8"))
        threading.Thread(target=_die_with_the_build, args=(_out_of_the_way(watched),), daemon=True).start()
        os.environ.clear()
        os.environ.update(job["environ"])
        time.tzset()
        os.chdir(job["cwd"])
        tempfile.tempdir = None  # the nursery's, if it asked
        _deliver(_call(job["function"], job["payload"]), result)
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


def _deliver(value: Any, result: Path) -> None:
    """Leave the result of a job in its file; on a full disk, send it to the build."""
    text = json.dumps(value)
    partial = result.with_suffix(".partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(result)
    except OSError:
        _send(f"{_RESULT} {text}")


def _out_of_the_way(descriptor: int) -> int:
    """Return a descriptor in place of this one that is not among the first, which model code may close by the range."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = 1 << 16 if limit == resource.RLIM_INFINITY else min(limit, 1 << 16)
    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, highest // 2)
    os.close(descriptor)
    return moved


def _die_with_the_build(watched: int) -> None:
    os.read(watched, 1)  # blocks until the build closes the pipe, or dies
    _kill_children()
    os.killpg(0, signal.SIGKILL)
