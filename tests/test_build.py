"""What a build puts into the wheel, what it does not do twice, and what it says when a model fails."""

from __future__ import annotations

import base64
import csv
import hashlib
import json
import os
import re
import shutil
import stat
import sys
import tarfile
import zipfile
from email.parser import Parser
from importlib.metadata import version
from pathlib import Path

import pytest
from conftest import Builder, Ran, edit, make_project, names_in, run, run_python, unpack, write_files
from packaging.requirements import Requirement
from packaging.utils import parse_wheel_filename
from packaging.version import Version

from hatch_aoti.plugin.requirements import extra_requirement
from hatch_aoti.wheel.accessor import runtime_files


def wheel_files(info: str, package: str, own: list[str], models: list[str]) -> list[str]:
    """Return the sorted names of all files that a wheel must have, and no other.

    `info` is its dist-info's name and version, `package` the dotted name of the package with the models, `own` the
    package's own files.
    """
    name, folder = package.replace(".", "_"), package.replace(".", "/")
    generated = [
        *runtime_files(),
        "_models.json",
        "_models.py",
        f"cmake/{name}Config.cmake",
        f"cmake/{name}ConfigVersion.cmake",
        f"include/{folder}/models.h",
        *(f"{model}.pt2" for model in models),
    ]
    return sorted(
        [f"{folder}/{file}" for file in [*own, *generated]]
        + [f"{info}.dist-info/{file}" for file in ("METADATA", "RECORD", "WHEEL", "sboms/hatch-aoti.cdx.json")]
    )


EXAMPLE_FILES = wheel_files(
    "example_project-0.1.0",
    "example_project",
    ["__init__.py", "__main__.py", "digits.py", "ranker.py", "samples.json", "samples.py"],
    ["digits", "ranker"],
)
TINY_OWN = ["__init__.py", "model.py"]
TINY_FILES = wheel_files("tiny-1.0", "tiny", TINY_OWN, ["scale"])


def read(wheel: Path, ending: str) -> str:
    """Return the text of the only file in a wheel with this ending."""
    with zipfile.ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if name.endswith(ending)]
        return archive.read(name).decode()


def metadata(wheel: Path, ending: str = "METADATA") -> list[tuple[str, str]]:
    return Parser().parsestr(read(wheel, ending)).items()


# --- What is in the wheel -------------------------------------------------------------------------------------------


def test_the_wheel_has_exactly_the_packages_files_and_the_models(example_wheel: Path):
    assert names_in(example_wheel) == EXAMPLE_FILES


def test_the_wheel_is_for_every_python_and_one_platform(example_wheel: Path):
    _, _, _, [tag] = parse_wheel_filename(example_wheel.name)
    assert (tag.interpreter, tag.abi) == ("py3", "none")
    assert re.fullmatch(r"manylinux_2_\d+_(x86_64|aarch64)|macosx_\d+_\d+_(x86_64|arm64)", tag.platform)
    wheel = dict(metadata(example_wheel, "WHEEL"))
    assert (wheel["Root-Is-Purelib"], wheel["Tag"]) == ("false", str(tag))


def test_record_lists_every_file_with_its_hash_and_size(example_wheel: Path):
    rows = {name: (digest, size) for name, digest, size in csv.reader(read(example_wheel, "RECORD").splitlines())}
    assert sorted(rows) == EXAMPLE_FILES
    with zipfile.ZipFile(example_wheel) as archive:
        for name in EXAMPLE_FILES:
            if not name.endswith("RECORD"):
                data = archive.read(name)
                digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
                assert rows[name] == (f"sha256={digest}", str(len(data)))


def test_every_file_is_readable_by_all_and_executable_by_none(example_wheel: Path):
    with zipfile.ZipFile(example_wheel) as archive:
        modes = {stat.S_IMODE(info.external_attr >> 16) for info in archive.infolist()}
    assert modes == {0o644}


def test_the_manifest_has_a_checksum_of_each_artifact(example_wheel: Path, tmp_path: Path):
    package = unpack(example_wheel, tmp_path) / "example_project"
    manifest = json.loads((package / "_models.json").read_text(encoding="utf-8"))
    assert sorted(manifest["models"]) == ["digits", "ranker"]
    for model in manifest["models"].values():
        for artifact in model["artifacts"]:
            assert hashlib.sha256((package / artifact["file"]).read_bytes()).hexdigest() == artifact["sha256"]


