"""The same sources and the same toolchain give the same wheel, byte for byte, wherever and however it is built."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import os
import re
import shutil
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
import torch
from conftest import EXAMPLE, REPOSITORY, Builder, Projects, copy_project, make_project, once, run, write_files
from wheel_search import contents, find_traces

from hatch_aoti.artifact.cache import Cache
from hatch_aoti.compiler import compilation as compiler
from hatch_aoti.compiler.target import TORCH_PICKS, builder_cpu_features, resolve_targets
from hatch_aoti.wheel.diff import explain_difference

# Preloaded into every process of a build: another day, hour and second, and another host.
ELSEWHERE = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <string.h>
#include <sys/time.h>
#include <sys/utsname.h>
#include <time.h>

int clock_gettime(clockid_t clock, struct timespec *now) {
  int (*real)(clockid_t, struct timespec *) = dlsym(RTLD_NEXT, "clock_gettime");
  int status = real(clock, now);
  if (status == 0 && clock == CLOCK_REALTIME) now->tv_sec -= 100000;
  return status;
}
time_t time(time_t *result) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (result) *result = now.tv_sec;
  return now.tv_sec;
}
int gettimeofday(struct timeval *result, void *zone) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  result->tv_sec = now.tv_sec;
  result->tv_usec = now.tv_nsec / 1000;
  return 0;
}
int uname(struct utsname *result) {
  int (*real)(struct utsname *) = dlsym(RTLD_NEXT, "uname");
  int status = real(result);
  if (status == 0) strcpy(result->nodename, "host-nutmeg");
  return status;
}
int gethostname(char *name, size_t length) {
  strncpy(name, "host-nutmeg", length);
  return 0;
}
"""


def assert_same(left: Path, right: Path) -> None:
    """Compare two wheels by name and SHA-256; where they differ, say which file, member and section does."""
    hashes = [hashlib.sha256(wheel.read_bytes()).hexdigest() for wheel in (left, right)]
    assert left.name == right.name
    assert hashes[0] == hashes[1], explain_difference(left, right)


def reverse_settings(text: str) -> str:
    """Return a `pyproject.toml` whose tables under `[tool.aoti.models]`, and the keys in each, come in reverse order."""
    head, *tables = re.split(r"^(?=\[tool\.aoti\.models\.)", text, flags=re.MULTILINE)
    reversed_tables = []
    for table in reversed(tables):
        name, *keys = [line for line in table.splitlines() if line and not line.startswith("#")]
        reversed_tables.append("\n".join([name, *reversed(keys), ""]))
    return "\n".join([head.rstrip(), "", *reversed_tables])


# What Python prints of an object that has no better name: where it lies in the memory of one process.
ADDRESS = re.compile(rb"0x[0-9a-f]{6,}")


@dataclasses.dataclass(frozen=True)
class Elsewhere:
    """Builds under other conditions: their wheels, and the words that would betray where, when and by whom."""

    wheel: Path
    frozen: Path
    traces: list[str]


@pytest.fixture(scope="session")
def elsewhere(shared: Path, environ: dict[str, str]) -> Elsewhere:
    """Return the example and `frozen` as they come out of another build, once in a test run."""
    base = once(shared / "elsewhere", lambda base: build_elsewhere(base, environ))
    [wheel] = (base / "dist").glob("*.whl")
    [frozen] = (base / "dist-frozen").glob("*.whl")
    return Elsewhere(wheel, frozen, [str(base), "user-nutmeg", "host-nutmeg", "build-env-"])


