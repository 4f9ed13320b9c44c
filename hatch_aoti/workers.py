"""Running compile jobs outside the build process, several at a time; a crash takes down one model, not the build.

A job is a function's dotted name and a JSON-ready value for it; its result is a JSON-ready value, so the same job
runs in this process, in a local worker, or elsewhere. While it runs, a job reports the stage it is in with
`report_stage`.

A worker never outlives the build: it leads a process group of its own, holds the reading end of a pipe whose writing
end only the build has, and kills its group (compilers included) when that pipe closes, however the build died.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["Job", "Outcome", "default_job_count", "report_stage", "run_jobs"]

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
        if self.returncode >= 0:
            return f"the worker process exited with status {self.returncode} before it had a result"
        try:
            name = signal.Signals(-self.returncode).name
        except ValueError:
            name = f"signal {-self.returncode}"
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
    jobs: Sequence[Job], *, at_once: int, on_stage: Callable[[Job, str], None] = lambda _job, _stage: None
) -> list[Outcome]:
    """Run `jobs`, at most `at_once` at a time, and return their outcomes in the same order.

    `on_stage(job, stage)` is called from worker threads: at a job's start (`"start"`), whenever it reports a stage,
    and at its end (`"done"` or `"failed"`). On an interrupt all workers are killed with what they started.
    """
    running: set[subprocess.Popen[str]] = set()
    stopped = threading.Event()
    guard = threading.Lock()

    def run(job: Job) -> Outcome:
        if stopped.is_set():
            return Outcome(job, None, -signal.SIGTERM, "start")
        return _run_job(job, running, guard, on_stage)

    with ThreadPoolExecutor(max_workers=max(1, at_once)) as pool:
        try:
            return list(pool.map(run, jobs))
        except BaseException:
            stopped.set()
            with guard:
                for process in running:
                    _kill_group(process)
            raise


def report_stage(stage: str) -> None:
    """Tell the build, from inside a job, which stage begins. Outside a worker this does nothing."""
    if _events is not None:
        with contextlib.suppress(OSError):
            _events.write(stage + "\n")
            _events.flush()


def _run_job(
    job: Job, running: set[subprocess.Popen[str]], guard: threading.Lock, on_stage: Callable[[Job, str], None]
) -> Outcome:
    task = job.directory / "job.json"
    result = job.directory / "result.json"
    task.write_text(json.dumps({"function": job.function, "payload": job.payload}), encoding="utf-8")
    on_stage(job, "start")
    stage = "start"
    read_end, write_end = os.pipe()
    # The very sys.path of this process: frontends arrange their build environments in different ways.
    boot = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from hatch_aoti.workers import _main; _main()"
    with job.log.open("ab") as log:
        try:
            process = subprocess.Popen(
                [sys.executable, "-c", boot, json.dumps(sys.path), str(task), str(result), str(write_end)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                pass_fds=(write_end,),
                start_new_session=True,
                env=dict(job.environ),
                cwd=job.cwd,
                text=True,
            )
        finally:
            os.close(write_end)
    with guard:
        running.add(process)
    try:
        with os.fdopen(read_end, encoding="utf-8") as events:
            for line in events:
                stage = line.strip()
                on_stage(job, stage)
    finally:
        # The pipe closed, so the worker is gone but not yet waited for: its group's number is still its own. Kill
        # what the job started and left running.
        _kill_group(process)
        returncode = process.wait()
        if process.stdin is not None:
            process.stdin.close()
        with guard:
            running.discard(process)
    value = None
    with contextlib.suppress(OSError, ValueError):
        value = json.loads(result.read_text(encoding="utf-8"))
    on_stage(job, "failed" if value is None else "done")
    return Outcome(job, value, returncode, stage)


def _kill_group(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _main() -> None:
    """Be a worker: `sys.argv[1:]` is the search path (used already), the job, where its result goes, the event pipe."""
    global _events  # noqa: PLW0603 - a process has one build to report to
    task, result, event_pipe = Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4])
    os.set_inheritable(event_pipe, False)  # a compiler that lingers must not hold the pipe open
    _events = os.fdopen(event_pipe, "w", encoding="utf-8")
    threading.Thread(target=_die_with_the_build, daemon=True).start()
    job = json.loads(task.read_text(encoding="utf-8"))
    module, _, name = job["function"].partition(":")
    value = getattr(importlib.import_module(module), name)(job["payload"])
    partial = result.with_suffix(".partial")
    partial.write_text(json.dumps(value), encoding="utf-8")
    partial.replace(result)
    sys.stdout.flush()
    sys.stderr.flush()
    # Skip interpreter shutdown: there is nothing left to save, and user code may have left threads behind.
    os._exit(0)


def _die_with_the_build() -> None:
    os.read(0, 1)  # blocks until the build closes the pipe, or dies
    os.killpg(0, signal.SIGKILL)
