"""What is in a wheel, and what is not: no other CPU's instructions, no builder, nothing that loading does not need."""

from __future__ import annotations

import getpass
import os
import re
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from conftest import Builder, run, run_python
from packaging.tags import sys_tags
from packaging.utils import parse_wheel_filename
from wheel_search import contents, find_traces, objects

from hatch_aoti.artifact.archive import read_package

linux_x86_64 = pytest.mark.skipif(
    sys.platform != "linux" or os.uname().machine != "x86_64", reason="about instructions of x86-64"
)


@pytest.fixture(scope="module")
def object_files(example_wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return the shared objects of the default wheel as files."""
    directory = tmp_path_factory.mktemp("objects")
    files = []
    for number, data in enumerate(objects(example_wheel).values()):
        files.append(directory / f"{number}.so")
        files[-1].write_bytes(data)
    assert len(files) == 2
    return files


def tool(*command: str | Path) -> str:
    """Return what one of binutils' programs prints."""
    return subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, "LC_ALL": "C"}).stdout


@linux_x86_64
def test_the_default_wheel_has_no_instruction_of_avx512(object_files: list[Path]):
    # pytorch/pytorch#121516: artifacts of an AVX-512 builder die with SIGILL elsewhere
    for file in object_files:
        assembly = tool("objdump", "-d", "--no-show-raw-insn", file)
        assert "%ymm" in assembly  # so the vector registers of the baseline can be seen, and are used
        assert re.findall(r".*%(?:zmm\d|k[0-7]\b).*", assembly) == []


@pytest.mark.skipif(sys.platform != "linux", reason="about ELF")
def test_no_object_asks_for_an_executable_stack(object_files: list[Path]):
    # pypa/auditwheel#634: glibc 2.41 and newer refuse to load such an object
    for file in object_files:
        [header] = [line.split() for line in tool("readelf", "-lW", file).splitlines() if "GNU_STACK" in line]
        assert header[6] == "RW"


@pytest.mark.skipif(sys.platform != "linux", reason="about ELF")
def test_objects_are_stripped_and_have_no_search_path(object_files: list[Path]):
    for file in object_files:
        sections = tool("readelf", "-SW", file)
        assert ".dynsym" in sections
        assert not re.search(r"\.symtab|\.debug_|\.note\.gnu\.build-id", sections)
        assert not re.search(r"R(UN)?PATH", tool("readelf", "-dW", file))


def builder_traces() -> list[str]:
    """Return what names this builder: its temporary directory, home, user, host, and where Python and torch are.

    Names that are words of any program, or so short that any file has them, tell nothing; a user and a host with
    telling names build in test_reproducibility.py.
    """
    torch_path = Path(torch.__file__).parent
    paths = {Path(tempfile.gettempdir()), Path.home(), torch_path, torch_path.resolve(), Path(sys.prefix)}
    names = {getpass.getuser(), socket.gethostname()} - {"localhost"}
    return [*map(str, paths), *(name for name in names if len(name) > 4)]


def test_nothing_in_the_wheel_names_its_builder(example_wheel: Path, shared: Path):
    traces = [str(shared), str(shared.resolve()), *builder_traces()]
    assert find_traces(example_wheel, traces) == []


def test_a_trace_of_the_builder_would_be_found(example_wheel: Path):
    # Proof of the search above: a path and a word that are inside the objects, which are inside archives in the wheel.
    found = find_traces(example_wheel, ["torch/include/torch/csrc/inductor/aoti_runtime", "libtorch_cpu"])
    for trace in (b"aoti_runtime", b"libtorch_cpu"):
        assert any(trace in line.encode() and ".so: " in line for line in found)


def test_artifacts_have_only_what_loading_needs(installed_example: Path):
    for model in ("digits", "ranker"):
        package = read_package(installed_example / "example_project" / f"{model}.pt2")
        assert list(package.models) == ["model"]
        assert sorted(package.models["model"]) == ["model.wrapper.so", "model.wrapper_metadata.json"]
        assert sorted(package.other) == [
            ".data/serialization_id",
            ".data/version",
            "archive_format",
            "archive_version",
            "byteorder",
        ]


def test_sources_are_included_on_request_and_name_no_builder(tiny: Path, build: Builder, environ: dict[str, str]):
    settings = tiny / "pyproject.toml"
    text = settings.read_text(encoding="utf-8")
    settings.write_text(f"{text}\n[tool.aoti]\ninclude-sources = true\n", encoding="utf-8")
    wheel = build.wheel(tiny)
    sources = {name.rpartition("/")[2]: data for name, data in contents(wheel) if name.endswith(".cpp")}
    assert sorted(sources) == ["model.kernel.cpp", "model.wrapper.cpp"]
    assert b"cpp_fused" in sources["model.kernel.cpp"]
    assert b"AOTInductorModel::run_impl" in sources["model.wrapper.cpp"]
    assert find_traces(wheel, [str(tiny), environ["HATCH_AOTI_CACHE_DIR"], *builder_traces()]) == []


@pytest.mark.slow
def test_the_artifact_is_at_most_a_quarter_of_what_torch_makes(installed_example: Path, tmp_path: Path):
    stock = tmp_path / "stock.pt2"
    program = f"""
        import torch
        from example_project.ranker import build, example_inputs
        program = torch.export.export(
            build(), example_inputs(), dynamic_shapes=({{0: torch.export.Dim("batch", min=1, max=1024)}},)
        )
        torch._inductor.aoti_compile_and_package(program, package_path={str(stock)!r})
    """
    run_python(
        program, installed_example, environ={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
    ).check()
    ours = installed_example / "example_project" / "ranker.pt2"
    assert ours.stat().st_size <= stock.stat().st_size / 4


def test_the_platform_tag_is_one_that_pip_and_indexes_accept(example_wheel: Path, tmp_path: Path):
    # pypa/cibuildwheel#1929: indexes refuse `linux_*` tags
    [tag] = parse_wheel_filename(example_wheel.name)[3]
    assert tag in set(sys_tags())
    assert tag.platform.startswith(("manylinux_2_", "macosx_"))
    target = tmp_path / "site"
    run(sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--target", target, example_wheel).check()
    assert (target / "example_project" / "_models.py").is_file()


@pytest.mark.skipif(sys.platform != "linux", reason="about ELF")
def test_the_platform_tag_promises_the_glibc_that_the_objects_need(example_wheel: Path, object_files: list[Path]):
    [tag] = parse_wheel_filename(example_wheel.name)[3]
    _, major, minor, _ = tag.platform.split("_", 3)
    for file in object_files:
        needed = re.findall(r"GLIBC_(\d+)\.(\d+)", tool("readelf", "-VW", file))
        assert needed
        assert max((int(major), int(minor)) for major, minor in needed) <= (int(major), int(minor))


def test_loading_says_nothing_about_another_cpu(installed_example: Path):
    # pytorch/pytorch#191713: torch warns of an instruction set mismatch where a portable artifact meets a better CPU
    program = """
        import torch
        from example_project._models import load, ranker
        x = torch.zeros(2, 10)
        accessor = load("ranker")(x)
        stock = torch._inductor.aoti_load_package(str(ranker.path))(x)  # the same artifact without our help
        assert torch.equal(accessor, stock) and torch.equal(ranker(x), stock)
    """
    assert run_python(program, installed_example).check().output == ""