def test_a_torch_requirement_of_the_projects_own_is_left_as_it_is(example_wheel: Path):
    assert [value for name, value in metadata(example_wheel) if name == "Requires-Dist"] == ["torch>=2.13"]


def test_a_wheel_whose_project_states_no_torch_requirement_gets_one(tiny: Path, build: Builder):
    edit(tiny, '"torch>=2.13"', "")
    ran = build(tiny, "--wheel").check()
    [wheel] = (tiny / "dist").glob("*.whl")
    minor = ".".join(version("torch").split(".")[:2])
    assert f'do not see it (astral-sh/uv#2130). Add "torch>={minor}" there' in ran.output
    assert [value for name, value in metadata(wheel) if name == "Requires-Dist"] == [f"torch>={minor}"]


@pytest.mark.parametrize(
    ("own", "added"),
    [
        ([], "torch>=2.13"),
        (["numpy>=3"], "torch>=2.13"),
        (["torch"], "torch>=2.13"),
        (["torch!=2.14.0"], "torch>=2.13"),
        (["torch<3"], "torch>=2.13"),
        (["torch>=2.12"], "torch>=2.13"),
        (["torch>=2.13; python_version < '3'"], "torch>=2.13"),
        (["torch>=2.13"], None),
        (["torch>=2.13.1,<3"], None),
        (["Torch~=2.13.0"], None),
        (["torch==2.13.*"], None),
        (["torch<3", "torch>2.13"], None),
    ],
)
def test_the_wheel_requires_at_least_the_torch_minor_that_compiled_it(own: list[str], added: str | None):
    assert extra_requirement(map(Requirement, own), Version("2.13.2+cpu")) == added


def test_a_requirement_that_excludes_the_compiling_torch_fails_the_build(tiny: Path, build: Builder):
    edit(tiny, '"torch>=2.13"', '"torch<2.5"')
    ran = build(tiny)
    assert ran.returncode != 0
    assert '`project.dependencies` has "torch<2.5", which excludes torch 2.' in ran.output
    assert "Pin a torch in `build-system.requires`" in ran.output
    assert "Traceback" not in ran.output


# --- sdist ----------------------------------------------------------------------------------------------------------


def test_an_sdist_compiles_nothing_and_the_wheel_from_it_is_complete(tiny: Path, build: Builder):
    ran = build(tiny, "--sdist").check()
    assert "compile" not in ran.output
    [sdist] = (tiny / "dist").glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = sorted(archive.getnames())
        archive.extractall(tiny / "unpacked", filter="data")
    assert names == [f"tiny-1.0/{name}" for name in ("PKG-INFO", "pyproject.toml", "tiny/__init__.py", "tiny/model.py")]
    assert names_in(build.wheel(tiny / "unpacked" / "tiny-1.0")) == TINY_FILES


def test_build_without_options_goes_through_the_sdist_to_the_same_wheel(tiny: Path, build: Builder):
    direct = build.wheel(tiny).read_bytes()
    shutil.rmtree(tiny / "dist")
    wheel = build.wheel(tiny, "--outdir", "dist")
    assert [path.suffix for path in sorted((tiny / "dist").iterdir())] == [".whl", ".gz"]
    assert wheel.read_bytes() == direct


# --- Cache and scratch ----------------------------------------------------------------------------------------------


def test_a_second_build_does_not_compile(tiny: Path, build: Builder):
    build(tiny).check()
    [wheel] = (tiny / "dist").glob("*.whl")
    first = wheel.read_bytes()
    # A compiler that cannot compile: a build that tried would fail.
    ran = build(tiny, PATH=os.fspath(broken_compiler(tiny)) + os.pathsep + os.environ["PATH"]).check()
    assert "from the cache" in ran.output
    assert "compile (" not in ran.output
    assert wheel.read_bytes() == first


def test_a_build_leaves_the_tree_as_it_was(tiny: Path, build: Builder):
    before = sorted(tiny.rglob("*"))
    build(tiny).check()
    assert sorted(path for path in tiny.rglob("*") if (tiny / "dist") not in (path, *path.parents)) == before


