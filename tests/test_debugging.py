"""Debugging a build: what torch's variables and `keep-intermediates` give, and that releases stay as they are."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from conftest import TINY_MODULE, Builder, Ran, make_project, names_in, once, run, run_python, unpack, write_files
from elftools.elf.elffile import ELFFile

from hatch_aoti.artifact.archive import extract_objects
from hatch_aoti.artifact.cache import Cache
from hatch_aoti.build.kept import relocated, settle
from hatch_aoti.compiler.reproduce import PROGRAM, save_program
from hatch_aoti.compiler.script import compiler_script
from hatch_aoti.compiler.toolchain import find_toolchain
from hatch_aoti.settings.debugging import Debugging, read_debugging, without_debugging
from hatch_aoti.wheel.inspection import inspect_path

# --- The variables, and what is wrong with them ---------------------------------------------------------------------


def read(**environ: str) -> Debugging:
    debugging, problems = read_debugging(environ, Path("/project"))
    assert problems == []
    return debugging


@pytest.mark.parametrize("environ", [{}, {"TORCH_LOGS": ""}, {"TORCH_LOGS": " ", "AOT_INDUCTOR_DEBUG_COMPILE": "0"}])
def test_nothing_empty_variables_and_zeros_ask_for_nothing(environ: dict[str, str]):
    assert not read(**environ)


def test_variables_that_only_say_where_or_how_ask_for_nothing():
    assert not read(TORCH_LOGS_FORMAT="short", TORCH_COMPILE_DEBUG_DIR="x", AOT_INDUCTOR_FILTERED_KERNELS_TO_PRINT="k")


def test_variables_that_change_compiled_code_are_told_from_those_that_do_not():
    debugging = read(
        AOT_INDUCTOR_DEBUG_COMPILE="1",
        AOT_INDUCTOR_DEBUG_INTERMEDIATE_VALUE_PRINTER="2",
        AOT_INDUCTOR_FILTERED_KERNELS_TO_PRINT="cpp_fused_0",
        TORCH_LOGS="+inductor",
        TORCH_TRACE="trace",
    )
    assert set(debugging.output) == {"TORCH_LOGS", "TORCH_TRACE"}
    assert debugging.inductor_options() == {
        "aot_inductor.debug_compile": True,
        "aot_inductor.debug_intermediate_value_printer": "2",
        "aot_inductor.filtered_kernel_names": "cpp_fused_0",
    }
    assert debugging.symbols
    assert not debugging.saves_values
    assert debugging.output["TORCH_TRACE"] == "/project/trace"


def test_sanitizers_change_compiled_code_and_keep_what_names_its_lines():
    debugging = read(HATCH_AOTI_SANITIZE="address,undefined")
    assert debugging.changes == {"HATCH_AOTI_SANITIZE": "address,undefined"}
    assert debugging.symbols
    assert debugging.sanitizers == "address,undefined"
    assert read(HATCH_AOTI_SANITIZE="0").sanitizers == ""


@pytest.mark.parametrize("sanitizers", ["", "address"])
def test_sanitizers_watch_what_is_compiled_and_not_the_headers_that_builds_share(tmp_path: Path, sanitizers: str):
    seen = tmp_path / "compiler"
    seen.write_text('#!/bin/sh\necho "$@"\n')
    seen.chmod(0o755)
    toolchain = dataclasses.replace(find_toolchain({}), command=(os.fspath(seen),))
    script = compiler_script(toolchain, tmp_path, None, sanitizers)
    assert ("-fsanitize=address" in run(script, "-o", tmp_path / "model.o").check().output) == bool(sanitizers)
    assert "-fsanitize" not in run(script, "-o", tmp_path / "elsewhere" / "header.h.gch").check().output


@pytest.mark.parametrize(
    ("name", "value", "telling"),
    [
        ("AOT_INDUCTOR_DEBUG_COMPILE", "true", 'must be 0 or 1, but it is "true"'),
        ("AOT_INDUCTOR_DEBUG_INTERMEDIATE_VALUE_PRINTER", "4", 'must be 0, 1, 2 or 3, but it is "4"'),
        ("DUMP_AOTI_MINIFIER", "yes", "must be 0 or 1"),
        ("AOTINDUCTOR_REPRO_LEVEL", "x", "must be 1, 2, 3 or 4"),
        ("TORCH_COMPILE_DEBUG", "2", "must be 0 or 1"),
        ("HATCH_AOTI_SANITIZE", "thread", 'must be 0, address, undefined or address,undefined, but it is "thread"'),
        ("TORCH_LOGS_OUT", "nowhere/log.txt", "there is no folder /project/nowhere"),
    ],
)
def test_a_value_that_torch_would_ignore_or_crash_on_is_refused_by_name(name: str, value: str, telling: str):
    [problem] = read_debugging({name: value}, Path("/project"))[1]
    assert problem.key == name
    assert telling in problem.message


def test_the_build_says_what_is_wrong_with_torch_logs_and_what_may_be_meant(tiny: Path, build: Builder):
    ran = build(tiny, TORCH_LOGS="+inductor,ouput_code")
    assert ran.returncode == 1
    assert '`TORCH_LOGS`: torch knows no log "ouput_code". Did you mean "output_code"?' in ran.output
    assert "Traceback" not in ran.output


def test_workers_see_no_other_variable_that_torchs_compiler_reads():
    given = {
        "PATH": "/bin",
        "TORCH_LOGS": "",  # torch crashes on an empty one
        "AOTI_RUNTIME_CHECK_INPUTS": "1",
        "INDUCTOR_PROVENANCE": "1",  # changes the code
        "TORCHINDUCTOR_FREEZING": "1",
        "AOT_INDUCTOR_DEBUG_COMPILE": "1",
    }
    assert without_debugging(given) == {"PATH": "/bin"}


# --- One project, built as a release, in two ways for debugging, and as a release again ------------------------------


@dataclasses.dataclass(frozen=True)
class Builds:
    """The wheels and outputs of the builds, by name, and what was kept of each for reading."""

    root: Path

    def wheel(self, name: str) -> Path:
        [wheel] = (self.root / name).glob("*.whl")
        return wheel

    def output(self, name: str) -> str:
        return (self.root / name / "output.txt").read_text(encoding="utf-8")

    def kept(self, name: str) -> Path:
        return self.root / name / "kept"


BUILDS = {
    "before": {},
    "output": {
        "TORCH_LOGS": "+output_code",
        "TORCH_TRACE": "trace",
        "DUMP_AOTI_MINIFIER": "1",
        "AOTINDUCTOR_REPRO_LEVEL": "3",
        "HATCH_AOTI_KEEP_INTERMEDIATES": "1",
    },
    "debug": {"AOT_INDUCTOR_DEBUG_COMPILE": "1", "AOT_INDUCTOR_DEBUG_INTERMEDIATE_VALUE_PRINTER": "2"},
    "after": {"TORCH_LOGS": "", "AOT_INDUCTOR_DEBUG_COMPILE": "0"},
}


@pytest.fixture(scope="module")
def builds(shared: Path, environ: dict[str, str]) -> Builds:
    def make(root: Path) -> None:
        project = make_project("tiny", root / "project", ("tiny", "looked"))
        (project / "tiny").rename(project / "looked")  # no other test leaves anything of that package in the cache
        for name, variables in BUILDS.items():
            output = Builder(environ)(project, "--wheel", "--outdir", os.fspath(root / name), **variables).check()
            write_files(root / name, {"output.txt": output.output})
            kept = Path(environ["HATCH_AOTI_CACHE_DIR"]) / "debug" / "looked" / "scale"
            if kept.exists():
                shutil.copytree(kept, root / name / "kept")
                (root / name / "where.txt").write_text(os.fspath(kept), encoding="utf-8")

    return Builds(once(shared / "debugging", make))


def test_a_release_built_after_debug_builds_is_byte_for_byte_the_one_before(builds: Builds):
    assert builds.wheel("after").read_bytes() == builds.wheel("before").read_bytes()


def test_variables_for_output_only_do_not_change_the_wheel(builds: Builds):
    assert ": compile (" in builds.output("output"), "it was really compiled"
    assert builds.wheel("output").read_bytes() == builds.wheel("before").read_bytes()


@pytest.mark.parametrize("name", ["output", "debug"])
def test_the_build_names_the_place_of_the_output(builds: Builds, name: str):
    where = (builds.root / name / "where.txt").read_text(encoding="utf-8")
    assert f"scale: for reading: {where}" in builds.output(name)


@pytest.mark.parametrize("name", ["before", "after"])
def test_a_release_build_speaks_of_no_debugging(builds: Builds, name: str):
    output = builds.output(name)
    assert "for reading" not in output
    assert "DEBUG" not in output


def test_nothing_is_written_into_the_project(builds: Builds):
    files = {path.relative_to(builds.root / "project").parts[0] for path in (builds.root / "project").rglob("*")}
    assert files == {"pyproject.toml", "looked", "trace"}  # `TORCH_TRACE` named that one


def test_torch_logs_are_in_the_log(builds: Builds):
    log = (builds.kept("output") / "log.txt").read_text(encoding="utf-8")
    assert "[__output_code]" in log
    assert "AOTInductorModel::run_impl" in log


def test_torch_trace_goes_where_it_says(builds: Builds):
    assert list((builds.root / "project" / "trace").glob("dedicated_log_torch_trace_*.log"))


def test_the_minifier_is_written_and_names_files_that_are_there(builds: Builds):
    [launcher] = builds.kept("output").glob("torch_compile_debug/*/minifier/minifier_launcher.py")
    text = launcher.read_text(encoding="utf-8")
    [program] = re.findall(r"'([^']+/exported_program\.pt2)'", text)
    assert Path(program).is_file() or program.endswith("checkpoints/exported_program.pt2")
    assert "scratch" not in text


def test_intermediates_are_the_generated_code_and_commands_that_a_shell_runs(builds: Builds, tmp_path: Path):
    [folder] = builds.kept("output").glob("*/commands.sh")
    sources = sorted(path.name for path in folder.parent.rglob("*.cpp"))
    assert sources == ["model.kernel.cpp", "model.wrapper.cpp"]
    text = folder.read_text(encoding="utf-8")
    assert [line for line in text.splitlines() if line.startswith("#")] == [
        "# makes model.wrapper.o", "# makes model.kernel.o", "# makes model.weights.o", "# makes model.wrapper.so"
    ]  # fmt: skip
    [kernel] = [line for line in text.splitlines() if "-o" in line and "model.kernel.o " in line and " -c " in line]
    where = (builds.root / "output" / "where.txt").read_text(encoding="utf-8")
    kernel = kernel.replace(where, os.fspath(builds.kept("output")))
    run("sh", "-c", f"{kernel} -fsyntax-only", cwd=tmp_path).check()


def test_a_debug_build_says_that_it_is_one(builds: Builds, tmp_path: Path):
    variables = BUILDS["debug"]
    said = ", ".join(f"{name}={value}" for name, value in variables.items())
    assert f"WARNING: this is a DEBUG BUILD ({said})" in builds.output("debug")
    installed = unpack(builds.wheel("debug"), tmp_path)
    assert json.loads((installed / "looked" / "_models.json").read_text(encoding="utf-8"))["debug"] == variables
    assert inspect_path(builds.wheel("debug")).debug == variables
    assert f"a DEBUG BUILD ({said}), not for release" in run(sys.executable, "-m", "hatch_aoti", "inspect", installed / "looked").check().output  # fmt: skip
    assert f"A DEBUG BUILD ({said})" in run(sys.executable, installed / "looked" / "_models.py").check().output
    assert names_in(builds.wheel("debug")) == names_in(builds.wheel("before"))


def test_a_debug_compile_has_symbols_and_names_sources_that_are_there(builds: Builds, tmp_path: Path):
    package = unpack(builds.wheel("debug"), tmp_path) / "looked" / "scale.pt2"
    path = tmp_path / "model.so"
    path.write_bytes(extract_objects(package)["model"])
    with path.open("rb") as file:
        units = [unit.get_top_DIE() for unit in ELFFile(file).get_dwarf_info().iter_CUs()]
        names = [unit.get_full_path() for unit in units]
    where = (builds.root / "debug" / "where.txt").read_text(encoding="utf-8")
    [wrapper] = [name for name in names if name.endswith("model.wrapper.cpp")]
    assert wrapper.startswith(where)
    assert (builds.kept("debug") / Path(wrapper).relative_to(where)).is_file()


def test_intermediate_values_are_printed_when_the_model_is_called(builds: Builds, tmp_path: Path):
    installed = unpack(builds.wheel("debug"), tmp_path)
    code = "import torch; from looked._models import scale; print(scale(torch.ones(2, 4)).sum().item())"
    output = run_python(code, installed).check().output
    assert "[  after_launch - cpp_fused_add_mul_0 - buf0  ]:" in output
    assert "Mean value: 3" in output
    assert output.splitlines()[-1] == "24.0"
    assert "after_launch" in (builds.kept("debug") / "log.txt").read_text(encoding="utf-8"), "at the build, too"


# --- Failures --------------------------------------------------------------------------------------------------------


def compiler(folder: Path, does: str) -> str:
    """Write a compiler that answers what it is asked about itself, and for the rest `does` something else."""
    script = f'#!/bin/sh\ncase " $* " in *" --version "*|*" -v "*) exec g++ "$@";; esac\n{does}\n'
    write_files(folder, {"bin/g++": script})
    (folder / "bin" / "g++").chmod(0o755)
    return os.fspath(folder / "bin" / "g++")


def folder_named_by(ran: Ran) -> tuple[Path, Path]:
    [folder] = re.findall(r"To reproduce it: (\S+) has the exported program", ran.output)
    [script] = re.findall(r"`python (\S+)` compiles it in plain PyTorch", ran.output)
    return Path(folder), Path(script)


def test_a_failed_compilation_names_what_reproduces_it_in_plain_torch(
    tiny: Path, environ: dict[str, str], tmp_path: Path
):
    broken = compiler(tmp_path, "echo 'model.cpp:7:9: error: broken on purpose' >&2; exit 1")
    variables = {"HATCH_AOTI_CACHE_DIR": os.fspath(tmp_path / "cache"), "TORCH_COMPILE_DEBUG": "1"}
    ran = Builder(environ)(tiny, CXX=broken, **variables, DUMP_AOTI_MINIFIER="1")
    assert ran.returncode == 1
    assert "scratch" not in ran.output, "what is swept away is not named"
    folder, script = folder_named_by(ran)
    assert folder == tmp_path / "cache" / "debug" / "tiny" / "scale"
    assert f"Full log: {folder}/log.txt" in ran.output
    assert list(folder.glob("torch_compile_debug/*/torchinductor/*/fx_graph_readable.py"))
    assert list(folder.glob("torch_compile_debug/*/minifier/minifier_launcher.py"))
    assert list(folder.rglob("model.wrapper.cpp"))
    program = torch.export.load(folder / PROGRAM)
    assert program.example_inputs is not None
    assert torch.equal(program.module()(torch.ones(3, 4)), torch.full((3, 4), 3.0))
    again = run(sys.executable, "-I", script, cwd=tmp_path, environ={**environ, "TORCHINDUCTOR_VEC_ISA_OK": "1"})
    assert again.returncode == 1
    assert "error: broken on purpose" in again.output


def test_a_crash_in_the_compiler_names_what_reproduces_it(tiny: Path, environ: dict[str, str], tmp_path: Path):
    cache = os.fspath(tmp_path / "cache")
    ran = Builder(environ)(tiny, CXX=compiler(tmp_path, "kill -SEGV $PPID; sleep 9"), HATCH_AOTI_CACHE_DIR=cache)
    assert ran.returncode == 1
    assert "failed at stage `compile`: the worker process crashed (SIGSEGV)" in ran.output
    folder, script = folder_named_by(ran)
    assert script.is_file()
    assert list(folder.rglob("model.wrapper.cpp"))
    torch.export.load(folder / PROGRAM)


def test_a_failed_export_keeps_its_log_and_promises_no_more(tiny: Path, build: Builder):
    write_files(tiny, {"tiny/model.py": TINY_MODULE.replace("return x", "if x.sum() > 0: return x\n        return x")})
    ran = build(tiny)
    assert "failed at stage `export`" in ran.output
    assert "To reproduce it" not in ran.output
    [log] = re.findall(r"Full log: (\S+)", ran.output)
    assert "Could not guard on data-dependent expression" in Path(log).read_text(encoding="utf-8")


# --- What is kept ----------------------------------------------------------------------------------------------------


def test_only_the_latest_folder_of_a_model_is_kept_and_it_is_trimmed_when_it_is_old(tmp_path: Path):
    cache = Cache(tmp_path)
    for number in (1, 2):
        with cache.scratch("build") as scratch:
            folder = write_files(scratch / "model", {f"{number}.txt": "x" * 100})
            place = cache.keep_folder(folder, "package", "model")
    assert place == cache.debug_folder("package", "model")
    assert [path.name for path in place.iterdir()] == ["2.txt"]
    assert cache.trim(0) == 0, "it may be in use"
    os.utime(place, (0, 0))
    assert cache.trim(0) == 100
    assert not place.exists()


def test_texts_are_told_of_their_new_place_and_objects_go(tmp_path: Path):
    folder, place = tmp_path / "build-1" / "model" / "for-reading", Path("/cache/debug/model")
    temporary = folder.parent
    write_files(
        folder, {"a.sh": f"g++ {folder}/x.cpp -o {folder}/x.o", "x.o": "object", "b.py": f"cache = '{temporary}/i'"}
    )
    settle(folder, place)
    assert sorted(path.name for path in folder.iterdir()) == ["a.sh", "b.py"]
    assert (folder / "a.sh").read_text(encoding="utf-8") == f"g++ {place}/x.cpp -o {place}/x.o"
    assert (folder / "b.py").read_text(encoding="utf-8") == f"cache = '{place}/i'"
    assert relocated(f"{folder}/a.sh:1: error", folder, place) == f"{place}/a.sh:1: error"


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


class Swap(torch.nn.Module):
    def forward(self, pair: Pair) -> Pair:
        return Pair(pair.right, pair.left + 1)


def test_a_program_with_containers_that_torch_cannot_write_is_kept_with_tuples(tmp_path: Path):
    save_program(torch.export.export(Swap(), (Pair(torch.zeros(2), torch.ones(2)),), strict=False), tmp_path)
    left, right = torch.export.load(tmp_path / PROGRAM).module()((torch.zeros(2), torch.ones(2)))
    assert left.tolist() == right.tolist() == [1.0, 1.0]


def test_a_program_that_cannot_be_kept_does_not_get_in_the_way(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    save_program(object(), tmp_path)  # type: ignore[arg-type]
    assert "the program could not be kept" in capsys.readouterr().out
    assert not (tmp_path / PROGRAM).exists()


# --- PyTorch's own check of the inputs -------------------------------------------------------------------------------


@pytest.mark.slow
def test_aoti_runtime_check_inputs_means_for_load_what_it_means_in_pytorch(installed_example: Path):
    """It is read once per compiled object, and our own calls refuse by name with or without it."""
    code = """
        import os, torch
        from example_project._models import digits, load, ranker

        wrong = torch.zeros(2, 1, 8, 8, dtype=torch.float64)
        unchecked = load("digits")
        unchecked(wrong)
        os.environ["AOTI_RUNTIME_CHECK_INPUTS"] = "1"
        unchecked(wrong)
        print("not checked: it was read before")
        checked = load("ranker")
        print(checked(torch.zeros(1, 10)).shape)
        for values in (torch.zeros(1, 10, dtype=torch.float64), torch.zeros(1, 11)):
            for call in (checked, ranker):
                try:
                    call(values)
                except (RuntimeError, TypeError, ValueError) as error:
                    print(type(error).__name__, str(error).splitlines()[0])
    """
    lines = run_python(code, installed_example).check().output.splitlines()
    assert "not checked: it was read before" in lines
    assert "torch.Size([1, 1])" in lines
    kinds = [line.partition(" ")[0] for line in lines if re.match(r"\w+Error ", line)]
    assert kinds == ["RuntimeError", "TypeError", "RuntimeError", "ValueError"]
    assert [line for line in lines if "ranker: x must be float32[batch, 10]" in line]
