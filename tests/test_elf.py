"""What shared objects need, read from real objects that g++ links here and from damaged ones."""

import random
import struct
import subprocess
from pathlib import Path

import pytest

from hatch_aoti.artifact.shared_object import NeededVersion, read_object
from hatch_aoti.errors import AotiError

SOURCE = """
extern "C" int from_newer_glibc(int);
__asm__(".symver from_newer_glibc, future_call@GLIBC_2.97");
extern "C" int entry(int x) { return from_newer_glibc(x); }
"""


def run(*command, cwd):
    subprocess.run(command, cwd=cwd, check=True, capture_output=True)


@pytest.fixture(scope="module")
def link(tmp_path_factory):
    """Links one object against a stand-in for libc that already has a version of the future."""
    folder = tmp_path_factory.mktemp("objects")
    (folder / "stub.map").write_text("GLIBC_2.97 { global: future_call; local: *; };")
    (folder / "stub.c").write_text("int future_call(int x) { return x; }")
    stub = ["-Wl,--version-script=stub.map", "-Wl,-soname,libc.so.6"]
    run("gcc", "-shared", "-fPIC", "-nostdlib", *stub, "stub.c", "-o", "libstub.so", cwd=folder)
    (folder / "object.cpp").write_text(SOURCE)

    def build(name: str, *flags: str) -> Path:
        libraries = ["object.cpp", "-o", name, "-L.", "-lstub"]
        run("g++", "-shared", "-fPIC", "-nostdlib", "-Wl,-z,noexecstack", *flags, *libraries, cwd=folder)
        return folder / name

    return build


@pytest.fixture(scope="module")
def plain(link):
    return link("plain.so")


def test_versions_name_the_library_and_the_symbols_that_need_them(plain):
    needs = read_object(plain)
    assert needs.needed == ("libc.so.6",)
    assert needs.versions == (NeededVersion("libc.so.6", "GLIBC_2.97", ("future_call",)),)
    assert needs.machine in {"x86_64", "aarch64"}
    assert needs.runpath == ""
    assert needs.min_macos is None


def test_bytes_and_file_read_the_same(plain):
    assert read_object(plain.read_bytes()) == read_object(plain)


def test_executable_stack_is_seen(link, plain):  # pypa/auditwheel#634
    assert read_object(link("exec.so", "-Wl,-z,execstack")).executable_stack
    assert not read_object(plain).executable_stack


def test_stripped_and_runpath_are_seen(link, plain):
    needs = read_object(link("stripped.so", "-s", "-Wl,-rpath,$ORIGIN/lib"))
    assert needs.stripped
    assert needs.runpath == "$ORIGIN/lib"
    assert not read_object(plain).stripped


def test_an_object_with_cxx_code_needs_libstdcxx_by_version(tmp_path):
    (tmp_path / "a.cpp").write_text("#include <string>\nint f(const char* s) { return std::string(s).size() + 1; }")
    run("g++", "-shared", "-fPIC", "a.cpp", "-o", "a.so", cwd=tmp_path)
    versions = {need.version: need for need in read_object(tmp_path / "a.so").versions if need.symbols}
    assert any(version.startswith("GLIBCXX_3.4") for version in versions)
    assert {need.library for version, need in versions.items() if version.startswith("GLIBC_")} == {"libc.so.6"}


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"#!/bin/sh\n", b"\xca\xfe\xba\xbe" + bytes(64)])
def test_something_else_is_refused_by_name(content, tmp_path):
    path = tmp_path / "model.so"
    path.write_bytes(content)
    with pytest.raises(AotiError, match=r"model\.so is not a 64-bit ELF or Mach-O shared object"):
        read_object(path)


def test_an_object_file_is_refused_because_it_cannot_be_loaded(tmp_path):
    (tmp_path / "a.c").write_text("int x;")
    run("gcc", "-c", "a.c", "-o", "a.o", cwd=tmp_path)
    with pytest.raises(AotiError, match="not a 64-bit little-endian shared object, but ET_REL"):
        read_object(tmp_path / "a.o")


def test_a_missing_file_is_an_error_that_names_it(tmp_path):
    with pytest.raises(AotiError, match=r"cannot read .*gone\.so: No such file"):
        read_object(tmp_path / "gone.so")


def test_every_cut_is_an_error_and_not_a_crash(plain):
    data = plain.read_bytes()
    for length in range(0, len(data), 97):
        with pytest.raises(AotiError, match=r"cut\.so"):
            read_object(data[:length], name="cut.so")


def test_random_damage_is_read_or_refused_but_never_crashes(plain):
    data = plain.read_bytes()
    dice = random.Random(0)
    refused = 0
    for _ in range(300):
        damaged = bytearray(data)
        for _ in range(dice.randint(1, 40)):
            damaged[dice.randrange(len(damaged))] = dice.randrange(256)
        try:
            read_object(bytes(damaged))
        except AotiError:
            refused += 1
    assert refused


def test_a_version_table_that_does_not_end_is_refused(plain):
    from elftools.elf.elffile import ELFFile

    data = bytearray(plain.read_bytes())
    with plain.open("rb") as stream:
        section = ELFFile(stream).get_section_by_name(".gnu.version_r")
        assert section is not None
        start = section["sh_offset"]
    # vn_cnt is the second half-word of the first record; vna_next, its auxiliary's last word, is already 0
    struct.pack_into("<H", data, start + 2, 60000)
    with pytest.raises(AotiError, match="does not end"):
        read_object(bytes(data))


def macho(*, kind=6, cpu=0x0100000C, minos=(14, 0), commands=b""):
    build = struct.pack("<6I", 0x32, 24, 1, minos[0] << 16 | minos[1] << 8, 0, 0)
    name = b"@rpath/libtorch_cpu.dylib\0"
    name += bytes(-len(name) % 8)
    dylib = struct.pack("<6I", 0xC, 24 + len(name), 24, 0, 0, 0) + name
    body = build + dylib + commands
    return struct.pack("<8I", 0xFEEDFACF, cpu, 0, kind, 2 + bool(commands), len(body), 0, 0) + body


def test_macho_deployment_target_and_libraries_are_read():
    needs = read_object(macho(minos=(13, 3)))
    assert (needs.machine, needs.min_macos) == ("arm64", (13, 3))
    assert needs.needed == ("@rpath/libtorch_cpu.dylib",)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (macho()[:40], "damaged or cut off"),
        (macho(commands=bytes(8)), "a load command has no size"),
        (macho(kind=2), "not a shared object"),
    ],
)
def test_damaged_macho_is_refused(data, says):
    with pytest.raises(AotiError, match=says):
        read_object(data)
