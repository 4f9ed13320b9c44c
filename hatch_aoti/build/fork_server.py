"""The process that workers are forked from: it has imported what every job needs, and done nothing else."""

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
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hatch_aoti.codec import unpack
from hatch_aoti.stages import report_to, send

if TYPE_CHECKING:
    from collections.abc import Collection

__all__ = ["EXIT", "RESULT", "Task", "kill_group"]


EXIT = "exit"  # the last line about a worker: "exit", its status as `subprocess` has it, and whether its time was up


RESULT = "result"  # a line with the result, where its file could not be written


_BECOME_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER, <linux/prctl.h>


_PATIENCE = 10.0  # seconds; a killed process that the kernel keeps for longer is waiting for a broken device


@dataclasses.dataclass(frozen=True)
class Task:
    """What a worker finds in its file: the function to call ("package.module:name"), with what, where and how."""

    function: str
    payload: Any
    environ: dict[str, str]
    cwd: Path
    log: Path


@dataclasses.dataclass
class _Worker:
    """What the fork server knows of a worker: its pipe to the build, and when its time is up."""

    pipe: int
    deadline: float | None
    timed_out: bool = False


def _call(reference: str, *arguments: Any) -> Any:
    module, _, name = reference.partition(":")
    return getattr(importlib.import_module(module), name)(*arguments)


def serve() -> None:
    """Be the fork server: `sys.argv[1:]` is the search path (used already), a socket, a pipe, and what to call first.

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
                os.write(worker.pipe, f"{EXIT} {last}\n".encode())
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


def _work(file: Path, result: Path, pipe: int, watched: int) -> None:
    """Be a worker, and never return."""
    status = 1
    try:
        with contextlib.suppress(OSError):
            os.setpgid(0, 0)
        _adopt_orphans()  # until this process ends, when the fork server does
        task = unpack(Task, json.loads(file.read_text(encoding="utf-8")))
        log = os.open(task.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        report_to(os.fdopen(_out_of_the_way(pipe), "w", encoding="utf-8"))
        threading.Thread(target=_die_with_the_build, args=(_out_of_the_way(watched),), daemon=True).start()
        os.environ.clear()
        os.environ.update(task.environ)
        time.tzset()
        os.chdir(task.cwd)
        tempfile.tempdir = None  # the fork server's, if it asked
        _deliver(_call(task.function, task.payload), result)
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
        send(f"{RESULT} {text}")


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
