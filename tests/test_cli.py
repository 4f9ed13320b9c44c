"""The command `hatch-aoti`: what it prints, for people and programs, and its exit status."""

from __future__ import annotations

import json
import shutil
import sys
import zipfile
from importlib.metadata import entry_points, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from conftest import Builder, Ran, run, run_python, snapshot, unpack, write_files

import hatch_aoti
from hatch_aoti.artifact.cache import Cache
from hatch_aoti.cli import main

if TYPE_CHECKING:
    from collections.abc import Callable


def hatch_aoti_command(*arguments: str | Path, cwd: Path | None = None, environ: dict[str, str] | None = None) -> Ran:
    return run(sys.executable, "-m", "hatch_aoti", *arguments, cwd=cwd, environ=environ)


@pytest.fixture
def package(installed_example: Path, tmp_path: Path) -> Path:
    """Return a copy of the example's installed package, to do harm to."""
    return Path(shutil.copytree(installed_example / "example_project", tmp_path / "example_project"))


@pytest.mark.torch  # without which hatch-aoti is not installed
def test_the_command_is_installed_under_its_name():
    [script] = entry_points(group="console_scripts", name="hatch-aoti")
    assert script.load() is main


def test_it_knows_its_version_and_refuses_what_it_does_not_know():
    assert hatch_aoti_command("--version").check().output == f"hatch-aoti {hatch_aoti.__version__}\n"
    unknown = hatch_aoti_command("biuld")
    assert unknown.returncode == 2
    assert "No such command 'biuld'" in unknown.output


# --- inspect --------------------------------------------------------------------------------------------------------


def report(path: Path) -> dict[str, Any]:
    return json.loads(hatch_aoti_command("inspect", path, "--json").check().output)


def test_a_wheel_is_described_for_people(example_wheel: Path):
    text = hatch_aoti_command("inspect", example_wheel).check().output
    assert f"models of example_project for {example_wheel.stem.rpartition('-')[2]}" in text
    assert "digits(image: float32[batch, 1, 8, 8]) -> float32[batch, 10]\n  where batch = 1…1024\n" in text
    assert f"digits.pt2: x86-64-v3 (AVX2), checked against eager; torch {version('torch')}" in text
    assert "not executable" in text
    assert "GLIBC 2." in text


def test_a_wheel_is_described_for_programs(example_wheel: Path):
    found = report(example_wheel)
    assert [model["name"] for model in found["models"]] == ["digits", "ranker"]
    assert found["models"][0]["source"] == "example_project.digits:DigitsNet"
    with zipfile.ZipFile(example_wheel) as archive:
        sizes = {name: archive.getinfo(f"example_project/{name}").file_size for name in ("digits.pt2", "ranker.pt2")}
    assert {file["name"]: file["bytes"] for file in found["files"]} == sizes
    for file in found["files"]:
        [needs] = file["objects"]
        assert file["state"] == "as recorded"
        assert needs["machine"] == "x86_64"
        assert "libtorch_cpu.so" in needs["libraries"]
        assert needs["executable_stack"] is False
        assert needs["stripped"] is True


def test_a_folder_and_its_manifest_give_what_the_wheel_gives(example_wheel: Path, package: Path):
    expected = {**report(example_wheel), "source": str(package)}
    assert report(package) == report(package / "_models.json") == expected


def test_a_bare_pt2_shows_what_its_object_needs(package: Path):
    found = report(package / "digits.pt2")
    assert found["models"] == []
    [file] = found["files"]
    assert file["state"] == "not recorded"
    assert file["objects"][0]["model"] == "model"
    assert "libtorch_cpu.so" in file["objects"][0]["libraries"]


def test_inspecting_imports_neither_torch_nor_the_package(example_wheel: Path):
    program = f"""
        import sys
        from pathlib import Path
        from hatch_aoti.wheel.inspection import inspect_path
        inspect_path(Path({str(example_wheel)!r}))
        assert not {{"torch", "example_project"}} & set(sys.modules)
    """
    run_python(program).check()


