"""Checking a release: `verify`, `reproduce`, the bill of materials, and wheels that were made to harm who looks."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import shutil
import stat
import struct
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from conftest import Builder, Ran, run, write_files
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

import hatch_aoti
from hatch_aoti.artifact.shared_object import _bounded, read_object
from hatch_aoti.artifact.untrusted import is_safe_name, printable
from hatch_aoti.errors import AotiError
from hatch_aoti.wheel.check import check_wheel
from hatch_aoti.wheel.diff import compare_wheels
from hatch_aoti.wheel.inspection import inspect_path
from hatch_aoti.wheel.manifest import parse_manifest
from hatch_aoti.wheel.rebuild import find_source, read_release, reproduce
from hatch_aoti.wheel.sbom import render_sbom

if TYPE_CHECKING:
    from collections.abc import Callable

INFO = "example_project-0.1.0.dist-info"
RECORD = f"{INFO}/RECORD"
MANIFEST = "example_project/_models.json"
RANKER = "example_project/ranker.pt2"
Members = dict[str, bytes]


def command(*arguments: str | Path, environ: dict[str, str] | None = None) -> Ran:
    return run(sys.executable, "-m", "hatch_aoti", *arguments, environ=environ)


def members_of(wheel: Path) -> Members:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def write_wheel(path: Path, members: Members) -> Path:
    path.parent.mkdir(exist_ok=True)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            info = zipfile.ZipInfo(name)
            info.external_attr = (stat.S_IFREG | 0o644) << 16
            archive.writestr(info, data, zipfile.ZIP_DEFLATED)
    return path


def record_again(members: Members) -> None:
    """Write the RECORD that fits, as somebody who changes a wheel on purpose would."""
    lines = [f"{RECORD},,"]
    for name, data in members.items():
        if name != RECORD:
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            lines.append(f"{name},sha256={digest},{len(data)}")
    members[RECORD] = "\n".join(lines).encode()


def edit_manifest(members: Members, edit: Callable[[dict[str, Any]], None]) -> None:
    manifest = json.loads(members[MANIFEST])
    edit(manifest)
    members[MANIFEST] = json.dumps(manifest, indent=2, sort_keys=True).encode()
    record_again(members)


@pytest.fixture
def members(example_wheel: Path) -> Members:
    return members_of(example_wheel)


def write_as(example_wheel: Path, tmp_path: Path, members: Members, name: str = "") -> Path:
    return write_wheel(tmp_path / "changed" / (name or example_wheel.name), members)


# --- verify ---------------------------------------------------------------------------------------------------------


def test_a_wheel_as_it_was_built_is_sound(example_wheel: Path):
    said = command("verify", example_wheel).check().output
    assert "no problems" in said
    report = json.loads(command("verify", example_wheel, "--json").check().output)
    assert report["problems"] == []
    assert {"_models.py", "digits.pt2", "ranker.pt2"} < {file["name"] for file in report["files"]}
    assert {file["state"] for file in report["files"]} == {"as recorded"}
    with zipfile.ZipFile(example_wheel) as archive:
        assert report["listed"] == len(archive.namelist()) - 1  # all but RECORD


def flip(name: str, *, record: bool = False) -> Callable[[Members], None]:
    """Return a change of one bit in the middle of a file, and of its hash in RECORD if `record`."""

    def change(members: Members) -> None:
        data = bytearray(members[name])
        data[len(data) // 2] ^= 1
        members[name] = bytes(data)
        if record:
            record_again(members)

    return change


def other_id(members: Members) -> None:
    """Change the id in an archive, and every record of the archive."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(members[RANKER])) as source, zipfile.ZipFile(buffer, "w") as target:
        for info in source.infolist():
            data = source.read(info)
            target.writestr(info, b"1" * 40 if info.filename.endswith("serialization_id") else data)
    members[RANKER] = buffer.getvalue()

    def describe(manifest: dict[str, Any]) -> None:
        [artifact] = manifest["models"]["ranker"]["artifacts"]
        artifact["sha256"] = hashlib.sha256(members[RANKER]).hexdigest()
        artifact["bytes"] = len(members[RANKER])

    edit_manifest(members, describe)