def build_elsewhere(base: Path, environ: dict[str, str]) -> None:
    """Build the example in an isolated environment, through the sdist, with nothing as it is elsewhere in the tests.

    `frozen` is built likewise, straight from the tree.

    Isolation gives torch another path; constraints hold torch and hatchling to the versions of this environment.
    """
    places = {name: base / f"place-{name}" for name in ("home", "temp", "cache")}
    for place in places.values():
        place.mkdir(parents=True)
    project = copy_project(EXAMPLE, base / "a project, élsewhere")
    settings = project / "pyproject.toml"
    reordered = reverse_settings(settings.read_text(encoding="utf-8"))
    assert reordered.index("models.ranker") < reordered.index("models.digits")
    settings.write_text(reordered, encoding="utf-8")
    for path in [*project.rglob("*"), project]:
        os.utime(path, (1_000_000_000, 1_000_000_000))  # 2001

    wheelhouse = base / "wheelhouse"
    arguments: list[str | Path] = [
        "-m",
        "build",
        "--wheel",
        "--no-isolation",
        "--skip-dependency-check",
        "--outdir",
        wheelhouse,
    ]
    run(sys.executable, *arguments, REPOSITORY, environ=environ).check()
    constraints = base / "constraints.txt"
    constraints.write_text("".join(f"{name}=={metadata.version(name)}\n" for name in ("torch", "hatchling")))
    cached = run(sys.executable, "-m", "uv", "cache", "dir").check().output.strip()
    shim = base / "elsewhere.so"
    write_files(base, {"elsewhere.c": ELSEWHERE})
    run("gcc", "-shared", "-fPIC", "-o", shim, base / "elsewhere.c", "-ldl").check()

    other = {
        **environ,
        "HATCH_AOTI_CACHE_DIR": str(places["cache"]),  # cold, precompiled headers included
        "HATCH_AOTI_JOBS": "1",
        "HOME": str(places["home"]),
        "USER": "user-nutmeg",
        "LOGNAME": "user-nutmeg",
        "TMPDIR": str(places["temp"]),
        "LD_PRELOAD": str(shim),
        "TZ": "Pacific/Auckland",
        "LC_ALL": "POSIX",
        "PYTHONHASHSEED": "12345",
        "OMP_NUM_THREADS": "3",
        "UV_CACHE_DIR": cached,
        "UV_CONSTRAINT": str(constraints),
        "UV_FIND_LINKS": ",".join([*environ.get("PIP_FIND_LINKS", "").split(), str(wheelhouse)]),
    }
    other.pop("XDG_CACHE_HOME", None)
    check = "import os, socket, time; print(os.uname().nodename, socket.gethostname(), int(time.time()))"
    node, host, seconds = run(sys.executable, "-c", check, environ=other).check().output.split()
    assert node == host == "host-nutmeg"
    assert int(seconds) < shim.stat().st_mtime - 90000  # the kernel's clock, which is not faked

    built = _build_isolated(project, base / "dist", other)
    assert built.count("Creating isolated environment") == 2
    _build_isolated(make_project("frozen", base / "frozen, tôo"), base / "dist-frozen", other, "--wheel")
    assert not list(places["temp"].iterdir())


def _build_isolated(project: Path, target: Path, environ: dict[str, str], *options: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "build", "--installer", "uv", *options, "--outdir", target, project],
        env=environ,
        preexec_fn=_on_one_core_with_another_umask,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def _on_one_core_with_another_umask() -> None:
    os.umask(0o077)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


def test_two_builds_under_different_conditions_are_the_same_wheel(example_wheel: Path, elsewhere: Elsewhere):
    assert_same(example_wheel, elsewhere.wheel)


def test_nothing_in_the_wheel_says_where_and_by_whom_it_was_built(elsewhere: Elsewhere):
    assert find_traces(elsewhere.wheel, elsewhere.traces) == []


def test_frozen_models_are_the_same_under_different_conditions(project: Projects, build: Builder, elsewhere: Elsewhere):
    wheel = build.wheel(project("frozen"))
    texts = {name.rpartition(": ")[2]: data for name, data in contents(wheel)}
    fused = b"".join(data for name, data in texts.items() if name.endswith(".wrapper.cpp"))
    for operator in (b"_linear_pointwise", b"_convolution_pointwise", b"_attention_for_cpu", b"mkldnn_rnn_layer"):
        assert operator in fused
    assert_same(wheel, elsewhere.frozen)


def test_no_artifact_has_an_address_of_the_memory_of_its_builder(example_wheel: Path, elsewhere: Elsewhere):
    for wheel in (example_wheel, elsewhere.frozen):
        found = {name: ADDRESS.findall(data) for name, data in contents(wheel)}
        assert {name: addresses for name, addresses in found.items() if addresses} == {}


def test_a_build_from_the_cache_is_the_same_wheel(example_wheel: Path, tmp_path: Path, build: Builder):
    project = copy_project(EXAMPLE, tmp_path / "copy")
    ran = build(project, HATCH_AOTI_JOBS="2").check()
    assert ran.output.count("from the cache") == 2
    [wheel] = (project / "dist").glob("*.whl")
    assert_same(example_wheel, wheel)


# Each would give other code: another vector width, another instruction set, checks of every input.
TORCH_OPTIONS = {
    "TORCHINDUCTOR_CPP_SIMDLEN": "1",
    "TORCHINDUCTOR_CPP_MARCH": "x86-64",
    "AOT_INDUCTOR_COMPILE_WRAPPER_OPT_LEVEL": "O0",
    "AOTI_RUNTIME_CHECK_INPUTS": "1",
}


def test_threads_the_order_of_inputs_and_dims_and_options_in_the_environment_change_nothing(
    tmp_path: Path, project: Projects, build: Builder
):
    before = build.wheel(project("computed", into="first"), OMP_NUM_THREADS="1")
    second = project("computed", into="second")
    settings = second / "pyproject.toml"
    text = settings.read_text(encoding="utf-8")
    swapped = re.sub(r"\{ (x = .*\}), (shift = .*\}) \}", r"{ \2, \1 }", text)
    swapped = re.sub(r"\{ (n = .*\}), (m = .*\}) \}", r"{ \2, \1 }", swapped)
    assert "{ shift = " in swapped
    assert "{ m = " in swapped
    settings.write_text(swapped, encoding="utf-8")
    cache = tmp_path / "cache"  # cold but for the precompiled headers, which take long
    warm = Path(build.environ["HATCH_AOTI_CACHE_DIR"])
    shutil.copytree(warm / "headers", Cache(cache).root / "headers", copy_function=os.link, dirs_exist_ok=True)
    ran = build(second, HATCH_AOTI_CACHE_DIR=str(cache), OMP_NUM_THREADS="4", **TORCH_OPTIONS).check()
    assert "from the cache" not in ran.output
    [after] = (second / "dist").glob("*.whl")
    assert_same(before, after)