def test_files_that_changed_or_are_missing_are_named_with_exit_status_1(package: Path):
    with (package / "digits.pt2").open("ab") as file:
        file.write(b"x")
    (package / "ranker.pt2").unlink()
    ran = hatch_aoti_command("inspect", package)
    assert ran.returncode == 1
    assert [line.split()[-1] for line in ran.output.splitlines() if ".pt2  " in line] == ["differs", "missing"]
    found = json.loads(hatch_aoti_command("inspect", package, "--json").output)
    assert {file["name"]: file["state"] for file in found["files"]} == {
        "digits.pt2": "differs",
        "ranker.pt2": "missing",
    }


def set_file(name: str) -> Callable[[Path], None]:
    def edit(package: Path) -> None:
        manifest = json.loads((package / "_models.json").read_text(encoding="utf-8"))
        manifest["models"]["digits"]["artifacts"][0]["file"] = name
        (package / "_models.json").write_text(json.dumps(manifest), encoding="utf-8")

    return edit


UNREADABLE = {
    "no manifest": (lambda package: (package / "_models.json").unlink(), "cannot read", "_models.json: No such file"),
    "no JSON": (lambda package: (package / "_models.json").write_text("{"), "_models.json is not a manifest", ""),
    "something else": (lambda package: (package / "_models.json").write_text("{}"), "it has no 'schema'", ""),
    "a later format": (
        lambda package: (package / "_models.json").write_text('{"schema": 2}'),
        "has format 2, and this hatch-aoti reads format 1",
        "",
    ),
    "a path out of the folder": (set_file("../digits.pt2"), "'../digits.pt2' is no file name", ""),
    "an absolute path": (set_file("/etc/passwd"), "'/etc/passwd' is no file name", ""),
}


@pytest.mark.parametrize(("harm", "message", "more"), UNREADABLE.values(), ids=UNREADABLE.keys())
def test_a_folder_without_a_sound_manifest_is_refused(
    harm: Callable[[Path], None], message: str, more: str, package: Path
):
    harm(package)
    ran = hatch_aoti_command("inspect", package)
    assert ran.returncode == 1
    assert ran.output.startswith("aoti: ERROR: ")
    assert message in ran.output
    assert more in ran.output
    assert "Traceback" not in ran.output


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.whl", b"no zip", "is not a zip archive, or it is damaged or cut off"),
        ("x.pt2", b"no zip", "is not a zip archive, or it is damaged or cut off"),
        ("x.txt", b"", "is neither a wheel (.whl) nor a .pt2"),
    ],
)
def test_other_files_are_refused(name: str, content: bytes, message: str, tmp_path: Path):
    (tmp_path / name).write_bytes(content)
    ran = hatch_aoti_command("inspect", tmp_path / name)
    assert ran.returncode == 1
    assert message in ran.output