def test_a_finished_build_leaves_no_scratch_files(tiny: Path, environ: dict[str, str], tmp_path: Path):
    cache = tmp_path / "cache"
    shutil.copytree(environ["HATCH_AOTI_CACHE_DIR"], cache, ignore=shutil.ignore_patterns("scratch"))
    Builder({**environ, "HATCH_AOTI_CACHE_DIR": os.fspath(cache), "TMPDIR": os.fspath(tmp_path)})(tiny).check()
    assert list((cache / "scratch").iterdir()) == []
    assert not [path.name for path in tmp_path.iterdir() if "induct" in path.name or "aoti" in path.name]


def test_a_changed_model_is_compiled_again(tiny: Path, build: Builder):
    build(tiny).check()
    edit(tiny, "x * 2 + 1", "x * 2 + 1.5", "tiny/model.py")
    assert "from the cache" not in build(tiny).check().output


def broken_compiler(directory: Path) -> Path:
    """Make a folder with a `g++` that says what the real one says of itself, and cannot compile."""
    real = shutil.which("g++") or "g++"
    script = write_files(
        directory / "compilers",
        {
            "g++": f"""
            #!/bin/sh
            case " $* " in *" --version "*|*" -v "*) exec {real} "$@";; esac
            echo "model.cpp: In function f:" >&2
            echo "model.cpp:7:9: error: something is not declared in this scope" >&2
            exit 1
            """
        },
    )
    (script / "g++").chmod(0o755)
    return script


# --- Settings of a build --------------------------------------------------------------------------------------------


def test_hatch_aoti_skip_builds_a_wheel_without_models_and_says_so(tiny: Path, build: Builder, tmp_path: Path):
    ran = build(tiny, HATCH_AOTI_SKIP="1").check()
    assert "WARNING: HATCH_AOTI_SKIP is set: this wheel has NO compiled models" in ran.output
    [wheel] = (tiny / "dist").glob("*.whl")
    assert wheel.name.endswith("-none-any.whl")
    assert names_in(wheel) == [
        name for name in TINY_FILES if "_aoti/" not in name and not name.endswith((".pt2", ".json", ".cmake", ".h"))
    ]
    failed = run_python("import tiny._models", unpack(wheel, tmp_path / "installed"))
    assert failed.returncode != 0
    assert "tiny was built with HATCH_AOTI_SKIP set, so it has no compiled models" in failed.output


def test_several_models_compile_one_at_a_time_with_jobs_1(tiny: Path, build: Builder):
    write_files(tiny, {"tiny/model.py": SLOW_TO_BUILD})
    edit(tiny, "[tool.aoti.models.scale]", ANOTHER + "\n[tool.aoti.models.scale]")
    marks = tiny / "marks"
    build(tiny, HATCH_AOTI_JOBS="1", MARKS=os.fspath(marks), HATCH_AOTI_PASS_ENVIRONMENT="MARKS").check()
    assert marks.read_text(encoding="utf-8").split() == ["begin", "end"] * 2


SLOW_TO_BUILD = """
import os, time, torch

class Scale(torch.nn.Module):
    def __init__(self):
        super().__init__()
        for mark in ("begin", "end"):
            with open(os.environ["MARKS"], "a") as file:
                file.write(mark + "\\n")
            time.sleep(1)

    def forward(self, x):
        return x * 2 + 1
"""
ANOTHER = """
[tool.aoti.models.another]
model = "tiny.model:Scale"
inputs = { x = { shape = ["n", 4] } }
dims = { n = { min = 1, max = 16 } }
"""


def test_project_and_cache_may_have_spaces_and_non_ascii_letters_in_their_paths(tiny: Path, environ: dict[str, str]):
    root = tiny.rename(tiny.parent / "mein Projekt, größer 模型")
    cache = tiny.parent / "ein cache ü"
    # A cache of its own and empty: the compiler, too, has to cope with these paths.
    wheel = Builder({**environ, "HATCH_AOTI_CACHE_DIR": os.fspath(cache), "TMPDIR": os.fspath(tiny.parent)}).wheel(root)
    assert names_in(wheel) == TINY_FILES
    code = "import torch; from tiny._models import scale; print(scale(torch.ones(3, 4)).sum().item())"
    assert run_python(code, unpack(wheel, tiny.parent / "in stalliert é")).check().output.strip() == "36.0"


