"""Reports about other build plugins, frontends and hatchling itself, none of which may come true here."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from typing import TYPE_CHECKING

import pytest
from conftest import Builder, names_in, read_only, run, run_python, snapshot, unpack, write_files
from filelock import FileLock
from test_build import TINY_FILES, TINY_OWN, edit, metadata, wheel_files

if TYPE_CHECKING:
    from pathlib import Path

# The hook for sdists as well as wheels: it can then keep an sdist complete, and free of what an editable install wrote.
ALSO_SDISTS = ("[tool.hatch.build.targets.wheel.hooks.aoti]", "[tool.hatch.build.hooks.aoti]")
USE = "import torch; from {package}._models import scale; print(scale(torch.ones(3, 4)).sum().item())"


def backend(root: Path, call: str, environ: dict[str, str], *prefix: str, **more: str):
    """Run a function of hatchling's backend in a project, as every frontend does in the end."""
    code = f"import hatchling.build as backend; print('made', backend.{call})"
    return run(*prefix, sys.executable, "-c", code, cwd=root, environ={**environ, **more})


def git(root: Path) -> None:
    subprocess.run(["git", "init", "--quiet", root], check=True)


def works(wheel: Path, directory: Path, package: str = "tiny") -> bool:
    return run_python(USE.format(package=package), unpack(wheel, directory)).check().output.strip() == "36.0"


# --- Editable -------------------------------------------------------------------------------------------------------


def test_an_editable_wheel_has_no_copy_that_shadows_the_package(tiny: Path, environ: dict[str, str]):
    """pypa/hatch#1627: files that a hook forces into an editable wheel shadow the package in the tree."""
    backend(tiny, "build_editable('dist')", environ).check()
    [wheel] = (tiny / "dist").glob("*.whl")
    assert not [name for name in names_in(wheel) if name.startswith("tiny/")]
    code = "import tiny.model; print(tiny.__file__); " + USE.format(package="tiny")
    file, total = run_python(code, tiny).check().output.split()
    assert (file, total) == (os.fspath(tiny / "tiny" / "__init__.py"), "36.0")


def test_files_of_an_editable_install_are_invisible_to_version_control(tiny: Path, environ: dict[str, str]):
    """pypa/hatch#1946 begins with outputs in the tree; these come with a .gitignore of their own."""
    git(tiny)
    write_files(tiny, {".gitignore": "/dist/\n"})
    backend(tiny, "build_editable('dist')", environ).check()
    status = ["git", "-C", tiny, "status", "--porcelain", "--untracked-files=all"]
    assert sorted(line.split()[-1] for line in run(*status).check().output.splitlines()) == [
        ".gitignore",
        "pyproject.toml",
        "tiny/__init__.py",
        "tiny/model.py",
    ]


def test_a_renamed_model_leaves_nothing_behind_in_an_editable_tree(tiny: Path, environ: dict[str, str]):
    """pypa/hatch#2301: what an earlier build left must not be taken for the present."""
    backend(tiny, "build_editable('dist')", environ).check()
    edit(tiny, "[tool.aoti.models.scale]", "[tool.aoti.models.other]")
    backend(tiny, "build_editable('dist')", environ).check()
    made = sorted(f"tiny/{path}" for path, data in snapshot(tiny / "tiny").items() if data is not None)
    expected = [name for name in wheel_files("", "tiny", TINY_OWN, ["other"]) if name.startswith("tiny/")]
    assert made == sorted([*expected, "tiny/.gitignore"])


# --- Wheels and sdists ----------------------------------------------------------------------------------------------


def test_git_ignored_outputs_and_weights_survive_the_way_through_the_sdist(tiny: Path, build: Builder, tmp_path: Path):
    """pypa/hatch#1946: ignored files that a hook makes are lost when the wheel is built from the sdist."""
    import torch
    from safetensors.torch import save_file

    git(tiny)
    write_files(
        tiny,
        {
            ".gitignore": "_models.*\n*.pt2\n*.safetensors\n/dist/\n",
            "tiny/model.py": """
            import torch

            class Scale(torch.nn.Module):
                def __init__(self):
                    super().__init__()
                    self.factor = torch.nn.Parameter(torch.ones(()))

                def forward(self, x):
                    return x * self.factor + 1
            """,
        },
    )
    edit(tiny, *ALSO_SDISTS)
    edit(tiny, 'model = "tiny.model:Scale"', 'model = "tiny.model:Scale"\nweights = "weights/scale.safetensors"')
    (tiny / "weights").mkdir()
    save_file({"factor": torch.tensor(2.0)}, tiny / "weights" / "scale.safetensors")
    wheel = build.wheel(tiny, "--outdir", "dist")  # through the sdist
    assert names_in(wheel) == TINY_FILES
    assert works(wheel, tmp_path / "installed")
    [sdist] = (tiny / "dist").glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        assert "tiny-1.0/weights/scale.safetensors" in archive.getnames()


