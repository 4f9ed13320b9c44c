"""What workers see of the environment: what they need, what the project lets through, and nothing else."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
import zipfile
from typing import TYPE_CHECKING

import pytest
from conftest import TINY_MODULE, Builder, Projects, edit, run, write_files
from test_reproducibility import assert_same

from hatch_aoti.compiler.toolchain import find_toolchain
from hatch_aoti.settings.environment import compose, is_settled, tool_variables

if TYPE_CHECKING:
    from pathlib import Path

# Read by the compiler and its tools. Each of these values ends a compilation that sees it (see `traps`).
TRAPS = {
    "CPATH": "{traps}/include",
    "C_INCLUDE_PATH": "{traps}/include",
    "CPLUS_INCLUDE_PATH": "{traps}/include",
    "LIBRARY_PATH": "{traps}/lib",
    "COMPILER_PATH": "{traps}/bin/",
    "GCC_EXEC_PREFIX": "{traps}/bin/",
    "GNUTARGET": "no-such-target",
}
# These change what is computed, folded or packed, or what is compiled, for whoever sees them.
CHANGING = {
    "LDEMULATION": "no_such_emulation",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
    "DNNL_MAX_CPU_ISA": "SSE41",
    "ONEDNN_DEFAULT_FPMATH_MODE": "BF16",
    "ATEN_CPU_CAPABILITY": "default",
    "MKL_CBWR": "COMPATIBLE",
    "MKL_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "3",
    "OMP_DYNAMIC": "true",
    "KMP_AFFINITY": "disabled",
    "GOMP_CPU_AFFINITY": "0",
    "LD_RUN_PATH": "/opt/nutmeg/lib",
    "SUNPRO_DEPENDENCIES": "{traps}/dependencies x",
    "DEPENDENCIES_OUTPUT": "{traps}/dependencies x",
    "TORCHINDUCTOR_CPP_SIMDLEN": "1",
    "TORCHINDUCTOR_FREEZING": "0",
    "AOT_INDUCTOR_COMPILE_WRAPPER_OPT_LEVEL": "O0",
    "TORCH_FORCE_WEIGHTS_ONLY_LOAD": "1",
    "PYTHONOPTIMIZE": "2",
}
# These change nothing in most programs, and must not here.
HARMLESS = {
    "MALLOC_PERTURB_": "165",
    "GLIBC_TUNABLES": "glibc.malloc.perturb=90",
    "PYTHONHASHSEED": "4711",
    "SOURCE_DATE_EPOCH": "1600000000",
    "LANG": "de_DE.UTF-8",
    "LC_MESSAGES": "de_DE.UTF-8",
    "TZ": "Asia/Kathmandu",
    "GCC_COLORS": "error=01;31",
    "COLUMNS": "20",
    "CFLAGS": "-O0",
    "CXXFLAGS": "-O0 -march=native",
    "CPPFLAGS": "-DNUTMEG",
    "LDFLAGS": "-Wl,-rpath,/opt/nutmeg",
    "HOSTNAME": "host-nutmeg",
    "USER": "user-nutmeg",
}
# hatchling, which packs the wheel in the build's own process, takes this one for the dates in it: see below.
OF_HATCHLING = {"SOURCE_DATE_EPOCH"}


@pytest.fixture
def traps(tmp_path: Path) -> Path:
    """Return a folder of headers, libraries and programs that end whatever takes them for the system's."""
    folder = tmp_path / "traps"
    headers = ("algorithm", "cmath", "cstdint", "math.h", "stdint.h", "string", "vector")
    write_files(folder, {f"include/{name}": "#error from the builder's environment\n" for name in headers})
    write_files(folder, {f"lib/lib{name}.so": "nonsense\n" for name in ("gomp", "m", "c", "stdc++", "gcc_s", "torch")})
    for name in ("as", "ld", "collect2", "cc1plus"):
        write_files(folder, {f"bin/{name}": "#!/bin/sh\nexit 1\n"})
        (folder / "bin" / name).chmod(0o755)
    return folder