def other_size(members: Members) -> None:
    size = len(members["example_project/samples.json"])
    old = f",{size}\n".encode()
    assert members[RECORD].count(old) == 1
    members[RECORD] = members[RECORD].replace(old, b",7\n")


def in_record(old: bytes, new: bytes) -> Callable[[Members], None]:
    def change(members: Members) -> None:
        assert old in members[RECORD]
        members[RECORD] = members[RECORD].replace(old, new, 1)

    return change


def in_file(name: str, old: bytes, new: bytes) -> Callable[[Members], None]:
    def change(members: Members) -> None:
        assert old in members[name]
        members[name] = members[name].replace(old, new, 1)
        record_again(members)

    return change


def adds(name: str, *, record: bool) -> Callable[[Members], None]:
    def change(members: Members) -> None:
        members[name] = b"x"
        if record:
            record_again(members)

    return change


def manifest_says(key: str, value: Any) -> Callable[[Members], None]:
    return lambda members: edit_manifest(members, lambda manifest: manifest.update({key: value}))


UNSOUND = {
    "a flipped bit": (flip("example_project/digits.py"), "example_project/digits.py: differs from its hash in RECORD"),
    "a flipped bit that RECORD knows of": (
        flip("example_project/_models.py", record=True),
        "example_project/_models.py: is not the file that _models.json describes",
    ),
    "an archive with another id": (
        other_id,
        "example_project/ranker.pt2: it is not as hatch-aoti writes archives, or its id is not that of its contents",
    ),
    "a file that is not listed": (adds("evil.pth", record=False), "evil.pth: is not in RECORD"),
    "a model that the manifest does not know": (
        adds("example_project/other.pt2", record=True),
        "example_project/other.pt2: is not in _models.json",
    ),
    "a missing file": (
        lambda members: members.pop("example_project/ranker.pt2"),
        "example_project/ranker.pt2: RECORD lists it, and it is not in the wheel",
    ),
    "a missing model": (
        lambda members: (members.pop("example_project/ranker.pt2"), record_again(members)),  # type: ignore[func-returns-value]
        "example_project/ranker.pt2: is in _models.json, and not in the wheel",
    ),
    "a file that is listed twice": (
        lambda members: members.update({RECORD: members[RECORD] + b"\nexample_project/__init__.py,,\n"}),
        "example_project/__init__.py: RECORD lists it twice",
    ),
    "a weak hash": (in_record(b"sha256=", b"md5="), "RECORD has no SHA-256, or better, of it, but 'md5="),
    "a wrong size": (other_size, "bytes, and RECORD says '7'"),
    "a line that is none": (in_record(b"\n", b"\nnothing\n"), "a line has 1 fields rather than 3"),
    "no RECORD": (lambda members: members.pop(RECORD), "it has no RECORD"),
    "another version inside": (in_file(f"{INFO}/METADATA", b"Version: 0.1.0", b"Version: 0.1.1"), "METADATA: is of"),
    "another tag inside": (in_file(f"{INFO}/WHEEL", b"Tag: py3", b"Tag: py2"), "WHEEL: has the tags py2-none-"),
    "another platform inside": (manifest_says("platform_tag", "any"), "_models.json: is for any, and the file's name"),
    "a debug mark in one place": (manifest_says("debug", {"A": "1"}), "do not say the same about a debug build"),
    "a manifest of nothing": (manifest_says("files", None), "is not a manifest of hatch-aoti, or it is damaged"),
}  # fmt: skip


@pytest.mark.parametrize(("harm", "message"), UNSOUND.values(), ids=UNSOUND.keys())
def test_what_is_not_as_recorded_is_named(
    harm: Callable[[Members], None], message: str, members: Members, example_wheel: Path, tmp_path: Path
):
    harm(members)
    report = check_wheel(write_as(example_wheel, tmp_path, members))
    assert any(message in problem for problem in report.problems), report.problems


