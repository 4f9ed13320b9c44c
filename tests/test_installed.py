"""The installed wheel: it predicts wherever it lies, and needs neither a compiler nor a writable folder."""

from __future__ import annotations

import os
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
from conftest import Ran, read_only, run, run_python, snapshot

if TYPE_CHECKING:
    from pathlib import Path

DEMO = [sys.executable, "-m", "example_project"]


@pytest.fixture(scope="session")
def bare(environ: dict[str, str], shared: Path) -> dict[str, str]:
    """Return an environment whose PATH has no compiler, nor anything else, and without hatch-aoti's settings."""
    empty = shared / "empty"
    empty.mkdir(exist_ok=True)
    rest = {name: value for name, value in environ.items() if not name.startswith("HATCH_AOTI_")}
    return {**rest, "PATH": os.fspath(empty), "PYTHONDONTWRITEBYTECODE": "1"}


def at(directory: Path, environ: dict[str, str]) -> dict[str, str]:
    return {**environ, "PYTHONPATH": os.fspath(directory)}


def predicts(ran: Ran) -> str:
    output = ran.check().output
    assert "right, accuracy" in output
    return output


def test_the_example_predicts_without_a_compiler_and_without_a_word_of_warning(
    installed_example: Path, bare: dict[str, str], tmp_path: Path
):
    assert shutil.which("g++", path=bare["PATH"]) is None
    output = predicts(run(*DEMO, cwd=tmp_path, environ=at(installed_example, bare)))
    assert "warning" not in output.lower()
    assert "outdated" not in output


def test_a_call_runs_no_compiler_though_there_is_one(installed_example: Path, bare: dict[str, str], tmp_path: Path):
    # pytorch/pytorch#191715: PyTorch's own loading function does, for seconds, only to word a warning
    ran = tmp_path / "a compiler ran"
    for name in ("g++", "gcc", "c++", "cc", "clang++"):
        compiler = tmp_path / "bin" / name
        compiler.parent.mkdir(exist_ok=True)
        compiler.write_text(f"#!/bin/sh\n: > {str(ran)!r}\nexit 1\n", encoding="utf-8")
        compiler.chmod(0o755)
    code = """
        import torch
        from example_project._models import load, ranker
        print(ranker(torch.zeros(8, 10)).shape)
    """
    environ = {**bare, "PATH": os.fspath(tmp_path / "bin"), "TORCHINDUCTOR_CACHE_DIR": os.fspath(tmp_path / "inductor")}
    run_python(code, installed_example, environ=environ).check()
    assert not ran.exists()
    run_python(f'{code}\n        load("ranker")', installed_example, environ=environ).check()
    assert ran.exists(), "the compilers here are found: load() is PyTorch's own"


def test_at_least_95_percent_of_the_held_out_digits_are_right(installed_example: Path, bare: dict[str, str]):
    output = run(*DEMO, environ=at(installed_example, bare)).check().output
    [line] = [line for line in output.splitlines() if "right, accuracy" in line]
    assert float(line.rpartition(" ")[2].rstrip("%")) >= 95


def test_the_example_predicts_from_read_only_site_packages(
    installed_example: Path, bare: dict[str, str], tmp_path: Path
):
    site = tmp_path / "site-packages"
    shutil.copytree(installed_example, site)
    before = snapshot(site)
    readable = {**at(site, bare), "PYTHONDONTWRITEBYTECODE": ""}
    mounted = read_only(site)
    if not mounted:
        for path in [*site.rglob("*"), site]:
            path.chmod(path.stat().st_mode & ~0o222)
    predicts(run(*mounted, *DEMO, environ={**readable, "PATH": os.environ["PATH"]} if mounted else readable))
    for path in [site, *site.rglob("*")]:
        path.chmod(path.stat().st_mode | 0o200)
    after = {name: data for name, data in snapshot(site).items() if "__pycache__" not in name}
    assert after == before


def test_the_example_predicts_from_a_path_with_spaces_and_non_ascii_letters(
    installed_example: Path, bare: dict[str, str], tmp_path: Path
):
    site = shutil.copytree(installed_example, tmp_path / "mes modèles, größer 模型")
    temporary = tmp_path / "temp ü"
    temporary.mkdir()
    environ = {**at(site, bare), "TMPDIR": os.fspath(temporary), "LC_ALL": "C.UTF-8"}
    predicts(run(*DEMO, environ=environ))
    assert list(temporary.iterdir()) == []


def test_two_processes_at_once_predict_the_same(installed_example: Path, bare: dict[str, str], tmp_path: Path):
    environ = {**at(installed_example, bare), "TMPDIR": os.fspath(tmp_path)}
    with ThreadPoolExecutor() as pool:
        first, second = pool.map(lambda _: predicts(run(*DEMO, environ=environ)), range(2))
    assert first == second
    assert list(tmp_path.iterdir()) == []


def test_the_models_are_listed_for_people(installed_example: Path, bare: dict[str, str]):
    listed = run(sys.executable, "-m", "example_project._models", environ=at(installed_example, bare)).check().output
    assert "digits" in listed
    assert "ranker" in listed
    assert "float32[batch, 1, 8, 8]" in listed
