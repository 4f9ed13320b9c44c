"""Workers: forked from one process with what every job needs, and never outliving the build."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from hatch_aoti.workers import Job, run_jobs

JOBS = """
import os, signal, subprocess, sys, time
from hatch_aoti.workers import report_stage

loaded = 0

def load():
    global loaded
    loaded = os.getpid()

def load_and_fail():
    load()
    raise RuntimeError("no such thing")

def describe(payload):
    report_stage("describe")
    print("said by", payload)
    return [payload, os.environ["OWN"], os.getcwd(), os.getppid() == loaded]

def kill(payload):
    report_stage("kill")
    os.kill({"self": os.getpid(), "nursery": os.getppid()}[payload], signal.SIGKILL)
    return "still there"

def quit(payload):
    raise SystemExit(payload)

def fail(payload):
    raise ValueError(payload)

def leave_a_child(payload):
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"]).pid

def wait(payload):
    open(payload, "w").close()
    time.sleep(1000)
"""


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "made_up_jobs.py").write_text(JOBS)
    monkeypatch.syspath_prepend(tmp_path)

    def make(name: str, function: str, payload: object) -> Job:
        directory = tmp_path / name
        directory.mkdir()
        environ = {**os.environ, "OWN": name}
        return Job(name, f"made_up_jobs:{function}", payload, directory, directory / "log.txt", environ, tmp_path)

    return make


def test_jobs_answer_in_their_order_each_with_its_own_environment_and_log(job, tmp_path):
    stages = []
    jobs = [job(name, "describe", name.upper()) for name in ("c", "a", "b")]
    outcomes = run_jobs(
        jobs, at_once=2, preload="made_up_jobs:load", on_stage=lambda job, stage: stages.append((job.name, stage))
    )
    assert [outcome.result for outcome in outcomes] == [[n.upper(), n, str(tmp_path), True] for n in ("c", "a", "b")]
    assert [stage for name, stage in stages if name == "a"] == ["start", "describe", "done"]
    assert "said by A" in (tmp_path / "a" / "log.txt").read_text()


def test_no_job_starts_no_process():
    assert run_jobs([], at_once=2, preload="no_such_module:load") == []


@pytest.mark.parametrize("preload", ["", "made_up_jobs:load_and_fail", "no_such_module:load"])
def test_jobs_run_also_where_nothing_can_be_imported_ahead(job, preload):
    [outcome] = run_jobs([job("a", "describe", 1)], at_once=1, preload=preload)
    assert outcome.result[:2] == [1, "a"]


@pytest.mark.parametrize(
    ("function", "payload", "returncode", "words"),
    [
        ("kill", "self", -signal.SIGKILL, "ran out of memory"),
        ("quit", 7, 7, "status 7"),
        ("fail", "made up", 1, "status 1"),
    ],
)
def test_a_worker_that_ends_early_takes_no_other_with_it(job, tmp_path, function, payload, returncode, words):
    ended, other = run_jobs([job("a", function, payload), job("b", "describe", 2)], at_once=2)
    assert ended.crashed
    assert ended.returncode == returncode
    assert words in ended.describe_crash()
    assert other.result[:2] == [2, "b"]
    if function == "fail":
        assert "ValueError: made up" in (tmp_path / "a" / "log.txt").read_text()


def test_jobs_are_finished_and_no_other_begun_when_the_process_that_forks_workers_is_killed(job):
    running, later = run_jobs([job("a", "kill", "nursery"), job("b", "describe", 2)], at_once=1)
    assert running.result == "still there"
    assert later.crashed
    assert later.returncode == -signal.SIGKILL


def test_what_a_job_leaves_running_is_killed(job):
    [outcome] = run_jobs([job("a", "leave_a_child", None)], at_once=1)
    wait_until(lambda: not alive(outcome.result))


def test_an_interrupted_build_leaves_no_worker(job, tmp_path):
    def interrupt(_job: Job, stage: str) -> None:
        if stage == "start":
            return
        raise KeyboardInterrupt

    jobs = [job("b", "describe", 2), job("a", "wait", os.fspath(tmp_path / "reached"))]
    with pytest.raises(KeyboardInterrupt):
        run_jobs(jobs, at_once=2, on_stage=interrupt)
    wait_until(lambda: not any(str(tmp_path / "a") in line for line in command_lines()))


def alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def command_lines() -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            found.append(path.read_bytes().decode(errors="replace"))
        except OSError:
            continue
    return found


def wait_until(condition) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.05)