def test_a_build_under_forty_variables_is_the_same_wheel(
    tmp_path: Path, project: Projects, build: Builder, traps: Path
):
    """Each of them is set in the second build at once, with nothing in the cache but precompiled headers.

    That they matter where they are seen is what `test_the_traps_work` shows for the compiler's, and the test below, of
    the key and the manifest, provides for with all others.
    """
    variables = {name: value.format(traps=traps) for name, value in {**TRAPS, **CHANGING, **HARMLESS}.items()}
    assert len(variables) >= 30
    fixed = {name: value for name, value in variables.items() if name in OF_HATCHLING}
    before = build.wheel(project("computed", into="first"), **fixed)
    cache = tmp_path / "cache"
    of_results = shutil.ignore_patterns("artifacts", "notes", "scratch", "debug")
    shutil.copytree(build.environ["HATCH_AOTI_CACHE_DIR"], cache, ignore=of_results)
    second = project("computed", into="second")
    ran = build(second, **variables, HATCH_AOTI_CACHE_DIR=os.fspath(cache)).check()
    assert "from the cache" not in ran.output
    [after] = (second / "dist").glob("*.whl")
    assert_same(before, after)
    assert not (traps / "dependencies").exists()


@pytest.mark.parametrize("name", sorted(TRAPS))
def test_the_traps_work(name: str, traps: Path, tmp_path: Path):
    write_files(tmp_path, {"a.cpp": "#include <vector>\nint f() { return std::vector<int>(3).size(); }\n"})
    command: list[str | Path] = ["g++", "-shared", "-fPIC", "-fopenmp", "-o", tmp_path / "a.so", tmp_path / "a.cpp"]
    if name == "C_INCLUDE_PATH":  # not for C++
        command[:1], command[-1:] = ["gcc"], [write_files(tmp_path, {"a.c": "#include <math.h>\n"}) / "a.c"]
    run(*command, environ=dict(os.environ)).check()
    assert run(*command, environ={**os.environ, name: TRAPS[name].format(traps=traps)}).returncode != 0


@pytest.mark.parametrize("name", sorted({**TRAPS, **CHANGING, **HARMLESS}))
def test_what_is_let_through_is_in_every_key_and_the_manifest_if_a_tool_reads_it(name: str):
    value = {**TRAPS, **CHANGING, **HARMLESS}[name]
    environ = {"PATH": os.environ["PATH"], name: value}
    held = compose(environ)
    assert held.variables.get(name) != value or name == "USER"
    passed = compose(environ, [name])
    if is_settled(name):  # the setting refuses it, and a glob that matches it does not
        assert passed == held
    elif name in {"LANG", "LC_MESSAGES", "COLUMNS", "HOSTNAME", "USER"}:  # LC_ALL wins; no tool reads the others
        assert tool_variables(passed.variables) == {}
    else:
        digest = hashlib.sha256(value.encode()).hexdigest()
        assert passed.variables[name] == value
        assert tool_variables(passed.variables) == {name: digest}
        if name not in TRAPS:
            assert find_toolchain(passed.variables).record().environment == {name: digest}


def test_workers_get_what_they_need_and_names_of_what_they_do_not_get():
    environ = {
        "PATH": "/bin", "HOME": "/root", "https_proxy": "http://proxy", "LD_PRELOAD": "x.so", "CXX": "g++-12",
        "HF_TOKEN": "hf_secret", "CUDA_VISIBLE_DEVICES": "1", "MODEL_VARIANT": "large", "MODEL_TOKEN": "secret",
        "TORCH_LOGS": "all", "TORCHINDUCTOR_FREEZING": "1", "HATCH_AOTI_JOBS": "2", "CPATH": "/include", "TERM": "vt",
        "TMPDIR": "/var/tmp", "LC_ALL": "de_DE.UTF-8",
    }  # fmt: skip
    found = compose(environ, ["MODEL_V*"])
    assert found.held_back == {"MODEL_TOKEN", "CPATH", "TERM"}
    assert found.variables["MODEL_VARIANT"] == "large"
    assert found.variables["LC_ALL"] == "C.UTF-8"
    assert "HATCH_AOTI_JOBS" not in found.variables
    assert found.for_job(temporary="/t", inductor="/i")["TMPDIR"] == "/t"
    assert compose(environ, ["TORCH*"]).variables == compose(environ).variables
    assert found.advice(["MODEL_VARIANT", "TERM", "UNSET"]) == ""
    assert '`pass-environment = ["MODEL_TOKEN"]`' in found.advice(["MODEL_TOKEN", "UNSET"])
    assert "does not see `CPATH`" in found.advice_for_the_compiler()
    assert compose({"MODEL_TOKEN": "x"}).advice_for_the_compiler() == ""


