"""Finding the C++ compiler: every way in which one can be named wrongly, or not answer, is one sentence."""

from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING

import pytest

from hatch_aoti.compiler import compilation as compiler
from hatch_aoti.compiler.toolchain import find_toolchain
from hatch_aoti.errors import CompileError

if TYPE_CHECKING:
    from pathlib import Path


def script(folder: Path, text: str) -> dict[str, str]:
    path = folder / "c++"
    path.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    path.chmod(0o755)
    return {"PATH": os.environ["PATH"], "CXX": os.fspath(path)}


def error_of(environ: dict[str, str], patience: float = 60.0) -> CompileError:
    with pytest.raises(CompileError) as caught:
        find_toolchain(environ, patience=patience)
    return caught.value


def test_a_compiler_that_does_not_answer_is_given_up_with_what_it_started(tmp_path: Path):
    environ = script(tmp_path, f"sleep 1000 & echo $! > {tmp_path}/child; sleep 1000")
    error = error_of(environ, patience=1)
    assert f"the C++ compiler `{environ['CXX']}` does not answer `--version` within 1 s" in str(error)
    child = (tmp_path / "child").read_text().strip()
    state = subprocess.run(["ps", "-o", "stat=", "-p", child], capture_output=True, text=True, check=False).stdout
    assert state.strip()[:1] in {"", "Z"}


def test_a_compiler_that_waits_for_input_gets_none(tmp_path: Path):
    assert find_toolchain(script(tmp_path, "cat; echo patient 1.0")).compiler == "patient 1.0"


def test_what_a_compiler_says_in_another_encoding_is_read(tmp_path: Path):
    # "für" in Latin-1
    assert find_toolchain(script(tmp_path, r"printf 'c++ f\374r alles 1.0\n'")).compiler == "c++ f\ufffdr alles 1.0"


def test_a_command_with_an_open_quote_is_refused_with_what_it_is():
    error = error_of({"CXX": "g++ 'x", "PATH": os.environ["PATH"]})
    assert str(error) == "the environment variable CXX is no command: `g++ 'x` has no closing quotation"
    assert "quote" in error.hint


def test_a_compiler_runs_in_the_environment_that_models_are_compiled_in(tmp_path: Path):
    environ = script(tmp_path, 'echo "version of ${CPATH-nobody} ${SECRET-nobody}"')
    assert find_toolchain(environ).compiler == "version of nobody nobody"
    assert find_toolchain({**environ, "CPATH": "/x"}).compiler == "version of /x nobody"


def test_variables_of_tools_are_recorded_by_hash_and_others_are_not(tmp_path: Path):
    environ = script(tmp_path, "echo 1")
    first = find_toolchain({**environ, "CPATH": "/secret/path", "OMP_NUM_THREADS": "3", "MODEL_VARIANT": "x"})
    assert sorted(first.record().environment) == ["CPATH", "OMP_NUM_THREADS"]
    assert "/secret/path" not in str(first.record())
    assert first.record() != find_toolchain({**environ, "CPATH": "/y", "OMP_NUM_THREADS": "3"}).record()


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        ("x.cpp:1: fatal error: error writing to /tmp/x.s: No space left on device", "no space left on the disk"),
        (
            "g++: fatal error: Killed signal terminated program cc1plus",
            "most likely because the machine ran out of memory",
        ),
        ("x.cpp:1:2: error: expected ;", "the C++ compiler rejects the code that AOTInductor generated"),
    ],
)
def test_a_full_disk_and_a_killed_compiler_are_no_errors_in_the_code(output: str, reason: str):
    class CppCompileError(RuntimeError):
        """As torch calls its own."""

    error = compiler._explain(CppCompileError(f"C++ compile error\n\nCommand:\ng++ x.cpp\n\nOutput:\n{output}"))
    assert reason in error.reason
    assert error.killed == ("Killed" in output)