def test_weights_that_an_sdist_has_lost_fail_the_build_from_it(tiny: Path, build: Builder):
    """pypa/hatch#1946, with a hook that runs for wheels only and so cannot help: loud, at least."""
    git(tiny)
    write_files(tiny, {".gitignore": "*.safetensors\n", "weights/scale.safetensors": "never read"})
    edit(tiny, 'model = "tiny.model:Scale"', 'model = "tiny.model:Scale"\nweights = "weights/scale.safetensors"')
    ran = build(tiny, "--outdir", "dist")
    assert ran.returncode != 0
    assert "`tool.aoti.models.scale.weights`" in ran.output
    assert list(tiny.glob("dist/*.whl")) == []


def test_a_wheel_with_compiled_code_is_never_tagged_any(tiny: Path, build: Builder):
    """pypa/hatch#1955: shared libraries in a wheel that claims to fit every platform."""
    wheel = build.wheel(tiny)
    assert not wheel.name.endswith("-any.whl")
    tags = [value for name, value in metadata(wheel, "WHEEL") if name == "Tag"]
    assert len(tags) == 1
    assert not tags[0].endswith("-any")
    assert dict(metadata(wheel, "WHEEL"))["Root-Is-Purelib"] == "false"


@pytest.mark.parametrize(
    ("date", "target"),
    [("abc", "wheel"), ("99999999999", "wheel"), ("-1", "wheel"), ("4354819200", "wheel"), ("abc", "sdist")],
)
def test_an_impossible_source_date_is_a_clear_error(date: str, target: str, tiny: Path, environ: dict[str, str]):
    """pypa/hatch#1605: a traceback from zipfile."""
    edit(tiny, *ALSO_SDISTS)
    ran = backend(tiny, f"build_{target}('dist')", environ, SOURCE_DATE_EPOCH=date)
    assert ran.returncode == 1
    assert f"the environment variable SOURCE_DATE_EPOCH is '{date}'" in ran.output
    assert "Correct it or unset it" in ran.output
    assert "Traceback" not in ran.output


@pytest.mark.parametrize("date", ["0", "4354819199"])
def test_the_first_and_the_last_possible_source_date_build(date: str, tiny: Path, build: Builder, tmp_path: Path):
    """pypa/hatch#1605: 0 is a common value."""
    assert works(build.wheel(tiny, SOURCE_DATE_EPOCH=date), tmp_path / "installed")


@pytest.mark.parametrize("artifacts", ["", '[tool.hatch.build]\nartifacts = ["*.pt2", "_models.*"]\n'])
def test_stale_generated_files_in_the_tree_neither_ship_nor_clash(
    artifacts: str, tiny: Path, build: Builder, tmp_path: Path
):
    """pypa/hatch#2301: "A second file is being added to the wheel archive at the same path"."""
    write_files(
        tiny,
        {
            "tiny/_models.py": "# Generated by hatch-aoti: changes are lost with the next build.\n",
            "tiny/_models.json": "stale",
            "tiny/cmake/tinyConfig.cmake": "# Generated by hatch-aoti 0\n",
            "tiny/scale.pt2": "stale",
        },
    )
    edit(tiny, "[tool.aoti.models.scale]", f"{artifacts}\n[tool.aoti.models.scale]")
    wheel = build.wheel(tiny)
    assert names_in(wheel) == TINY_FILES
    assert works(wheel, tmp_path / "installed")


def test_files_of_an_editable_install_do_not_get_into_wheel_or_sdist(tiny: Path, build: Builder):
    """pypa/hatch#2301, with the files of a model that no longer exists."""
    edit(tiny, *ALSO_SDISTS)
    backend(tiny, "build_editable('editable')", build.environ).check()
    edit(tiny, "[tool.aoti.models.scale]", "[tool.aoti.models.other]")
    build(tiny, "--sdist", "--wheel").check()
    [wheel] = (tiny / "dist").glob("*.whl")
    assert names_in(wheel) == wheel_files("tiny-1.0", "tiny", TINY_OWN, ["other"])
    [sdist] = (tiny / "dist").glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        assert not [name for name in archive.getnames() if "_models" in name or name.endswith((".pt2", ".cmake", ".h"))]