def test_problems_end_with_status_1(members: Members, example_wheel: Path, tmp_path: Path):
    adds("a\N{ESCAPE}[31m.py", record=False)(members)
    ran = command("verify", write_as(example_wheel, tmp_path, members))
    assert ran.returncode == 1
    assert r"UNSOUND: a\x1b[31m.py" in ran.output
    assert "\N{ESCAPE}" not in ran.output


def test_every_damaged_member_is_named(example_wheel: Path, tmp_path: Path):
    data = bytearray(example_wheel.read_bytes())
    damaged = ["example_project/digits.pt2", "example_project/samples.json"]
    with zipfile.ZipFile(example_wheel) as archive:
        for name in damaged:
            info = archive.getinfo(name)
            data[info.header_offset + 30 + len(name) + info.compress_size // 2] ^= 0xFF
    wheel = tmp_path / example_wheel.name
    wheel.write_bytes(data)
    problems = check_wheel(wheel).problems
    assert sorted(item.partition(":")[0] for item in problems if ": is damaged" in item) == damaged


@pytest.mark.parametrize(
    "name", ["other-0.1.0-py3-none-any.whl", "example_project-0.2.0-py3-none-any.whl", "example_project.whl"]
)
def test_a_renamed_wheel_is_noticed(name: str, example_wheel: Path, tmp_path: Path):
    assert check_wheel(Path(shutil.copy(example_wheel, tmp_path / name))).problems


def test_bytes_around_the_archive_are_noticed(example_wheel: Path, tmp_path: Path):
    changed = tmp_path / example_wheel.name
    changed.write_bytes(b"#!/bin/sh\n" + example_wheel.read_bytes())
    assert "it has bytes in front of its first member" in check_wheel(changed).problems
    with zipfile.ZipFile(shutil.copy(example_wheel, changed), "a") as archive:
        archive.comment = b"more"
    assert "it has bytes after its last member" in check_wheel(changed).problems


# --- What strangers may send ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "../x", "a/../b", "/etc/passwd", "a//b", "a/", "./a", "a\\b", "C:x", "a\0b", "a\N{ESCAPE}[2J",
     "a\udc80", "a\N{RIGHT-TO-LEFT OVERRIDE}b", "a\nb"],
)  # fmt: skip
def test_names_that_lead_elsewhere_or_cannot_be_shown_are_unsafe(name: str):
    assert not is_safe_name(name)
    assert printable(name).isprintable()
    printable(name).encode()


def entry(name: str, **fields: Any) -> Callable[[Path], None]:
    """Return a change of a wheel that adds a member with some field of its own."""

    def change(path: Path) -> None:
        with zipfile.ZipFile(path, "a") as archive:
            info = zipfile.ZipInfo("placeholder")
            archive.writestr(info, "content")
            info.filename = name
            for field, value in fields.items():
                setattr(info, field, value)

    return change


def twice(path: Path) -> None:
    with pytest.warns(UserWarning, match="Duplicate name"), zipfile.ZipFile(path, "a") as archive:
        archive.writestr(MANIFEST, "{}")


HOSTILE_MEMBERS = {
    "a way up": entry("../escaped"),
    "an absolute name": entry("/tmp/escaped"),
    "a terminal's order": entry("a\N{ESCAPE}]0;owned\a"),
    "a link": entry("link", create_system=3, external_attr=(stat.S_IFLNK | 0o777) << 16),
    "a pipe": entry("pipe", create_system=3, external_attr=(stat.S_IFIFO | 0o666) << 16),
    "a bomb": entry("zeros", file_size=1 << 40),
    "an encrypted member": entry("secret", flag_bits=1),
    "a compression that wheels do not have": entry("x.bz2", compress_type=zipfile.ZIP_BZIP2),
}


