"""What an export read: an unchanged model is not exported again, a changed one is."""

from __future__ import annotations

import hashlib
import hmac
import importlib
import json
import os
import re
import shutil
import socket
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from conftest import make_project, write_files
from safetensors.torch import load_file, save_file

from hatch_aoti.codec import decode, encode
from hatch_aoti.job.dependencies import ExportDependencies
from hatch_aoti.job.recording import recording

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def traced_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a project whose module reads files of different kinds when it is imported."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    save_file({"w": torch.ones(2)}, tmp_path / "weights.safetensors")
    torch.save({"w": torch.ones(2)}, tmp_path / "weights.pt")
    make_project("traced", tmp_path)
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] == "traced"]:
        del sys.modules[name]


def digest(data: bytes) -> str:
    return hmac.digest(b"the cache's secret", data, "sha256").hex()


def trace_of(traced_project: Path, module: str = "traced.model") -> ExportDependencies:
    with recording(traced_project) as recorder:
        importlib.import_module(module)
    trace = recorder.finish(digest)
    assert trace is not None, recorder.untraceable
    return trace


def holds(trace: ExportDependencies, traced_project: Path, **environ: str) -> bool:
    """Say whether a trace holds for a project, which may have been moved since: its import path goes with it."""
    path = [entry for entry in sys.path if not (Path(entry) / "traced").exists() or Path(entry) == traced_project]
    path = path if os.fspath(traced_project) in path else [os.fspath(traced_project), *path[1:]]
    return trace.holds(traced_project, {**os.environ, **environ}, path, digest)


def test_nothing_changed_holds_also_after_a_trip_through_json_and_in_another_place(traced_project, tmp_path_factory):
    trace = decode(ExportDependencies, encode(trace_of(traced_project)))
    assert holds(trace, traced_project)
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "copy"
    traced_project.rename(elsewhere)
    assert holds(trace, elsewhere)


@pytest.mark.parametrize(
    "name",
    [
        "traced/__init__.py",
        "traced/helper.py",
        "traced/model.py",
        "traced/config.json",
        "traced/raw.bin",
        "traced/storage.bin",
        "weights.safetensors",
        "weights.pt",
    ],
)
def test_a_change_of_any_file_that_was_read_is_noticed(traced_project, name):
    trace = trace_of(traced_project)
    path = traced_project / name
    path.write_bytes(path.read_bytes() + b"\n")
    assert not holds(trace, traced_project)
    path.unlink()
    assert not holds(trace, traced_project)


def test_a_new_file_in_a_listed_folder_is_noticed_and_one_elsewhere_is_not(traced_project):
    trace = trace_of(traced_project)
    (traced_project / "dist").mkdir()
    (traced_project / "README.md").write_text("new")
    assert holds(trace, traced_project)
    (traced_project / "traced" / "parts" / "two.txt").write_text("2")
    assert not holds(trace, traced_project)


def test_environment_variables_that_were_looked_at_are_compared_set_or_not(traced_project):
    trace = trace_of(traced_project)
    assert not holds(trace, traced_project, TRACED_SIZE="2")
    assert holds(trace, traced_project, SOMETHING_ELSE="2")


def asking(traced_project: Path, code: str) -> ExportDependencies:
    """Return the trace of a module with this code."""
    write_files(
        traced_project, {"traced/asking.py": f"import os, pathlib\n\nhere = pathlib.Path(__file__).parent\n{code}\n"}
    )
    return trace_of(traced_project, "traced.asking")


IMPORTS = {
    "statement": "try:\n    import local_settings\nexcept ImportError:\n    local_settings = None",
    "function": "import importlib\ntry:\n    importlib.import_module('local_settings')\nexcept ImportError:\n    pass",
    "find_spec": "import importlib.util\nfound = importlib.util.find_spec('local_settings')",
    "find_loader": "import pkgutil\nfound = pkgutil.find_loader('local_settings')" if sys.version_info < (3, 12) else "import importlib.util\nfound = importlib.util.find_spec('local_settings')",
}  # fmt: skip


@pytest.mark.parametrize("created", ["local_settings.py", "local_settings/__init__.py", "local_settings.so"])
@pytest.mark.parametrize("how", IMPORTS)
def test_an_import_that_failed_and_would_succeed_now_is_noticed(traced_project, how, created):
    trace = asking(traced_project, IMPORTS[how])
    assert holds(trace, traced_project)
    write_files(traced_project, {"unrelated.py": "", "dist/local_settings.py": ""})
    assert holds(trace, traced_project)
    write_files(traced_project, {created: ""})
    assert not holds(trace, traced_project)


def test_a_module_that_is_missing_in_a_package_and_one_that_fails_are_noticed(traced_project):
    write_files(traced_project, {"traced/broken.py": "import no_such_module"})
    trace = asking(
        traced_project,
        "try:\n    from traced import local\nexcept ImportError:\n    from traced import helper\ntry:\n    from traced import broken\nexcept ImportError:\n    pass",
    )
    assert holds(trace, traced_project)
    write_files(traced_project, {"no_such_module.py": ""})
    assert not holds(trace, traced_project)
    (traced_project / "no_such_module.py").unlink()
    assert holds(trace, traced_project)
    write_files(traced_project, {"traced/broken.py": ""})
    assert not holds(trace, traced_project)
    write_files(traced_project, {"traced/broken.py": "import no_such_module", "traced/local.py": ""})
    assert not holds(trace, traced_project)