@pytest.mark.parametrize("version", ["standard", "editable"])
@pytest.mark.parametrize("name", ["_models.py", "cmake/tinyConfig.cmake", "include/tiny/models.h"])
def test_a_file_of_the_projects_own_is_not_overwritten(name: str, version: str, tiny: Path, environ: dict[str, str]):
    """The other side of pypa/hatch#2301: what is in the way may be somebody's work."""
    write_files(tiny, {f"tiny/{name}": "# mine\n"})
    call = "build_wheel('dist')" if version == "standard" else "build_editable('dist')"
    ran = backend(tiny, call, environ)
    assert ran.returncode == 1
    assert f"{tiny / 'tiny' / name} was not generated by hatch-aoti" in ran.output
    assert (tiny / "tiny" / name).read_text(encoding="utf-8") == "# mine\n"


@pytest.mark.parametrize("pattern", ["dist/", "*"])
def test_a_project_below_a_folder_that_is_ignored_builds_a_whole_wheel(
    pattern: str, tiny: Path, build: Builder, tmp_path: Path
):
    """pypa/hatch#1964 and #1069: ignore patterns, the parent's among them, that match the project's own folder."""
    root = tmp_path / "outer" / "dist" / "tiny"
    root.parent.mkdir(parents=True)
    tiny.rename(root)
    git(tmp_path / "outer")
    write_files(tmp_path / "outer", {".gitignore": f"{pattern}\n"})
    backend(root, "build_editable('editable')", build.environ).check()  # stale files, which nothing ignores now
    assert names_in(build.wheel(root)) == TINY_FILES


# --- Layouts --------------------------------------------------------------------------------------------------------

LAYOUTS = {
    "src layout": ("src/tiny", "", "tiny"),
    "sources, a prefix removed": ("code/tiny", 'only-include = ["code"]\nsources = ["code"]', "tiny"),
    "sources, a folder renamed": ("code", 'only-include = ["code"]\nsources = { "code" = "tiny" }', "tiny"),
    "sources, below a new package": (
        "code",
        'only-include = ["code"]\nsources = { "code" = "outer/tiny" }',
        "outer.tiny",
    ),
}


def files_of(package: str) -> list[str]:
    """Return what the wheel has if the tiny project's package has this dotted name."""
    names = [name.replace("/cmake/tiny", f"/cmake/{package.replace('.', '_')}") for name in TINY_FILES]
    return sorted(name.replace("tiny/", f"{package.replace('.', '/')}/") for name in names)


@pytest.mark.parametrize(("folder", "options", "package"), LAYOUTS.values(), ids=LAYOUTS.keys())
def test_the_models_land_in_the_package_wherever_the_tree_has_it(
    folder: str, options: str, package: str, tiny: Path, build: Builder, tmp_path: Path
):
    """pypa/hatch#1162: layouts other than the flat one, and paths that `sources` rewrites."""
    (tiny / folder).parent.mkdir(parents=True, exist_ok=True)
    (tiny / "tiny").rename(tiny / folder)
    edit(tiny, "tiny.model:", f"{package}.model:")
    edit(tiny, "[tool.aoti.models.scale]", f"[tool.hatch.build.targets.wheel]\n{options}\n[tool.aoti.models.scale]")
    wheel = build.wheel(tiny)
    assert names_in(wheel) == files_of(package)
    assert works(wheel, tmp_path / "installed", package)


@pytest.mark.parametrize("folder", ["src/tiny", "code/python/tiny"])
def test_an_editable_install_writes_next_to_the_sources(folder: str, tiny: Path, environ: dict[str, str]):
    """pypa/hatch#1162, editable."""
    (tiny / folder).parent.mkdir(parents=True, exist_ok=True)
    (tiny / "tiny").rename(tiny / folder)
    options = f'[tool.hatch.build.targets.wheel]\npackages = ["{folder}"]\n'
    edit(tiny, "[tool.aoti.models.scale]", f"{options}[tool.aoti.models.scale]")
    backend(tiny, "build_editable('dist')", environ).check()
    assert (tiny / folder / "scale.pt2").is_file()
    code = USE.format(package="tiny")
    assert run_python(code, (tiny / folder).parent).check().output.strip() == "36.0"