@pytest.mark.parametrize("harm", HOSTILE_MEMBERS.values(), ids=HOSTILE_MEMBERS.keys())
def test_members_that_may_not_be_unpacked_are_refused(
    harm: Callable[[Path], None], example_wheel: Path, tmp_path: Path
):
    wheel = Path(shutil.copy(example_wheel, tmp_path / example_wheel.name))
    harm(wheel)
    for read in (inspect_path, read_release):
        with pytest.raises(AotiError) as caught:
            read(wheel)
        assert printable(caught.value, lines=True) == str(caught.value)
    assert check_wheel(wheel).problems
    assert list(tmp_path.iterdir()) == [wheel]


def test_a_member_that_is_there_twice_is_refused(example_wheel: Path, tmp_path: Path):
    wheel = Path(shutil.copy(example_wheel, tmp_path / example_wheel.name))
    twice(wheel)
    assert any("appears twice" in problem for problem in check_wheel(wheel).problems)
    with pytest.raises(AotiError, match="appears twice"):
        inspect_path(wheel)


MANIFESTS = {
    "no end to the nesting": (b"[" * 100_000, "nested too deeply"),
    "a key twice": (b'{"schema": 1, "schema": 1}', "a key comes twice"),
    "no number": (b'{"schema": NaN}', "NaN is no number"),
    "a number without end": (b'{"schema": ' + b"1" * 5000 + b"}", "limit"),
    "no text": (b"\xff\xfe", "can't decode"),
    "too much": (b" " * (17 << 20), "more than"),
    "a list": (b"[]", "it must be an object, not []"),
    "an order to the terminal": (b'{"schema": "\\u001b[31m"}', r"\x1b[31m"),
}


@pytest.mark.parametrize(("content", "message"), MANIFESTS.values(), ids=MANIFESTS.keys())
def test_a_manifest_may_be_anything(
    content: bytes, message: str, members: Members, example_wheel: Path, tmp_path: Path
):
    members[MANIFEST] = content
    wheel = write_as(example_wheel, tmp_path, members)
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "_models.json").write_bytes(content)
    for path in (wheel, folder):
        with pytest.raises(AotiError) as caught:
            inspect_path(path)
        assert message in str(caught.value)
        assert str(caught.value).isprintable()


@pytest.mark.parametrize("name", ["a\0b", "\udc80", "..", "../x", "a\N{ESCAPE}[2J"])
def test_file_names_of_a_manifest_are_checked(name: str, members: Members, example_wheel: Path, tmp_path: Path):
    def rename(manifest: dict[str, Any]) -> None:
        manifest["models"]["digits"]["artifacts"][0]["file"] = name

    edit_manifest(members, rename)
    wheel = write_as(example_wheel, tmp_path, members)
    with pytest.raises(AotiError, match="is no file name"):
        inspect_path(wheel)
    assert check_wheel(wheel).problems


def test_orders_to_the_terminal_in_a_manifest_are_shown(members: Members, example_wheel: Path, tmp_path: Path):
    attack = "\N{ESCAPE}[2J\rfine \N{RIGHT-TO-LEFT OVERRIDE}"

    def edit(manifest: dict[str, Any]) -> None:
        manifest["generator"]["name"] = manifest["package"] = manifest["debug"] = attack
        manifest["debug"] = {attack: attack}
        model = manifest["models"].pop("ranker")
        model["model"] = model["device"] = attack
        manifest["models"][attack] = model
        model["artifacts"][0]["toolchain"]["compiler"] = attack

    edit_manifest(members, edit)
    ran = command("inspect", write_as(example_wheel, tmp_path, members))
    assert ran.output.count(r"\x1b[2J\rfine \u202e") >= 6
    assert printable(ran.output, lines=True) == ran.output