# --- Failing models -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory, environ: dict[str, str]) -> tuple[Path, Ran]:
    """Build a project whose models all fail, each in its way; return its root and the failed build."""
    root = make_project("failing", tmp_path_factory.mktemp("failing") / "project")
    return root, Builder(environ)(root)


failures = pytest.mark.xdist_group("failures")  # one build for all of them


@failures
def test_failing_models_are_reported_together_and_no_wheel_is_left(failed: tuple[Path, Ran]):
    root, ran = failed
    assert ran.returncode != 0
    assert "4 of 4 models could not be built" in ran.output
    assert list(root.glob("dist/*")) == []


@failures
@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("aborts", "the worker process crashed (SIGABRT)"),
        ("is_killed", "the worker process was killed (SIGKILL), most likely because the machine ran out of memory"),
        ("leaves", "the worker process exited with status 7 before it had a result"),
        ("raises", "calling `failing.crashes:raises` without arguments raises KeyError: 'layers'"),
    ],
)
def test_a_crash_takes_down_its_model_only_and_is_explained(failed: tuple[Path, Ran], model: str, said: str):
    assert f"model `{model}` failed at stage `build`: {said}" in failed[1].output


@failures
def test_what_a_crashing_model_printed_last_is_shown(failed: tuple[Path, Ran]):
    assert "last words before abort" in failed[1].output


@failures
def test_an_exception_in_user_code_comes_with_the_users_own_traceback(failed: tuple[Path, Ran]):
    root, ran = failed
    assert f'File "{root / "failing" / "crashes.py"}", line 19, in raises' in ran.output
    assert 'return {"depth": 3}[key]' in ran.output
    assert "hatch_aoti" not in "".join(line for line in ran.output.splitlines() if line.strip().startswith("File "))


@failures
def test_every_failure_names_a_log_that_exists(failed: tuple[Path, Ran]):
    logs = re.findall(r"Full log: (.+)", failed[1].output)
    assert len(logs) == 4
    assert all(Path(log.strip()).is_file() for log in logs)


@pytest.mark.parametrize(
    ("environment", "said", "advice"),
    [
        ({"PATH": "{empty}"}, "there is no C++ compiler `g++` on PATH", "install one"),
        ({"CXX": "no-such-compiler"}, "there is no C++ compiler `no-such-compiler` on PATH", "variable CXX"),
        ({"CXX": "g++ 'x"}, "CXX is no command: `g++ 'x` has no closing quotation", "every quote in a pair"),
        ({"CXX": "false"}, "the C++ compiler `false` does not run", "make `$CXX --version` work"),
    ],
)
def test_a_missing_compiler_is_named_with_what_to_do(
    tiny: Path, build: Builder, environment: dict[str, str], said: str, advice: str
):
    ran = build(tiny, **{name: value.format(empty=tiny / "tiny") for name, value in environment.items()})
    assert ran.returncode != 0
    assert "model `scale` failed at stage `compile`: " in ran.output
    assert said in ran.output
    assert advice in ran.output
    assert "Traceback" not in ran.output


def test_a_compiler_error_is_shown_and_its_full_output_is_in_the_log(tiny: Path, build: Builder):
    cache = os.fspath(tiny.parent / "cache")  # an empty one
    ran = build(tiny, CXX=os.fspath(broken_compiler(tiny) / "g++"), HATCH_AOTI_CACHE_DIR=cache)
    assert ran.returncode != 0
    assert "model `scale` failed at stage `compile`: the C++ compiler rejects the code" in ran.output
    assert "model.cpp:7:9: error: something is not declared in this scope" in ran.output
    [log] = re.findall(r"Full log: (.+)", ran.output)
    assert "model.cpp: In function f:" in Path(log.strip()).read_text(encoding="utf-8")


def test_the_hook_ends_a_failed_build_without_a_traceback_of_its_own(tiny: Path, environ: dict[str, str]):
    edit(tiny, "tiny.model:Scale", "tiny.model:Scales")
    code = "import hatchling.build as backend; backend.build_wheel('dist')"
    ran = run(sys.executable, "-c", code, cwd=tiny, environ=environ)
    assert ran.returncode == 1
    assert "Traceback" not in ran.output
    assert 'Did you mean "Scale"?' in ran.output