def test_a_namespace_package_receives_the_models(tiny: Path, build: Builder, tmp_path: Path):
    """scikit-build/scikit-build-core#1417: namespace packages, which have no `__init__.py`."""
    (tiny / "space").mkdir()
    (tiny / "tiny").rename(tiny / "space" / "tiny")
    edit(tiny, "tiny.model:", "space.tiny.model:")
    edit(
        tiny,
        "[tool.aoti.models.scale]",
        '[tool.hatch.build.targets.wheel]\npackages = ["space"]\n[tool.aoti.models.scale]',
    )
    wheel = build.wheel(tiny)
    assert names_in(wheel) == files_of("space.tiny")
    assert works(wheel, tmp_path / "installed", "space.tiny")


def test_the_hook_can_be_off_by_default_and_turned_on(tiny: Path, build: Builder):
    """scikit-build/scikit-build-core#1417: hatchling's `enable-by-default` was taken for an unknown setting."""
    edit(tiny, "wheel.hooks.aoti]", "wheel.hooks.aoti]\nenable-by-default = false")
    assert names_in(build.wheel(tiny, HATCH_BUILD_HOOK_ENABLE_AOTI="true")) == TINY_FILES


# --- Surroundings ---------------------------------------------------------------------------------------------------


def test_two_builds_of_one_tree_at_once_both_succeed_and_compile_once(tiny: Path, environ: dict[str, str]):
    """pypa/pip#8168: builds in place step on each other's toes."""
    edit(tiny, "x * 2 + 1", "x * 2 + 1.75", "tiny/model.py")  # nobody has compiled this yet
    code = "import sys, hatchling.build as backend; backend.build_wheel(sys.argv[1])"
    builds = [
        subprocess.Popen(
            [sys.executable, "-c", code, directory],
            cwd=tiny,
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for directory in ("one", "two")
    ]
    outputs = [build.communicate()[0] for build in builds]
    assert [build.returncode for build in builds] == [0, 0], outputs
    assert sum("scale: compile (" in output for output in outputs) == 1
    [one], [two] = (tiny / "one").glob("*.whl"), (tiny / "two").glob("*.whl")
    assert one.read_bytes() == two.read_bytes()


def test_a_read_only_tree_builds(tiny: Path, environ: dict[str, str], tmp_path: Path):
    """Sources on a read-only mount, as containers and build farms have them."""
    before = snapshot(tiny)
    out = tmp_path / "out"
    backend(tiny, f"build_wheel({os.fspath(out)!r})", environ, *read_only(tiny)).check()
    [wheel] = out.glob("*.whl")
    assert names_in(wheel) == TINY_FILES
    assert snapshot(tiny) == before


def test_an_editable_install_of_a_read_only_tree_says_why_it_cannot_be(
    tiny: Path, environ: dict[str, str], tmp_path: Path
):
    prefix = read_only(tiny)
    if not prefix:
        pytest.skip("this system cannot mount a folder read-only for one process")
    ran = backend(tiny, f"build_editable({os.fspath(tmp_path / 'out')!r})", environ, *prefix)
    assert ran.returncode == 1
    assert f"writes the compiled models into {tiny / 'tiny'}, which failed: Read-only file system" in ran.output
    assert "Make the directory writable, or install without -e" in ran.output
    assert "Traceback" not in ran.output


@pytest.mark.parametrize("requirement", ["hatchling==1.29.0", "hatchling==1.32.3", "hatchling"])
def test_the_oldest_supported_hatchling_and_the_newest_build_the_same_files(
    requirement: str, tiny: Path, environ: dict[str, str], shared: Path
):
    """pypa/hatch#2437: hatchling 1.32.3 broke every plugin that subscripted its interface."""
    home = shared / requirement
    with FileLock(f"{home}.lock"):
        if not home.exists():
            partial = shared / f"{requirement}.partial"
            shutil.rmtree(partial, ignore_errors=True)
            install = ["-m", "pip", "install", "--quiet", "--no-deps", "--target", partial, requirement]
            run(sys.executable, *install, environ=environ).check()
            partial.rename(home)
    edit(tiny, *ALSO_SDISTS)
    code = """
    import hatchling
    import hatchling.build as backend
    print(hatchling.__file__)
    backend.build_editable("editable")
    backend.build_sdist("dist")
    backend.build_wheel("dist")
    """
    ran = run_python(code, home, environ={**environ, "SOURCE_DATE_EPOCH": "0"}, cwd=tiny).check()
    assert os.fspath(home) in ran.output
    [wheel] = (tiny / "dist").glob("*.whl")
    assert names_in(wheel) == TINY_FILES
    assert (tiny / "tiny" / "scale.pt2").is_file()
    [sdist] = (tiny / "dist").glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        assert not [name for name in archive.getnames() if name.endswith(".pt2")]