def test_what_is_no_plain_file_is_not_waited_for(tmp_path: Path):
    os.mkfifo(tmp_path / "_models.json")
    os.mkfifo(tmp_path / "x.pt2")
    os.mkfifo(tmp_path / "x-1-py3-none-any.whl")
    for read in (inspect_path, check_wheel):
        with pytest.raises(AotiError, match="not a plain file"):
            read(tmp_path / "x-1-py3-none-any.whl")
    for path in (tmp_path, tmp_path / "x.pt2"):
        with pytest.raises(AotiError, match="not a plain file"):
            inspect_path(path)
    (tmp_path / "y" / "_models.json").mkdir(parents=True)
    with pytest.raises(AotiError, match="it is a directory"):
        inspect_path(tmp_path / "y")


def elf_header(*, section_entry: int, sections: int, first_size: int) -> bytes:
    header = b"\x7fELF\x02\x01\x01" + bytes(9)
    header += struct.pack("<HHIQQQIHHHHHH", 3, 62, 1, 0, 0, 64, 0, 64, 56, 0, section_entry, sections, 0)
    return header + struct.pack("<IIQQQQIIQQ", 0, 0, 0, 0, 0, first_size, 0, 0, 0, 0)


def test_tables_of_an_object_without_end_are_refused_at_once():
    for entry_size, sections, first in ((64, 0, 1 << 60), (64, 60_000, 0), (65, 1, 0), (0, 0, 1 << 60)):
        endless = elf_header(section_entry=entry_size, sections=sections, first_size=first)
        with pytest.raises(AotiError, match=r"tables are larger than the file|e_shentsize"):
            read_object(endless)


def test_names_of_libraries_cannot_take_all_memory():
    """Each entry of a dynamic section may name the whole table of strings."""

    class Tag:
        needed = "x" * 4000

    with pytest.raises(ValueError, match="names of the libraries do not end"):
        list(_bounded(Tag() for _ in range(1000)))
    assert len(list(_bounded([Tag()] * 100))) == 100


# --- What differs ---------------------------------------------------------------------------------------------------


def test_another_key_of_the_manifest_is_named(members: Members, example_wheel: Path, tmp_path: Path):
    before = write_wheel(tmp_path / "before.whl", members)
    manifest_says("python", "2.7")(members)
    found = compare_wheels(before, write_wheel(tmp_path / "after.whl", members))
    details = {item.name: item.details for item in found if item.state == "differs"}
    assert details.keys() >= {MANIFEST, RECORD}
    assert details[MANIFEST] == (f"python is '{sys.version_info[0]}.{sys.version_info[1]}' and '2.7'",)


def test_another_compression_is_called_that(members: Members, tmp_path: Path):
    before = write_wheel(tmp_path / "before.whl", members)
    after = tmp_path / "after.whl"
    with zipfile.ZipFile(before) as source, zipfile.ZipFile(after, "w") as target:
        for info in source.infolist():
            data = source.read(info)
            target.writestr(info, data, zipfile.ZIP_DEFLATED, compresslevel=1)
    [found] = compare_wheels(before, after)
    assert found.name == ""
    assert "by another zlib" in found.details[0]


# --- reproduce ------------------------------------------------------------------------------------------------------

BACKEND = """
import os, shutil, sys
from pathlib import Path

def get_requires_for_build_wheel(config_settings=None):
    return []

def build_wheel(directory, config_settings=None, metadata_directory=None):
    for name, value in sorted(os.environ.items()):
        if name.startswith(("HATCH_AOTI_", "SOURCE_DATE", "TORCH", "PIP_CONSTRAINT")):
            print(f"{name}={value}")
    wheels = list(Path(__file__).parent.glob("*.whl"))
    if not wheels:
        sys.exit("no luck \\033[31m today")
    return Path(shutil.copy(wheels[0], directory)).name
"""


def source_with(tmp_path: Path, wheel: Path | None) -> Path:
    """Return a project whose build answers with `wheel`: what a compiler would have made of it."""
    files = {
        "pyproject.toml": """
            [build-system]
            requires = []
            build-backend = "backend"
            backend-path = ["."]
            """,
        "backend.py": BACKEND,
    }
    root = write_files(tmp_path / "source", files)
    if wheel is not None:
        shutil.copy(wheel, root)
    return root