def test_kernels_are_tuned_for_the_baseline_and_not_for_the_caches_of_the_builder(tmp_path: Path):
    [target] = resolve_targets(
        [], system=os.uname().sysname, machine=os.uname().machine, builder_features=builder_cpu_features()
    )
    own = torch.cpu.get_capabilities()
    with compiler._patched_inductor(target, tmp_path, ()):
        assert torch.cpu.get_capabilities() == {**own, "l1d_cache_size": 32 * 1024, "l2_cache_size": 1024 * 1024}
    with compiler._patched_inductor(dataclasses.replace(target, vec_isa=TORCH_PICKS), tmp_path, ()):
        assert torch.cpu.get_capabilities() == own
    assert torch.cpu.get_capabilities() == own


# --- The explanation of a difference: it has to find one wherever it is.


def rewrite(wheel: Path, target: Path, changes: dict[str, bytes], **fields: object) -> Path:
    """Copy an archive with other contents of some members, and other `fields` of all."""
    with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(target, "w") as copy:
        for entry in source.infolist():
            for name, value in fields.items():
                setattr(entry, name, value)
            copy.writestr(entry, changes.get(entry.filename, source.read(entry.filename)))
    return target


def test_a_difference_is_traced_to_the_section_of_the_object_in_the_archive_in_the_wheel(
    example_wheel: Path, tmp_path: Path
):
    member = "example_project/ranker.pt2"
    inside = "ranker/data/aotinductor/model/model.wrapper.so"
    before = rewrite(example_wheel, tmp_path / "before.whl", {})
    with zipfile.ZipFile(example_wheel) as archive:
        package = tmp_path / "ranker.pt2"
        package.write_bytes(archive.read(member))
    with zipfile.ZipFile(package) as archive:
        changed = archive.read(inside).replace(b"aoti_runtime/model.h", b"aoti_runtime/MODEL.h")
        changed = changed.replace(b"aoti_runtime/utils.h", b"aoti_runtime/UTILS.h")
    after = rewrite(package, tmp_path / "changed.pt2", {inside: changed})
    wheel = rewrite(example_wheel, tmp_path / "after.whl", {member: after.read_bytes()})
    explanation = explain_difference(before, wheel)
    assert f"before.whl: member {member}: member {inside}: section .rodata" in explanation
    assert "UTILS" in explanation


def test_differences_of_text_times_permissions_and_order_are_explained(tmp_path: Path):
    def archive(name: str, members: dict[str, bytes], **fields: object) -> Path:
        plain = tmp_path / f"plain-{name}"
        with zipfile.ZipFile(plain, "w") as target:
            for member, data in members.items():
                target.writestr(zipfile.ZipInfo(member), data)
        return rewrite(plain, tmp_path / name, {}, **fields)

    members = {"a.py": b"x = 1\ny = 2\n", "b.bin": b"\xff\x00same"}
    first = archive("first.whl", members)
    assert explain_difference(first, archive("same.whl", members)) == ""
    other = {"b.bin": b"\xff\x01same", "a.py": b"x = 1\ny = 3\n", "c.py": b""}
    explanation = explain_difference(first, archive("other.whl", other)).splitlines()
    assert "first.whl: member c.py: is only in the second" in explanation
    assert "first.whl: the archive: the members are in another order" in explanation
    assert "first.whl: member a.py: -y = 2" in explanation
    assert "first.whl: member a.py: +y = 3" in explanation
    assert any(line.startswith("first.whl: member b.bin: from byte 1 on: ") for line in explanation)
    later = explain_difference(first, archive("later.whl", members, date_time=(2024, 2, 29, 1, 2, 4)))
    assert "member a.py: date_time is (1980, 1, 1, 0, 0, 0) and (2024, 2, 29, 1, 2, 4)" in later
    strict = explain_difference(first, archive("strict.whl", members, external_attr=0o755 << 16))
    assert "member b.bin: external_attr is" in strict


def test_a_difference_between_the_parts_of_a_container_is_not_overlooked(tmp_path: Path):
    def archive(name: str, comment: bytes) -> Path:
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w") as target:
            target.writestr(zipfile.ZipInfo("a"), b"a")
            target.comment = comment
        (tmp_path / name).write_bytes(buffer.getvalue())
        return tmp_path / name

    assert "from byte" in explain_difference(archive("one.whl", b"1"), archive("two.whl", b"2"))