@pytest.mark.parametrize("shadow", ["colorsys.py", "traced/helper/__init__.py"])
def test_a_new_module_that_comes_first_in_the_search_is_noticed(traced_project, shadow, monkeypatch):
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    trace = asking(traced_project, "import colorsys\nfrom traced import helper")
    assert holds(trace, traced_project)
    write_files(traced_project, {shadow: ""})
    assert not holds(trace, traced_project)


@pytest.mark.parametrize(
    "code",
    [
        "try:\n    open(here / 'local.cfg')\nexcept OSError:\n    pass",
        "found = os.path.exists(here / 'local.cfg')",
        "found = os.path.isfile(here / 'local.cfg')",
        "found = os.path.isdir(here / 'local.cfg')",
        "found = os.path.islink(here / 'local.cfg')",
        "found = (here / 'local.cfg').is_file()",
        "found = (here / 'local.cfg').exists()",
        "found = os.access(here / 'local.cfg', os.R_OK)",
        "try:\n    os.path.getsize(here / 'local.cfg')\nexcept OSError:\n    pass",
        "try:\n    os.listdir(here / 'local.cfg')\nexcept OSError:\n    pass",
        "found = list(here.glob('*.cfg'))",
        "from safetensors import safe_open\ntry:\n    safe_open(here / 'local.cfg', 'pt')\nexcept OSError:\n    pass",
        "import configparser\nfound = configparser.ConfigParser().read(here / 'local.cfg')",
    ],
)  # fmt: skip
def test_a_file_that_was_missing_and_is_there_now_is_noticed(traced_project, code):
    trace = asking(traced_project, code)
    assert holds(trace, traced_project)
    (traced_project / "traced" / "local.cfg").touch()
    assert not holds(trace, traced_project)
    (traced_project / "traced" / "local.cfg").unlink()
    assert holds(trace, traced_project)
    (traced_project / "traced" / "local.cfg").mkdir()
    assert not holds(trace, traced_project)


def test_a_file_that_was_only_asked_about_is_compared_by_what_it_is_and_its_size(traced_project):
    trace = asking(traced_project, "found = os.stat(here / 'config.json')")
    path = traced_project / "traced" / "config.json"
    path.write_text("[]")
    assert holds(trace, traced_project)
    path.write_text("[1]")
    assert not holds(trace, traced_project)
    path.unlink()
    assert not holds(trace, traced_project)


def test_where_the_project_and_the_environment_are_does_not_matter(traced_project, tmp_path_factory):
    trace = asking(
        traced_project,
        "place = os.path.realpath(__file__), here.resolve(), os.path.exists(os.path.dirname(here.parent))",
    )
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "copy"
    traced_project.rename(elsewhere)
    assert holds(trace, elsewhere)


def test_listing_a_folder_of_installed_packages_is_compared_with_that_folder(traced_project):
    trace = asking(
        traced_project,
        "import importlib.metadata\nversions = importlib.metadata.version('torch')\ntry:\n    importlib.metadata.version('no-such-thing')\nexcept importlib.metadata.PackageNotFoundError:\n    pass",
    )
    assert holds(trace, traced_project)
    write_files(traced_project, {"no_such_thing-1.dist-info/METADATA": "Name: no-such-thing\nVersion: 1\n"})
    assert not holds(trace, traced_project)


def test_a_model_that_looks_at_all_variables_sees_new_ones_and_not_those_of_the_frontend(traced_project):
    trace = asking(traced_project, "mine = {name for name in os.environ if name.startswith('MINE_')}")
    assert holds(trace, traced_project)
    assert holds(trace, traced_project, PIP_BUILD_TRACKER="/tmp/xyz", HATCH_AOTI_JOBS="2", TMPDIR="/var/tmp")
    assert not holds(trace, traced_project, MINE_NEW="1")


@pytest.mark.parametrize(
    "code",
    ["'ASKED' in os.environ", "os.environ.get('ASKED')", "os.getenv('ASKED')", "os.environb.get(b'ASKED')", "dict(os.environ)"],
)  # fmt: skip
def test_every_way_to_ask_for_a_variable_is_noticed(traced_project, code, monkeypatch):
    monkeypatch.setenv("ASKED", "1")
    trace = asking(traced_project, f"asked = {code}")
    assert holds(trace, traced_project)
    assert not holds(trace, traced_project, ASKED="2")