def rebuild(wheel: Path, source: Path, *options: str | Path, **environ: str) -> Ran:
    arguments = ["reproduce", wheel, "--source", source, "--no-isolation", *options]
    return command(*arguments, environ={**os.environ, **environ})


def test_the_same_wheel_is_identical_and_settings_are_those_of_the_release(
    members: Members, example_wheel: Path, tmp_path: Path
):
    manifest_says("environment", {"HATCH_AOTI_TARGET": "x86-64-v3", "SOURCE_DATE_EPOCH": "1600000000"})(members)
    wheel = write_as(example_wheel, tmp_path, members)
    output = tmp_path / "out"
    environ = {"HATCH_AOTI_PLATFORM_TAG": "any", "TORCH_LOGS": "+all", "HATCH_AOTI_TARGET": "native"}
    ran = rebuild(wheel, source_with(tmp_path, wheel), "--output", output, **environ).check()
    assert "IDENTICAL" in ran.output
    log = (output / "rebuild.log").read_text(encoding="utf-8")
    assert "HATCH_AOTI_TARGET=x86-64-v3\nSOURCE_DATE_EPOCH=1600000000\n" in log
    assert "PLATFORM_TAG" not in log
    assert "TORCH_LOGS" not in log
    assert (output / wheel.name).read_bytes() == wheel.read_bytes()


