"""No call may end the process, hang, or answer silently what eager would not: a table of calls, see `hostile_calls`."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING

import pytest
from conftest import REPOSITORY, Builder, once, run, unpack
from hostile_calls.project import write_project

if TYPE_CHECKING:
    from pathlib import Path

LAYERED = ("mlp", "embedding", "select", "attention")
"""The kinds that are compiled for two targets as well: with external constants, a bundle, checked indices."""


def built(shared: Path, environ: dict[str, str], name: str, *options: tuple[str, ...]) -> Path:
    """Return a folder with the wheel, built once in a test run, to put on an import path."""
    root = once(shared / name, lambda root: Builder(environ).wheel(write_project(root, *options)))
    [wheel] = (root / "dist").glob("*.whl")
    return once(shared / f"{name}-installed", lambda directory: unpack(wheel, directory))


def judged(installed: Path, *options: str) -> dict[str, tuple[str, str]]:
    """Return (verdict, detail) of each combination."""
    environ = {**os.environ, "PYTHONPATH": os.fspath(REPOSITORY / "tests"), "PYTHONWARNINGS": ""}
    done = run(sys.executable, "-m", "hostile_calls.judge", installed, *options, environ=environ).check()
    lines = [json.loads(line) for line in done.output.splitlines() if line.startswith("{")]
    return {line["id"]: (line["verdict"], line["detail"]) for line in lines}


def faults(verdicts: dict[str, tuple[str, str]]) -> dict[str, str]:
    return {key: detail for key, (verdict, detail) in verdicts.items() if verdict == "fault"}


def test_every_hostile_call_is_answered_as_eager_does_or_refused_by_name(shared: Path, environ: dict[str, str]) -> None:
    """pytorch/pytorch#195402, #143649, #169779, #194329 and their siblings: each kind of model, each kind of call."""
    verdicts = judged(built(shared, environ, "hostile"))
    assert len(verdicts) >= 400
    assert faults(verdicts) == {}


@pytest.mark.parametrize("options", [(), ("--lower",)], ids=["best", "lowest"])
def test_every_target_of_a_wheel_stands_the_same_calls(
    shared: Path, environ: dict[str, str], options: tuple[str, ...]
) -> None:
    installed = built(shared, environ, "hostile-layered", LAYERED, ("x86-64-v2", "x86-64-v4"))
    verdicts = judged(installed, "--only=-(index_|as_is|autocast|empty|thread|no_storage|transposed)", *options)
    assert len(verdicts) >= 20
    assert faults(verdicts) == {}
