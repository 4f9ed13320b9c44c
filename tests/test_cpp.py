"""C++ programs use the models of an installed wheel: `example_project/cpp`, built with nothing but pip's torch.

One program, compiled once, runs every model here: it reads which files there are when it starts.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from conftest import (
    EXAMPLE,
    PROJECTS,
    Builder,
    Ran,
    copy_project,
    make_project,
    once,
    run,
    run_python,
    unpack,
    write_files,
)
from filelock import FileLock

from hatch_aoti.compiler.target import builder_cpu_features
from hatch_aoti.wheel.accessor import runtime_files
from hatch_aoti.wheel.cmake import cmake_names, render_cmake

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = [
    pytest.mark.skipif(not shutil.which("cmake"), reason="cmake is not installed"),
    pytest.mark.skipif(sys.platform != "linux", reason="tested on Linux"),
    pytest.mark.cpp,
    pytest.mark.xdist_group("cpp"),  # one program for all of them
]
needs_qemu = pytest.mark.skipif(not shutil.which("qemu-x86_64"), reason="qemu-user is not installed")

AVX512 = {"avx512_f", "avx512_bw", "avx512_cd", "avx512_dq", "avx512_vl"} <= builder_cpu_features()

BEST = "rows.x86-64-v4.pt2" if AVX512 else "rows.pt2"
LEAST = "rows.x86-64-v3.pt2" if AVX512 else "rows.pt2"


@pytest.fixture(scope="session")
def careful(shared: Path, environ: dict[str, str]) -> Path:
    """Return the installed package `careful`."""

    def make(site: Path) -> None:
        unpack(Builder(environ).wheel(make_project("careful", shared / "careful-project")), site)

    return once(shared / "careful-installed", make) / "careful"


@pytest.fixture(scope="session")
def two_wheels(shared: Path, careful: Path, installed_example: Path, environ: dict[str, str]) -> Path:
    """Return a program that uses the headers of two wheels."""
    options = [
        f"-Dcareful_DIR={careful / 'cmake'}",
        f"-Dexample_project_DIR={installed_example / 'example_project' / 'cmake'}",
        f"-DCMAKE_PREFIX_PATH={torch.utils.cmake_prefix_path}",
    ]

    def make(build: Path) -> None:
        run("cmake", "-S", PROJECTS / "two_wheels", "-B", build, *options, environ=environ).check()
        run("cmake", "--build", build, environ=environ).check()

    return once(shared / "two-wheels-build", make) / "two_wheels"


@pytest.fixture(scope="session")
def rows(shared: Path, environ: dict[str, str]) -> Path:
    """Return the installed package `tiny`: external constants, and two CPU baselines where both can be built."""

    def make(site: Path) -> None:
        edits = [] if AVX512 else [('["x86-64-v3", "x86-64-v4"]', '["x86-64-v3"]')]
        unpack(Builder(environ).wheel(make_project("rows", shared / "rows-project", *edits)), site)

    return once(shared / "rows-installed", make) / "tiny"


@pytest.fixture(scope="session")
def inference(shared: Path, installed_example: Path, environ: dict[str, str]) -> Path:
    """Return the program `inference`, built against the installed wheel.

    The generated header is compiled as the project's own code, not as a system header, so that it must be free of
    warnings.
    """
    build, headers = shared / "cpp-build", shared / "cpp-headers"
    with FileLock(shared / "cpp.lock"):
        if not (build / "inference").exists():
            shutil.copytree(installed_example / "example_project" / "include", headers, dirs_exist_ok=True)
            asked = [sys.executable, "-m", "example_project._models", "--cmake-dir"]
            cmake_dir = run(*asked, cwd=installed_example).check().output.strip()
            options = [f"-Dexample_project_DIR={cmake_dir}", f"-DCMAKE_PREFIX_PATH={torch.utils.cmake_prefix_path}"]
            flags = {"CXXFLAGS": f"-I{headers} -Werror"}
            run("cmake", "-S", EXAMPLE / "cpp", "-B", build, *options, environ={**environ, **flags}).check()
            run("cmake", "--build", build).check()
    return build / "inference"


def in_python(package: str, model: str, *paths: Path) -> list[str]:
    """Return the lines with numbers that the program should print, as Python computes and writes them."""
    program = f"""
        import torch
        from {package}._models import {model}
        from example_project.samples import as_batch, load_samples

        images = as_batch(load_samples())
        for batch in (8, 1):
            for row in {model}(images[:batch]).tolist():
                print(" ".join(f"{{value:.4f}}" for value in row))
    """
    return run_python(program, *paths).check().output.splitlines()


def numbers(output: str) -> list[str]:
    return [line for line in output.splitlines() if line[:1] in set("-0123456789")]


def floats(lines: list[str]) -> list[float]:
    return [float(number) for line in lines for number in line.split()]


# --- Running models -------------------------------------------------------------------------------------------------


def test_the_example_prints_what_python_prints_to_the_last_digit(inference: Path, installed_example: Path):
    ran = run(inference).check()
    assert ran.output.splitlines()[:2] == ["digits: digits.pt2", "batch of 8"]
    assert numbers(ran.output) == in_python("example_project", "digits", installed_example)
    assert len(numbers(ran.output)) == 9


def test_external_constants_and_the_best_baseline_for_this_cpu(inference: Path, rows: Path, installed_example: Path):
    ran = run(inference, "rows", rows).check()
    assert (rows / "_models.safetensors").is_file()
    assert ran.output.splitlines()[0] == f"rows: {BEST}"
    assert numbers(ran.output) == in_python("tiny", "rows", rows.parent, installed_example)


@pytest.mark.parametrize("model", ["digits", "rows"])  # one with its constants in the bundle, one with them outside
def test_the_models_of_a_bundle_print_what_python_prints(
    model: str, inference: Path, installed_guide: Path, installed_example: Path
):
    ran = run(inference, model, installed_guide / "guide").check()
    assert ran.output.splitlines()[0] == f"{model}: vision.pt2"
    assert numbers(ran.output) == in_python("guide", model, installed_guide, installed_example)
    assert len(numbers(ran.output)) == 9


@pytest.mark.qemu
@needs_qemu
def test_an_older_cpu_gets_the_baseline_that_it_can_run(inference: Path, rows: Path):
    # pytorch/pytorch#121516: it used to be a SIGILL
    there = run("qemu-x86_64", "-cpu", "Haswell", inference, "rows", rows).check()
    here = run(inference, "rows", rows).check()
    assert f"rows: {LEAST}\n" in there.output
    assert floats(numbers(there.output)) == pytest.approx(floats(numbers(here.output)), abs=2e-3)


@pytest.mark.qemu
@needs_qemu
def test_a_cpu_below_every_baseline_is_refused_in_words(inference: Path, rows: Path):
    ran = run("qemu-x86_64", "-cpu", "Nehalem", inference, "rows", rows)
    assert ran.returncode == 1, ran.output
    error = ran.output.splitlines()[-1]
    assert error.startswith("rows needs x86-64-v3 (AVX2); this CPU (")
    assert error.endswith("lacks avx, avx2, bmi, bmi2, f16c, fma3, lzcnt. Use a wheel built for a lower target.")


def edited(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    """Return a function that changes the manifest in a folder."""

    def edit(folder: Path) -> None:
        manifest = json.loads((folder / "_models.json").read_text(encoding="utf-8"))
        change(manifest)
        (folder / "_models.json").write_text(json.dumps(manifest), encoding="utf-8")

    return edit


def set_dim(manifest: dict[str, Any]) -> None:
    manifest["models"]["rows"]["signature"]["dims"][0]["max"] = 7


def set_torch(manifest: dict[str, Any]) -> None:
    for artifact in manifest["models"]["rows"]["artifacts"]:
        artifact["toolchain"]["torch"] = "2.99.1+cpu"


def set_operators(manifest: dict[str, Any]) -> None:
    manifest["models"]["rows"]["operators"] = ["aten::add.Tensor", "tiny::twice"]


def set_machine(manifest: dict[str, Any]) -> None:
    for artifact in manifest["models"]["rows"]["artifacts"]:
        artifact["target"]["machine"] = "aarch64"


def set_id(manifest: dict[str, Any]) -> None:
    for artifact in manifest["models"]["rows"]["artifacts"]:
        artifact["id"] = "0" * 40


def set_device(manifest: dict[str, Any]) -> None:
    manifest["models"]["rows"]["device"] = "cuda"


REFUSALS = {
    "a machine without a GPU": (edited(set_device), "rows was compiled for NVIDIA GPUs, and torch finds none"),
    "a size out of range": (
        edited(set_dim),
        "rows: x must be float32[n, 1, 8, 8], got float32[8, 1, 8, 8]: dimension 0 is 8, but n must be from 1 to 7",
    ),
    "an older torch": (edited(set_torch), "rows was compiled with torch 2.99.1+cpu and needs torch 2.99 or newer"),
    "another machine": (edited(set_machine), "rows was compiled for linux on aarch64; this is linux on x86_64"),
    # pytorch/pytorch#145394
    "a custom operator": (edited(set_operators), "rows calls the operator tiny::twice, which nothing in this program"),
    "a missing model": (lambda folder: (folder / BEST).unlink(), f"{BEST} is missing. Reinstall"),
    "a model of another build": (
        edited(set_id),
        f"{BEST} is not the file that _models.json describes: it is of another build, or of another model.",
    ),
    "a damaged model": (lambda folder: (folder / BEST).write_bytes(b"PK"), "rows: torch 2.13.0 cannot load"),
    "missing constants": (lambda folder: (folder / "_models.safetensors").unlink(), "_models.safetensors is missing"),
    "constants cut off": (
        lambda folder: os.truncate(folder / "_models.safetensors", 700),
        "_models.safetensors is damaged (it is shorter than it should be)",
    ),
    "no package": (lambda folder: (folder / "_models.json").unlink(), "_models.json cannot be read"),
    "a damaged manifest": (
        lambda folder: (folder / "_models.json").write_text('{"models": ', encoding="utf-8"),
        "_models.json is damaged (no JSON at byte 11)",
    ),
}


@pytest.mark.parametrize(("change", "message"), REFUSALS.values(), ids=REFUSALS.keys())
def test_what_cannot_run_is_refused_in_words(
    change: Callable[[Path], None], message: str, inference: Path, rows: Path, tmp_path: Path
):
    folder = tmp_path / "tiny"
    shutil.copytree(rows, folder)
    change(folder)
    ran = run(inference, "rows", folder)
    assert ran.returncode == 1, ran.output
    assert message in ran.output


def test_inputs_are_refused_by_name_as_in_python(inference: Path):
    # pytorch/pytorch#141115: the compiled code itself reads past the end
    ran = run(inference, "ranker")
    assert ran.returncode == 1
    assert "ranker: x must be a tensor float32[batch, 10], got float32[8, 1, 8, 8]" in ran.output


def test_an_unknown_model_is_refused_with_the_names_of_those_there_are(inference: Path):
    ran = run(inference, "digit")
    assert ran.returncode == 1
    assert 'no model "digit"' in ran.output
    assert "there are: digits, ranker" in ran.output


def test_values_that_cannot_be_computed_with_throw_and_the_model_goes_on(two_wheels: Path, careful: Path):
    # pytorch/pytorch#195402, #143649: they used to end the process
    lines = run(two_wheels, "values", careful).check().output.splitlines()
    index = "lookup: IndexError: an index of `index` is out of range; the dimension that it points into has size 100"
    assert lines == [index, index, "quotient: ZeroDivisionError", "goes on"] * 6


def test_models_of_two_wheels_are_loaded_from_many_threads_at_once(
    two_wheels: Path, careful: Path, installed_example: Path
):
    # triton-inference-server/pytorch_backend#205
    ran = run(two_wheels, "threads", careful, installed_example / "example_project").check()
    assert ran.output == "800 loads\n"


# --- The CMake package ----------------------------------------------------------------------------------------------


def find_package(tmp_path: Path, site: Path, package: str, *, torch_version: str, version: str = "") -> Ran:
    """Configure a project that does nothing but find a package, with a Torch that is nothing but its version."""
    files = {
        "CMakeLists.txt": f"""
            cmake_minimum_required(VERSION 3.18)
            project(finds LANGUAGES NONE)
            find_package({package} {version} CONFIG REQUIRED)
            get_target_property(include {package}::models INTERFACE_INCLUDE_DIRECTORIES)
            foreach(name IN ITEMS MODELS_DIR MODELS rows_TARGETS rows_FILES rows_ENTRY rows_CONSTANTS VERSION)
              message(STATUS "${{name}}=${{{package}_${{name}}}}")
            endforeach()
            message(STATUS "include=${{include}}")
        """,
        "torch/TorchConfig.cmake": "set(TORCH_LIBRARIES)\n",
        "torch/TorchConfigVersion.cmake": (
            f'set(PACKAGE_VERSION "{torch_version}")\nset(PACKAGE_VERSION_COMPATIBLE TRUE)\n'
        ),
    }
    root = write_files(tmp_path, files)
    found = [f"-D{package}_DIR={site}/{package}/cmake", f"-DTorch_DIR={root / 'torch'}"]
    return run("cmake", "-S", root, "-B", root / "build", *found)


def test_the_cmake_package_names_the_files_of_every_model(rows: Path, tmp_path: Path):
    ran = find_package(tmp_path, rows.parent, "tiny", torch_version="2.13.0").check()
    found = dict(line.removeprefix("-- ").partition("=")[::2] for line in ran.output.splitlines() if "=" in line)
    assert found["MODELS_DIR"] == str(rows)
    assert found["MODELS"] == "rows"
    assert found["VERSION"] == "1.0"
    files = [str(rows / name) for name in dict.fromkeys([BEST, LEAST])]
    assert found["rows_TARGETS"].split(";") == ["x86-64-v4", "x86-64-v3"][-len(files) :]
    assert found["rows_FILES"].split(";") == files
    assert all(Path(file).is_file() for file in files)
    assert found["rows_ENTRY"] == "model"
    assert found["rows_CONSTANTS"] == str(rows / "_models.safetensors")
    assert (Path(found["include"]) / "tiny" / "models.h").is_file()


def test_the_cmake_package_documents_every_signature(installed_example: Path):
    text = (installed_example / "example_project/cmake/example_projectConfig.cmake").read_text(encoding="utf-8")
    assert "# digits(image: float32[batch, 1, 8, 8]) -> float32[batch, 10]\n#   where batch = 1…1024\n" in text
    assert "# ranker(x: float32[batch, 10]) -> float32[batch, 1]\n" in text


def test_cmake_refuses_a_torch_that_is_too_old_with_both_versions(installed_example: Path, tmp_path: Path):
    ran = find_package(tmp_path, installed_example, "example_project", torch_version="2.12.1")
    text = " ".join(ran.output.split())
    assert ran.returncode == 1
    assert f"were compiled with torch {torch.__version__} and need torch 2.13 or newer" in text
    assert "CMake found torch 2.12.1 in" in text


@pytest.mark.parametrize(("version", "fits"), [("0.1", True), ("0.1.0", True), ("0.2", False)])
def test_cmake_can_ask_for_a_version_of_the_package(version: str, fits: bool, installed_example: Path, tmp_path: Path):
    ran = find_package(tmp_path, installed_example, "example_project", torch_version="2.13.0", version=version)
    assert (ran.returncode == 0) == fits, ran.output


def test_a_name_that_is_no_namespace_in_cpp_gets_one(tmp_path: Path):
    texts = render_cmake(
        [], package="space.union", version="1!2.0.dev3+x", torch_version="2.13", hatch_aoti_version="0"
    )
    assert tuple(texts) == cmake_names("space.union")
    assert tuple(texts) == (
        "cmake/space_unionConfig.cmake",
        "cmake/space_unionConfigVersion.cmake",
        "include/space/union/models.h",
    )
    header = texts["include/space/union/models.h"]
    assert "\nnamespace space::union_ {\n" in header
    assert header.rstrip().endswith("}  // namespace space::union_")
    assert 'space::union_::Model digits("digits"' in header
    assert "find_package(space_union CONFIG REQUIRED)" in header
    assert "example_project" not in header
    assert 'set(PACKAGE_VERSION "2.0")' in texts["cmake/space_unionConfigVersion.cmake"]


# --- What a build script asks ---------------------------------------------------------------------------------------


def models(site: Path, *options: str, package: str = "example_project") -> Ran:
    return run(sys.executable, "-m", f"{package}._models", *options, cwd=site)


def test_a_build_script_can_ask_for_the_paths(installed_example: Path, rows: Path):
    folder = installed_example / "example_project"
    assert models(installed_example, "--cmake-dir").check().output == f"{folder / 'cmake'}\n"
    assert models(installed_example, "--path", "digits").check().output == f"{folder / 'digits.pt2'}\n"
    assert models(rows.parent, "--path", "rows", package="tiny").check().output == f"{rows / BEST}\n"


def test_asking_for_paths_does_not_import_torch(installed_example: Path):
    program = """
        import sys
        import example_project._models
        from example_project._aoti import main
        assert main(["--path", "digits"]) == main(["--cmake-dir"]) == 0
        assert "torch" not in sys.modules
    """
    run_python(program, installed_example).check()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--path", "digit"], "invalid choice: 'digit' (choose from"),
        (["--path"], "--path: expected one argument"),
        (["--cmake"], "unrecognized arguments: --cmake"),
        (["--path", "digits", "--cmake-dir"], "not allowed with argument"),
    ],
)
def test_a_wrong_question_is_answered_with_exit_status_2(options: list[str], message: str, installed_example: Path):
    ran = models(installed_example, *options)
    assert ran.returncode == 2
    assert message in ran.output


# --- CMake compiles the models --------------------------------------------------------------------------------------


def test_cmake_can_compile_the_models_itself(
    installed_example: Path, environ: dict[str, str], tmp_path: Path, example_wheel: Path
):
    project, build = copy_project(EXAMPLE, tmp_path / "example"), tmp_path / "build"
    options = [
        "-DBUILD_MODELS=ON",
        f"-DPython3_EXECUTABLE={sys.executable}",
        f"-DCMAKE_PREFIX_PATH={torch.utils.cmake_prefix_path}",
    ]
    run("cmake", "-S", project / "cpp", "-B", build, *options, environ=environ).check()
    run("cmake", "--build", build, "--target", "models", environ=environ).check()
    built = build / "models"
    names = [path.relative_to(built) for path in sorted(built.rglob("*")) if path.is_file()]
    assert len(names) == 7 + len(runtime_files())
    for name in names:  # what the wheel has, byte for byte
        assert (built / name).read_bytes() == (installed_example / "example_project" / name).read_bytes(), name
    before = (built / "digits.pt2").stat().st_mtime_ns
    run("cmake", "--build", build, "--target", "models", environ=environ).check()
    assert (built / "digits.pt2").stat().st_mtime_ns == before  # nothing changed, nothing to do