def artifact_says(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def edit(manifest: dict[str, Any]) -> None:
        for model in manifest["models"].values():
            for artifact in model["artifacts"]:
                place, _, last = key.rpartition(".")
                (artifact[place] if place else artifact)[last] = value

    return edit


def other_weights(manifest: dict[str, Any]) -> None:
    manifest["models"]["digits"]["sources"]["weights/digits.safetensors"] = "0" * 64
    manifest["models"]["digits"]["artifacts"][0]["constants"] = "1" * 64


OTHER = {
    "weights": (other_weights, ["SHA-256 of weights/digits.safetensors", "digits, x86-64-v3: constants"]),
    "compiler flag": (artifact_says("toolchain.compiler_arguments", "-fno-plt"), ["arguments in CXX", "-fno-plt"]),
    "target": (artifact_says("target.name", "x86-64-v2"), ["digits: targets", "x86-64-v2"]),
    "torch": (artifact_says("toolchain.torch", "2.13.1"), ["torch version", "2.13.1"]),
}


def test_of_another_target_only_the_name_is_said(members: Members, example_wheel: Path, tmp_path: Path):
    edit_manifest(members, artifact_says("target.name", "x86-64-v2"))
    said = rebuild(write_as(example_wheel, tmp_path, members), source_with(tmp_path, example_wheel), "--json").output
    facts = json.loads(said[said.index("\n{") :])["facts"]
    assert [fact["name"] for fact in facts] == ["digits: targets", "ranker: targets"]


@pytest.mark.parametrize(("edit", "words"), OTHER.values(), ids=OTHER.keys())
def test_another_input_of_the_build_is_named(
    edit: Callable[[dict[str, Any]], None], words: list[str], members: Members, example_wheel: Path, tmp_path: Path
):
    edit_manifest(members, edit)
    released = write_as(example_wheel, tmp_path, members)
    ran = rebuild(released, source_with(tmp_path, example_wheel))
    assert ran.returncode == 1
    assert "DIFFERENT" in ran.output
    for word in (*words, MANIFEST):
        assert word in ran.output
    said = rebuild(released, source_with(tmp_path, example_wheel), "--json").output
    found = json.loads(said[said.index("\n{") :])
    assert found["identical"] is False
    assert words[0] in [fact["name"] for fact in found["facts"]]


def test_a_rebuild_that_fails_says_so_and_where_the_log_is(example_wheel: Path, tmp_path: Path):
    ran = rebuild(example_wheel, source_with(tmp_path, None), "--output", tmp_path / "out")
    assert ran.returncode == 1
    assert "the rebuild failed: " in ran.output
    assert r"no luck \x1b[31m today" in ran.output
    assert f"Full log: {tmp_path / 'out' / 'rebuild.log'}" in ran.output
    assert "Traceback (most recent call last)\n  File" not in ran.output


def version_says(manifest: dict[str, Any]) -> None:
    manifest["generator"]["version"] = "1 --index-url=x"


REFUSED = {
    "another variable": (lambda manifest: manifest.update(environment={"LD_PRELOAD": "x.so"}), "LD_PRELOAD"),
    "an option for a version": (version_says, "as the version of hatch-aoti, which is none"),
    "a debug build": (lambda manifest: manifest.update(debug={"A": "1"}), "only release builds are reproduced"),
}


@pytest.mark.parametrize(("edit", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_a_wheel_cannot_bring_its_own_orders_into_the_rebuild(
    edit: Callable[[dict[str, Any]], None], message: str, members: Members, example_wheel: Path, tmp_path: Path
):
    edit_manifest(members, edit)
    wheel = write_as(example_wheel, tmp_path, members)
    (tmp_path / "out").mkdir()
    with pytest.raises(AotiError, match=message):
        reproduce(
            read_release(wheel), source_with(tmp_path, wheel), tmp_path / "out", isolation=False, environ=os.environ
        )
    assert not list((tmp_path / "out").iterdir())


def sdist(path: Path, root: Path, **more: str) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        archive.add(root, "example_project-0.1.0")
        for name, text in more.items():
            info = tarfile.TarInfo(name)
            info.size = len(text)
            archive.addfile(info, io.BytesIO(text.encode()))
    return path


def test_the_sdist_is_found_beside_the_wheel_and_unpacked_with_care(example_wheel: Path, tmp_path: Path):
    wheel = Path(shutil.copy(example_wheel, tmp_path))
    with pytest.raises(AotiError, match=r"there is no sdist of example-project 0\.1\.0 beside"):
        find_source(wheel)
    root = source_with(tmp_path, example_wheel)
    path = sdist(tmp_path / "example_project-0.1.0.tar.gz", root)
    assert find_source(wheel) == path
    assert "IDENTICAL" in command("reproduce", wheel, "--no-isolation").check().output
    evil = sdist(tmp_path / "evil.tar.gz", root, **{"../escaped": "x"})
    ran = rebuild(wheel, evil)
    assert ran.returncode == 1
    assert "../escaped is no name that may be unpacked" in ran.output
    (tmp_path / "cut.tar.gz").write_bytes(path.read_bytes()[:200])
    assert "cannot unpack" in rebuild(wheel, tmp_path / "cut.tar.gz").output


def test_isolation_holds_the_build_to_the_recorded_versions(
    example_wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The frontend is pip's or build's; what it is given are constraints, beside the caller's own."""
    from hatch_aoti.wheel import rebuild as module

    seen = {}

    def frontend(output: Path, *, isolation: bool) -> list[str]:
        seen["isolation"] = isolation
        show = (
            "import os, sys, shutil, urllib.request as u;"
            "mine, ours = os.environ['PIP_CONSTRAINT'].split();"
            f"open({str(output / 'seen')!r}, 'w').write(mine + u.urlopen(ours).read().decode());"
            f"shutil.copy({str(example_wheel)!r}, {str(output)!r})"
        )
        return [sys.executable, "-c", show]

    monkeypatch.setattr(module, "_frontend", frontend)
    (tmp_path / "out").mkdir()
    environ = {**os.environ, "PIP_CONSTRAINT": "mine.txt"}
    release = read_release(example_wheel)
    result = reproduce(release, source_with(tmp_path, None), tmp_path / "out", isolation=True, environ=environ)
    assert result.differences == ()
    assert seen == {"isolation": True}
    said = (tmp_path / "out" / "seen").read_text()
    assert said.startswith("mine.txt")
    assert f"hatch-aoti=={hatch_aoti.__version__}\n" in said
    assert "torch==2.13.0" in said
    assert "hatchling==" in said


@pytest.mark.slow
def test_a_release_is_made_again_from_nothing(tiny: Path, build: Builder, environ: dict[str, str], tmp_path: Path):
    """The whole way, with an empty cache: the settings in force at the release come from the wheel."""
    wheel = build.wheel(tiny, "--wheel", HATCH_AOTI_TARGET="x86-64-v2")
    [kept] = [Path(shutil.copy(wheel, tmp_path))]
    shutil.rmtree(tiny / "dist")
    ran = command("reproduce", kept, "--source", tiny, "--no-isolation", environ=environ).check()
    assert "IDENTICAL" in ran.output
    assert not (tiny / "dist").exists()
    # With another flag it is another wheel, and the flag is what is named.
    flagged = {**environ, "CXX": "g++ -fno-plt"}
    ran = command("reproduce", kept, "--source", tiny, "--no-isolation", "--json", environ=flagged)
    assert ran.returncode == 1
    found = json.loads(ran.output[ran.output.index("\n{") :])
    assert found["facts"] == [{"name": "arguments in CXX", "released": "", "rebuilt": "-fno-plt"}]
    assert {"tiny/scale.pt2", "tiny/_models.json"} <= {item["name"] for item in found["differences"]}


# --- The bill of materials ------------------------------------------------------------------------------------------


def test_the_bill_of_materials_has_what_the_manifest_has(members: Members):
    document = json.loads(members[f"{INFO}/sboms/hatch-aoti.cdx.json"])
    manifest = json.loads(members[MANIFEST])
    assert (document["bomFormat"], document["specVersion"]) == ("CycloneDX", "1.6")
    assert document["metadata"]["component"]["purl"] == "pkg:pypi/example-project@0.1.0"
    components = {component["bom-ref"]: component for component in document["components"]}
    assert len(components) == len(document["components"])
    for name, model in manifest["models"].items():
        assert components[f"model:{name}"]["type"] == "machine-learning-model"
        [artifact] = model["artifacts"]
        assert components[f"file:{artifact['file']}"]["hashes"] == [{"alg": "SHA-256", "content": artifact["sha256"]}]
        torch = artifact["toolchain"]["torch"].replace("+", "%2B")
        assert components[f"pkg:pypi/torch@{torch}"]["version"] == artifact["toolchain"]["torch"]
    weights = (Path(hatch_aoti.__file__).parent.parent / "example_project/weights/digits.safetensors").read_bytes()
    [digest] = components["file:weights/digits.safetensors"]["hashes"]
    assert digest["content"] == hashlib.sha256(weights).hexdigest()
    depends = {item["ref"]: item["dependsOn"] for item in document["dependencies"]}
    assert depends.keys() == {*components, "pkg:pypi/example-project@0.1.0"}
    assert all(set(on) <= depends.keys() for on in depends.values())
    assert depends["model:digits"] == ["file:digits.pt2"]
    assert "file:weights/digits.safetensors" in depends["file:digits.pt2"]
    described = parse_manifest(members[MANIFEST])
    again = render_sbom(described, name="example-project", version="0.1.0", hatchling=document_hatchling(components))
    assert again.encode() == members[f"{INFO}/sboms/hatch-aoti.cdx.json"]


def test_the_bill_of_materials_fits_the_official_schema(members: Members):
    validator = JsonStrictValidator(SchemaVersion.V1_6)
    document = members[f"{INFO}/sboms/hatch-aoti.cdx.json"].decode()
    assert validator.validate_str(document) is None
    assert validator.validate_str(document.replace('"machine-learning-model"', '"mind"')) is not None


def document_hatchling(components: dict[str, Any]) -> str:
    [found] = [component["version"] for component in components.values() if component["name"] == "hatchling"]
    return found


def test_another_content_has_another_serial_number(members: Members):
    manifest = parse_manifest(members[MANIFEST])
    serials = {
        json.loads(render_sbom(manifest, name=name, version="1", hatchling="1"))["serialNumber"] for name in ("a", "b")
    }
    assert len(serials) == 2
    assert all(serial.startswith("urn:uuid:") for serial in serials)
