"""Workers: forked from one process with what every job needs, and never outliving the build."""

from __future__ import annotations

import colorsys
import dataclasses
import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from hatch_aoti.build import pipeline
from hatch_aoti.build.progress import Reporter
from hatch_aoti.build.workers import Job, run_jobs
from hatch_aoti.job.values import ModelFailure
from hatch_aoti.settings.model import Settings

if TYPE_CHECKING:
    from conftest import Projects


@pytest.fixture
def job(project: Projects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    project("jobs", into=".")
    monkeypatch.syspath_prepend(tmp_path)

    def make(name: str, function: str, payload: Any) -> Job:
        directory = tmp_path / name
        directory.mkdir(parents=True)
        environ = {**os.environ, "OWN": name}
        return Job(
            directory.name, f"made_up_jobs:{function}", payload, directory, directory / "log.txt", environ, tmp_path
        )

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


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux hands orphans to an ancestor")
def test_what_a_job_leaves_in_a_session_of_its_own_is_killed_before_its_outcome_is_known(job):
    [outcome] = run_jobs([job("a", "leave_a_daemon", None)], at_once=1)
    assert not alive(outcome.result)


def test_a_job_that_takes_too_long_is_stopped_with_its_stage_and_no_other(job, tmp_path):
    slow = dataclasses.replace(job("a", "wait", os.fspath(tmp_path / "reached")), timeout=2)
    stopped, other = run_jobs([slow, job("b", "describe", 2)], at_once=2)
    assert stopped.timed_out
    assert not stopped.killed
    assert stopped.describe_crash() == "it was stopped after 2 s, the `build-timeout`"
    assert other.result[:2] == [2, "b"]
    assert not any(str(tmp_path / "a") in line for line in command_lines())


def test_standard_input_is_empty(job, tmp_path):
    [outcome] = run_jobs([job("a", "ask", None)], at_once=1)
    assert outcome.returncode == 1
    assert "EOFError: EOF when reading a line" in (tmp_path / "a" / "log.txt").read_text()


def test_a_model_that_closes_descriptors_closes_none_that_the_build_needs(job):
    stages = []
    [outcome] = run_jobs([job("a", "close_descriptors", 1)], at_once=1, on_stage=lambda _, stage: stages.append(stage))
    assert outcome.result is True
    assert stages == ["start", "still heard", "done"]


@pytest.mark.parametrize("name", ["", "{root}"])
def test_modules_in_the_projects_folder_hide_none_of_pythons(name, job, tmp_path, monkeypatch):
    for module in ("json", "types", "socket", "colorsys", "torch"):
        (tmp_path / f"{module}.py").write_text("raise RuntimeError('the project`s own')")
    monkeypatch.setattr(
        sys, "path", [name.format(root=tmp_path), *(path for path in sys.path if path != str(tmp_path))]
    )
    [outcome] = run_jobs([job("a", "use", None)], at_once=1)
    file, last = outcome.result
    assert Path(file) == Path(colorsys.__file__)
    assert last == str(tmp_path)


def test_a_result_that_no_disk_has_room_for_still_arrives(job, tmp_path):
    [outcome] = run_jobs([job("a", "overflow", os.fspath(tmp_path))], at_once=1)
    assert outcome.result == {"big": "x" * 100000}


def test_after_a_job_that_is_killed_no_other_is_begun_if_so_asked(job, tmp_path):
    jobs = [job("a", "fail_once", os.fspath(tmp_path / "failed")), *(job(name, "describe", 1) for name in "bcd")]
    outcomes = run_jobs(jobs, at_once=1, stop_after=lambda outcome: outcome.killed)
    assert [outcome.begun for outcome in outcomes] == [True, False, False, False]
    assert [outcome.killed for outcome in outcomes] == [True, False, False, False]
    certain = dataclasses.replace(outcomes[0], memory=True)
    assert certain.describe_crash() == "the worker process was killed by the system, which ran out of memory"


def test_models_killed_for_memory_and_those_behind_them_are_built_one_at_a_time(job, tmp_path, capsys):
    made = []

    def jobs_for(names, folder):
        made.append((list(names), folder))
        return [
            job(os.fspath(folder / name), "build_once_killed", {"mark": os.fspath(tmp_path / name)}) for name in names
        ]

    (tmp_path / "mark-c").touch()
    settings = Settings(models={}, jobs=2)
    requests: Any = dict.fromkeys(("mark-a", "mark-b", "mark-c"), SimpleNamespace(device="cuda"))  # nothing to import
    outcomes = pipeline._outcomes(requests, jobs_for, settings, tmp_path / "scratch", Reporter())
    assert [pipeline._answer(outcome) for outcome in outcomes] == [ModelFailure("compile", "made up")] * 3
    assert made[1][1] == tmp_path / "scratch" / "again"
    assert "mark-a" in made[1][0]
    said = capsys.readouterr().err
    assert "the system killed mark-a" in said
    assert "what is left is built one at a time: mark-a" in said


def test_what_a_model_leaves_in_place_of_a_result_is_its_failure(job):
    [outcome] = run_jobs([job("a", "describe", 1)], at_once=1)
    failure = pipeline._answer(outcome)
    assert isinstance(failure, ModelFailure)
    assert failure.reason.startswith("its worker left something else than a result: it is not of version 1")


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