def test_a_wheel_without_models_is_refused(tmp_path: Path):
    with zipfile.ZipFile(tmp_path / "other-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr("other/__init__.py", "")
    ran = hatch_aoti_command("inspect", tmp_path / "other-1.0-py3-none-any.whl")
    assert ran.returncode == 1
    assert "has no _models.json" in ran.output


# --- build ----------------------------------------------------------------------------------------------------------


def test_it_builds_into_a_folder_what_the_wheel_has(
    tiny: Path, build: Builder, environ: dict[str, str], tmp_path: Path
):
    package = unpack(build.wheel(tiny), tmp_path / "site") / "tiny"
    before = snapshot(tiny)
    output = tmp_path / "some where" / "models"
    ran = hatch_aoti_command("build", tiny, "--output", output, environ=environ).check()
    assert "from the cache" in ran.output
    built = {name: content for name, content in snapshot(output).items() if content is not None}
    assert set(built) == {name for name in snapshot(package) if (package / name).is_file()} - {
        "__init__.py",
        "model.py",
    }
    for name, content in built.items():
        assert content == (package / name).read_bytes(), name
    assert snapshot(tiny) == before  # nothing is left in the project
    use = "import torch; from _models import scale; print(scale(torch.ones(1, 4)).tolist())"
    assert run_python(use, output).check().output == "[[3.0, 3.0, 3.0, 3.0]]\n"


def test_a_failing_build_writes_nothing_and_says_why_in_short(tiny: Path, environ: dict[str, str], tmp_path: Path):
    write_files(tiny, {"tiny/model.py": "raise ZeroDivisionError('no luck')\n"})
    ran = hatch_aoti_command("build", tiny, "--output", tmp_path / "out", environ=environ)
    assert ran.returncode == 1
    assert "model `scale` failed at stage `import`" in ran.output
    assert "no luck" in ran.output
    assert "click" not in ran.output
    assert not (tmp_path / "out").exists()


PROJECT = """[project]
name = 'x'
version = '1'
[tool.aoti.models.scale]
model = "x.model:Scale"
inputs = { x = { shape = [4] } }
"""


@pytest.mark.parametrize(
    ("pyproject", "message"),
    [
        (None, "has no pyproject.toml"),
        (PROJECT.partition("[tool")[0], "`tool.aoti.models`: there is no model to compile"),
        (PROJECT.replace("'x'", "3"), "pyproject.toml: Field `project.name` must be a string"),
        (PROJECT.replace("]", "", 1), "pyproject.toml: "),
        (PROJECT.replace("[project]", "[project]\ndependencies = ['torch<2']"), "which excludes torch"),
    ],
)
def test_a_project_that_cannot_be_read_is_refused(
    pyproject: str | None, message: str, environ: dict[str, str], tmp_path: Path
):
    write_files(tmp_path, {"x/__init__.py": ""} | ({} if pyproject is None else {"pyproject.toml": pyproject}))
    ran = hatch_aoti_command("build", tmp_path, "--output", tmp_path / "out", environ=environ)
    assert ran.returncode == 1
    assert ran.output.startswith("aoti: ERROR: ")
    assert message in ran.output
    assert "Traceback" not in ran.output


def test_a_build_that_is_told_to_skip_says_that_there_is_nothing_to_do(tiny: Path, environ: dict[str, str]):
    ran = hatch_aoti_command("build", tiny, "--output", "out", environ={**environ, "HATCH_AOTI_SKIP": "1"})
    assert ran.returncode == 1
    assert "HATCH_AOTI_SKIP is set, so there is nothing to build" in ran.output


def test_the_output_must_be_named(tiny: Path):
    ran = hatch_aoti_command("build", tiny)
    assert ran.returncode == 2
    assert "Missing option '--output'" in ran.output


# --- cache ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def filled(tmp_path: Path) -> Path:
    """Return a cache with an entry of 1500 bytes and its checksums."""
    cache = Cache(tmp_path / "cache")
    with cache.scratch("test") as scratch:
        (scratch / "entry").mkdir()
        (scratch / "entry" / "data").write_bytes(b"x" * 1500)
        cache.put("ab" * 32, scratch / "entry")
    return tmp_path / "cache"


def test_the_cache_shows_where_it_is_and_how_large(filled: Path):
    ran = hatch_aoti_command("cache", "--cache-dir", filled).check()
    assert ran.output == f"{filled}: 1.7 kB\n"


def test_the_cache_is_the_one_that_builds_use(filled: Path, environ: dict[str, str]):
    ran = hatch_aoti_command("cache", environ={**environ, "HATCH_AOTI_CACHE_DIR": str(filled)}).check()
    assert ran.output == f"{filled}: 1.7 kB\n"


def test_clearing_leaves_an_empty_cache_that_works(filled: Path):
    ran = hatch_aoti_command("cache", "--cache-dir", filled, "--clear").check()
    assert ran.output == f"removed 1.7 kB\n{filled}: 0 B\n"
    assert Cache(filled).get("ab" * 32) is None
    assert Cache(filled).keep_texts({"a/b": "text"}).joinpath("a/b").read_text() == "text"


def test_trimming_keeps_what_was_used_within_the_hour(filled: Path):
    ran = hatch_aoti_command("cache", "--cache-dir", filled, "--trim", "0").check()
    assert ran.output == f"removed 0 B\n{filled}: 1.7 kB\n"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--trim", "much"], 'a size such as "10 GB" or "512 MiB"'),
        (["--trim", "1 GB", "--clear"], "--clear removes everything"),
    ],
)
def test_wrong_options_are_refused_with_exit_status_2(options: list[str], message: str, filled: Path):
    ran = hatch_aoti_command("cache", "--cache-dir", filled, *options)
    assert ran.returncode == 2
    assert message in ran.output