def test_a_variable_that_is_let_through_is_compiled_for_anew_and_recorded(tiny: Path, build: Builder):
    """It is read by the model, too, which another one that is held back is not without a word."""
    model = TINY_MODULE.replace("x * 2", "x * FACTOR")
    model = model.replace("import torch", "import os, torch\n\nFACTOR = int(os.environ['OMP_NUM_THREADS'])\n", 1)
    model = model.replace("int(", "os.getenv('MODEL_VARIANT', 0) or int(").replace("FACTOR\n", "FACTOR\n\n", 1)
    write_files(tiny, {"tiny/model.py": model})
    edit(tiny, "[tool.aoti.models.scale]", '[tool.aoti]\npass-environment = ["OMP_*"]\n\n[tool.aoti.models.scale]')
    variables = {"OMP_NUM_THREADS": "2", "MODEL_VARIANT": "5", "CPATH": "/nowhere"}
    for origin in ("compiled", "from the cache"):
        ran = build(tiny, **variables).check()
        assert origin in ran.output
        [said] = [line for line in ran.output.splitlines() if "looks up" in line]
        assert said.startswith("aoti: scale: the model looks up `MODEL_VARIANT` in the environment, where it is set")
    [wheel] = (tiny / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        manifest = json.loads(archive.read("tiny/_models.json"))
    [artifact] = manifest["models"]["scale"]["artifacts"]
    assert artifact["toolchain"]["environment"] == {"OMP_NUM_THREADS": hashlib.sha256(b"2").hexdigest()}


BAD = """
[tool.aoti.models.{name}]
model = "tiny.{name}:Scale"
inputs = {{ x = {{ shape = [4] }} }}
"""


def test_models_that_never_end_or_miss_a_variable_are_named_in_a_project_with_a_json_py(
    tiny: Path, environ: dict[str, str]
):
    """The frontend is one that has the project's folder first on its path, and has imported what it needs before."""
    write_files(tiny, {f"{name}.py": "raise RuntimeError('mine')\n" for name in ("json", "colorsys", "types")})
    write_files(
        tiny,
        {
            "tiny/json.py": "ours = True\n",
            "tiny/model.py": "import time\nimport tiny.json\nassert tiny.json.ours\ntime.sleep(10000)\n",
            "tiny/needs.py": "import colorsys, json, os\nassert json.loads('1')\nos.environ['MODEL_VARIANT']\n",
        },
    )
    edit(tiny, "[tool.aoti.models.scale]", BAD.format(name="needs") + "\n[tool.aoti.models.scale]")
    code = "import hatchling.build as backend, colorsys, json, sys; sys.path.insert(0, ''); backend.build_wheel('dist')"
    variables = {"MODEL_VARIANT": "x", "HATCH_AOTI_BUILD_TIMEOUT": "20", "HATCH_AOTI_JOBS": "2"}
    ran = run(sys.executable, "-P", "-c", code, cwd=tiny, environ={**environ, **variables})
    assert ran.returncode == 1
    text = ran.output.replace("\n", " ")
    assert "model `scale` failed at stage `import`: it was stopped after 20 s, the `build-timeout`" in text
    assert "model `needs` failed at stage `import`: importing `tiny.needs` raises KeyError: 'MODEL_VARIANT'" in text
    assert re.search(r"What to do: make .* work; the model looks up `MODEL_VARIANT` in the environment", text)
    assert "RuntimeError" not in text


def test_a_disk_that_is_full_while_compiling_is_named(tiny: Path, environ: dict[str, str], tmp_path: Path):
    cache = tmp_path / "cache"
    cache.mkdir()
    mounted = 'mount -t tmpfs -o size=3m,mode=0700 tmpfs "$0" && exec "$@"'
    for options in (["-m"], ["-rm"]):
        prefix = ["unshare", *options, "sh", "-c", mounted, os.fspath(cache)]
        if shutil.which("unshare") and run(*prefix, "true").returncode == 0:
            break
    else:
        pytest.skip("no file system of a given size can be mounted here")
    code = "import hatchling.build as backend; backend.build_wheel('dist')"
    ran = run(
        *prefix, sys.executable, "-c", code, cwd=tiny, environ={**environ, "HATCH_AOTI_CACHE_DIR": os.fspath(cache)}
    )
    assert ran.returncode == 1
    assert "there is no space left on the disk" in ran.output
    assert "rejects the code" not in ran.output
    assert "Traceback" not in ran.output
