"""What an export read: an unchanged model is not exported again, a changed one is."""

from __future__ import annotations

import importlib
import os
import socket
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import torch
from conftest import write_files
from safetensors.torch import load_file, save_file

from hatch_aoti.trace import Trace, recording

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a project whose module reads files of different kinds when it is imported."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    save_file({"w": torch.ones(2)}, tmp_path / "weights.safetensors")
    torch.save({"w": torch.ones(2)}, tmp_path / "weights.pt")
    files = {
        "traced/__init__.py": "",
        "traced/helper.py": "VALUE = 1",
        "traced/config.json": "{}",
        "traced/parts/one.txt": "1",
        "traced/model.py": """
            import json, os, pathlib
            import torch
            from safetensors.torch import load_file
            from . import helper

            here = pathlib.Path(__file__).parent
            config = json.loads((here / "config.json").read_text())
            parts = sorted(os.listdir(here / "parts"))
            size = os.environ.get("TRACED_SIZE", "1")
            weights = load_file(here.parent / "weights.safetensors")
            more = torch.load(here.parent / "weights.pt", weights_only=True)
        """,
    }
    write_files(tmp_path, files)
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] == "traced"]:
        del sys.modules[name]


def trace_of(project: Path) -> Trace:
    with recording(project) as recorder:
        importlib.import_module("traced.model")
    trace = recorder.finish()
    assert trace is not None, recorder.untraceable
    return trace


def holds(trace: Trace, project: Path, **environ: str) -> bool:
    return trace.holds(project, {**os.environ, **environ}, sys.path)


def test_nothing_changed_holds_also_after_a_trip_through_json_and_in_another_place(project, tmp_path_factory):
    trace = Trace.from_json(trace_of(project).to_json())
    assert holds(trace, project)
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "copy"
    project.rename(elsewhere)
    assert holds(trace, elsewhere)


@pytest.mark.parametrize(
    "name",
    [
        "traced/__init__.py",
        "traced/helper.py",
        "traced/model.py",
        "traced/config.json",
        "weights.safetensors",
        "weights.pt",
    ],
)
def test_a_change_of_any_file_that_was_read_is_noticed(project, name):
    trace = trace_of(project)
    path = project / name
    path.write_bytes(path.read_bytes() + b"\n")
    assert not holds(trace, project)
    path.unlink()
    assert not holds(trace, project)


def test_a_new_file_in_a_listed_folder_is_noticed_and_one_elsewhere_is_not(project):
    trace = trace_of(project)
    (project / "dist").mkdir()
    (project / "README.md").write_text("new")
    assert holds(trace, project)
    (project / "traced" / "parts" / "two.txt").write_text("2")
    assert not holds(trace, project)


def test_environment_variables_that_were_looked_at_are_compared_set_or_not(project):
    trace = trace_of(project)
    assert not holds(trace, project, TRACED_SIZE="2")
    assert holds(trace, project, SOMETHING_ELSE="2")


def _connect():
    with socket.socket() as connection:
        connection.connect_ex(("127.0.0.1", 9))


@pytest.mark.parametrize(
    "act",
    [
        lambda: subprocess.run(["true"], check=True),
        _connect,
        lambda: os.system("true"),
    ],
)
def test_what_no_file_accounts_for_leaves_no_trace(project, act):
    with recording(project) as recorder:
        act()
    assert recorder.finish() is None


def test_an_unknown_extension_module_leaves_no_trace(project, monkeypatch):
    (project / "native.so").write_bytes(b"")
    module = type(sys)("native_reader")
    module.__file__ = str(project / "native.so")
    with recording(project) as recorder:
        monkeypatch.setitem(sys.modules, "native_reader", module)
    assert recorder.finish() is None
    assert "native_reader" in recorder.untraceable


def test_recording_ends_with_its_block(project):
    before = type(os.environ)
    with recording(project) as recorder:
        pass
    assert type(os.environ) is before
    load_file(project / "weights.safetensors")
    (project / "traced" / "config.json").read_text()
    assert not recorder.opened


def test_an_unchanged_model_is_not_exported_again_and_a_changed_one_is(tiny, build):
    build.wheel(tiny)
    again = build(tiny).check()
    assert "export" not in again.output
    assert "from the cache" in again.output
    model = tiny / "tiny" / "model.py"
    model.write_text(model.read_text() + "\n# a comment\n")
    changed = build(tiny).check()
    assert "scale: export" in changed.output
    assert "from the cache" in changed.output  # the same program: exported, but not compiled again