def test_variables_that_the_project_sets_itself_are_its_own(traced_project, monkeypatch):
    monkeypatch.delenv("OWN", raising=False)
    trace = asking(
        traced_project,
        "os.environ['OWN'] = '1'\nassert os.environ['OWN'] == '1'\nassert 'OWN' in set(os.environ)\ndel os.environ['OWN']",
    )
    assert holds(trace, traced_project)
    assert "OWN" not in trace.environ
    (traced_project / "traced" / "asking.py").write_text("import os\nos.environ.setdefault('OWN', '1')")
    del sys.modules["traced.asking"]
    assert not holds(trace_of(traced_project, "traced.asking"), traced_project, OWN="2")


def test_nothing_that_was_read_can_be_guessed_from_the_trace(traced_project, monkeypatch):
    monkeypatch.setenv("DATABASE_PASSWORD", "hunter2")
    write_files(traced_project, {"traced/pin.txt": "1234\n"})
    trace = asking(
        traced_project,
        "everything = dict(os.environ)\npin = (here / 'pin.txt').read_text()\nos.path.exists(here / 'parts' / 'one.txt')",
    )
    text = json.dumps(encode(trace))
    assert "hunter2" not in text
    words = (b"hunter2", b"1234\n", b"1", b"{}", b"one.txt")
    assert not [
        word
        for word in words
        for algorithm in ("sha256", "sha1", "md5")
        if hashlib.new(algorithm, word).hexdigest()[:32] in text
    ]
    values = [
        *trace.files.values(),
        *trace.folders.values(),
        *trace.states.values(),
        *trace.environ.values(),
        *trace.modules.values(),
    ]
    assert all(re.fullmatch("[0-9a-f]{32}", value) for value in values)
    assert not trace.holds(
        traced_project, os.environ, sys.path, lambda data: hmac.digest(b"another", data, "sha256").hex()
    )


def test_questions_are_answered_as_ever_while_they_are_recorded(traced_project):
    """`shutil` looks the functions that it calls up in sets such as `os.supports_follow_symlinks`."""
    link, copy = traced_project / "link", traced_project / "copy"
    link.symlink_to(traced_project / "traced" / "config.json")
    plain = (os.stat, os.lstat, os.access, set(os.supports_follow_symlinks), set(os.supports_dir_fd))
    with recording(traced_project):
        shutil.copy2(link, copy, follow_symlinks=False)
        assert copy.is_symlink()
        with (traced_project / "traced" / "config.json").open() as file:
            assert os.stat(file.fileno()).st_size == link.stat().st_size == 2  # noqa: PTH116 - a number, no path
        shutil.rmtree(traced_project / "traced" / "parts")
        with pytest.raises(FileNotFoundError):
            (traced_project / "traced" / "parts").stat()
        with pytest.raises(ValueError, match="null"):
            Path("a\0b").stat()
        with pytest.raises(TypeError):
            os.stat()  # type: ignore[call-arg]
    assert plain == (os.stat, os.lstat, os.access, os.supports_follow_symlinks, os.supports_dir_fd)


def _connect():
    with socket.socket() as connection:
        connection.connect_ex(("127.0.0.1", 9))


@pytest.mark.parametrize(
    "act",
    [
        lambda: subprocess.run(["true"], check=True),
        lambda: sqlite3.connect(":memory:").close(),
        _connect,
        lambda: os.system("true"),
    ],
)
def test_what_no_file_accounts_for_leaves_no_trace(traced_project, act):
    with recording(traced_project) as recorder:
        act()
    assert recorder.finish(digest) is None


def test_an_unknown_extension_module_leaves_no_trace(traced_project, monkeypatch):
    (traced_project / "native.so").write_bytes(b"")
    module = type(sys)("native_reader")
    module.__file__ = str(traced_project / "native.so")
    with recording(traced_project) as recorder:
        monkeypatch.setitem(sys.modules, "native_reader", module)
    assert recorder.finish(digest) is None
    assert "native_reader" in recorder.untraceable


def test_recording_ends_with_its_block(traced_project):
    before = type(os.environ)
    with recording(traced_project) as recorder:
        pass
    assert type(os.environ) is before
    load_file(traced_project / "weights.safetensors")
    (traced_project / "traced" / "config.json").read_text()
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


def test_a_model_that_looks_at_everything_around_it_is_exported_once_and_leaves_no_secret(watched, build, tmp_path):
    notes = Path(build.environ["HATCH_AOTI_CACHE_DIR"]) / "notes"
    assert any(b"watched.local_settings" in file.read_bytes() for file in notes.rglob("*.json"))
    for file in Path(build.environ["HATCH_AOTI_CACHE_DIR"]).rglob("*"):
        if file.is_file() and "scratch" not in file.parts:  # another test may be building there
            content = file.read_bytes()
            assert not [name for name, value in watched.secrets.items() if value.encode() in content], file
    copy = tmp_path / "elsewhere" / "watched"
    shutil.copytree(watched.root, copy, ignore=shutil.ignore_patterns("dist"))
    again = build(copy, **watched.variables).check()
    assert "export" not in again.output
    assert "from the cache" in again.output
    write_files(copy, {"watched/local_settings.py": "SCALE = 3"})
    changed = build(copy, **watched.variables).check()
    assert "watched: export" in changed.output
