"""Caches that were damaged, or made to do damage: the wheel is the same or the build refuses, and nothing else changes.

Each case is a change to a sound cache of one build. A build then uses it, trims it and clears it, with canaries all
around. Everything runs where only the case's own folder can be written, since what is tested has once removed a
system's directories.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import socket
import stat
import sys
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from conftest import Builder, Ran, make_project, run, write_files

from hatch_aoti.artifact.cache import Cache

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = os.geteuid() == 0
SUMS = "SHA256SUMS.json"


def confined(place: Path) -> list[str]:
    """Return the beginning of a command that can write below `place` alone; empty where the system has no way to."""
    script = (
        'mount --bind "$0" "$0" || exit 1; '
        'while read -r _ at _; do [ "$at" = "$0" ] || mount -o remount,ro,bind "$at"; done < /proc/mounts 2>/dev/null; '
        'if touch "$0/../written" 2>/dev/null; then exit 1; fi; exec "$@"'
    )
    for options in (["-m"], ["-rm"]):
        command = ["unshare", *options, "sh", "-c", script, os.fspath(place)]
        if shutil.which("unshare") and run(*command, "true").returncode == 0:
            return command
    return []


# --- What a build leaves ---------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Built:
    """A project, the wheel of it, and the cache that its build left: all with the compiler's own headers."""

    project: Path
    wheel: Path
    cache: Path
    environ: dict[str, str]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, environ: dict[str, str]) -> Built:
    base = tmp_path_factory.mktemp("hostile")
    project, cache = make_project("hostile", base / "project"), base / "cache"
    warm = Path(environ["HATCH_AOTI_CACHE_DIR"]) / "headers"  # of other tests: they take 10 s each
    if warm.is_dir():
        shutil.copytree(warm, Cache(cache).root / "headers", copy_function=os.link, dirs_exist_ok=True)
    environ = {**environ, "HATCH_AOTI_CACHE_DIR": os.fspath(cache)}
    wheel = Builder(environ).wheel(project, "--wheel", "--outdir", os.fspath(project / "dist"))
    return Built(project, wheel, cache, environ)


def build_again(built: Built, cache: Path, out: Path, **environ: str) -> Ran:
    variables = {"HATCH_AOTI_CACHE_DIR": os.fspath(cache), **environ}
    return Builder(built.environ)(built.project, "--wheel", "--outdir", os.fspath(out), **variables)


# --- The cases ---------------------------------------------------------------------------------------------------------


class World:
    """A folder with a cache in `a/b/cache` and canaries wherever a path out of that might lead."""

    def __init__(self, directory: Path, clean: Path) -> None:
        self.directory = directory
        self.cache = directory / "a" / "b" / "cache"
        # Links to the files of the clean cache; what a case changes is made a file of its own (see `own`).
        shutil.copytree(clean, self.cache, copy_function=os.link)
        for place in ("", "a", "a/b"):
            write_files(directory / place, {"canary": "sings\n", "victim/a": "a\n", "victim/b/c": "c\n", "x": "x\n"})
        self.victim, self.canary = directory / "victim", directory / "canary"

    def find(self, pattern: str) -> Path:
        [found] = self.cache.glob(pattern)
        return found

    def own(self, path: Path) -> Path:
        """Make a file another one with the same content."""
        data, mode = path.read_bytes(), stat.S_IMODE(path.stat().st_mode)
        path.unlink()
        path.write_bytes(data)
        path.chmod(mode)
        return path

    def canaries(self) -> dict[str, Any]:
        """Return all there is outside the cache, and what it is like."""
        seen: dict[str, Any] = {}
        for path in sorted(self.directory.rglob("*")):
            name = path.relative_to(self.directory).as_posix()
            if not path.is_relative_to(self.cache) and name != "outcome.json":
                found = path.lstat()
                content = path.read_bytes() if stat.S_ISREG(found.st_mode) else None
                seen[name] = (found.st_mode, found.st_uid, content)
        return seen


CASES: dict[str, Callable[[World], Any]] = {}

FILES_OF = {
    "the tag": "CACHEDIR.TAG",
    "the secret": "secret",
    "an artifact": "artifacts/*/*/outside.pt2",
    "a record": "artifacts/*/*/constants.safetensors/../artifact.json",
    "constants": "artifacts/*/*/constants.safetensors",
    "checksums of an artifact": "artifacts/*/*/outside.pt2/../SHA256SUMS.json",
    "a bundle": "artifacts/*/*/both.pt2",
    "merged constants": "artifacts/*/*/_models.safetensors",
    "a text": "artifacts/*/*/_models.py",
    "a text in a folder": "artifacts/*/*/cmake/hostileConfig.cmake",
    "a note": "notes/*/*.json",
    "a precompiled header": "headers/*/*/header.h.gch",
    "a shared object": "headers/*/*/shared.o",
}
FOLDERS_OF = {
    "the root": ".",
    "artifacts": "artifacts",
    "a group": "artifacts/*/*/outside.pt2/../..",
    "an entry": "artifacts/*/*/outside.pt2/..",
    "a folder in an entry": "artifacts/*/*/cmake",
    "notes": "notes",
    "a group of notes": "notes/*",
    "headers": "headers",
    "a header's entry": "headers/*/*/shared.o/..",
    "locks": "locks",
    "scratch": "scratch",
    "debug": "debug",
    "a debug folder": "debug/package/model",
}


def flip(world: World, path: Path, position: int) -> None:
    data = bytearray(world.own(path).read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def give_away(world: World, path: Path) -> None:
    os.chown(world.own(path) if path.is_file() else path, 4242, -1)


def replace_by(kind: str, world: World, path: Path) -> None:
    """Put something else in the place of a file or folder, which goes out of the cache."""
    away = world.directory / "moved"
    path.rename(away)
    if kind == "a link to where it is now":
        path.symlink_to(away)
    elif kind == "a link to a canary":
        path.symlink_to(world.canary if away.is_file() else world.victim)
    elif kind == "a link to nothing":
        path.symlink_to(world.directory / "nothing")
    elif kind == "a FIFO":
        os.mkfifo(path)
    elif kind == "a device":
        os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, 5))  # /dev/zero: never ends
    elif kind == "a socket":
        with socket.socket(socket.AF_UNIX) as opened:
            folder = os.open(path.parent, os.O_RDONLY)  # by a short name: a path to a socket has 107 bytes at most
            opened.bind(f"/proc/self/fd/{folder}/{path.name}")
            os.close(folder)
    elif kind == "a folder":
        path.mkdir()
        (path / "inside").write_text("x")
    elif kind == "a file":
        path.write_text("x")
    elif kind != "nothing":
        raise AssertionError(kind)


FILE_DAMAGE: dict[str, Callable[[World, Path], Any]] = {
    "its first bit flipped": lambda world, path: flip(world, path, 0),
    "a bit in the middle flipped": lambda world, path: flip(world, path, path.stat().st_size // 2),
    "its last bit flipped": lambda world, path: flip(world, path, -1),
    "half of it": lambda world, path: os.truncate(world.own(path), path.stat().st_size // 2),
    "nothing in it": lambda world, path: os.truncate(world.own(path), 0),
    "more in it": lambda world, path: world.own(path).write_bytes(path.read_bytes() + b"\n") and None,
    "write permission for all": lambda world, path: world.own(path).chmod(0o666),
    "another owner": give_away,
    **{
        f"{kind} in its place": lambda world, path, kind=kind: replace_by(kind, world, path)
        for kind in ("a link to where it is now", "a link to a canary", "a FIFO", "a device", "a folder", "nothing")
    },
}
FOLDER_DAMAGE: dict[str, Callable[[World, Path], Any]] = {
    "write permission for all": lambda _, path: path.chmod(0o777),
    "another owner": give_away,
    "another file in it": lambda _, path: (path / "extra").write_text("x") and None,
    "another folder in it": lambda _, path: (path / "extra").mkdir(),
    **{
        f"{kind} in its place": lambda world, path, kind=kind: replace_by(kind, world, path)
        for kind in (
            "a link to where it is now",
            "a link to a canary",
            "a link to nothing",
            "a FIFO",
            "a file",
            "nothing",
        )
    },
}
for what, pattern in FILES_OF.items():
    for how, damage in FILE_DAMAGE.items():
        CASES[f"{what}: {how}"] = lambda world, pattern=pattern, damage=damage: damage(world, first(world, pattern))
for what, pattern in FOLDERS_OF.items():
    for how, damage in FOLDER_DAMAGE.items():
        CASES[f"{what}: {how}"] = lambda world, pattern=pattern, damage=damage: damage(world, first(world, pattern))


def first(world: World, pattern: str) -> Path:
    """Return the first place that matches; `x/..` is the folder that has an x."""
    names, up, rest = pattern.partition("/..")
    found = world.cache if names == "." else min(world.cache.glob(names))
    return Path(os.path.normpath(f"{found}{up}{rest}"))


# Whoever keeps the cache elsewhere and a link in its place means that one.
del CASES["the root: a link to where it is now in its place"]

# Keys and names that lead elsewhere, in notes and checksums that are otherwise as we write them.
KEYS = [
    "../../victim", "../victim", "../../../../victim", "..", ".", "", "/", "artifacts", "{here}/victim", "A" * 64,
    "ab" * 32 + "\n", "ab" * 31, "../" * 20 + "ab", "\0", "ab/../../victim", 5, None, True, ["ab"], {"ab": 1}, 1e999,
]  # fmt: skip


def seal(path: Path, text: bytes) -> None:
    """Write notes with the checksum that they would have."""
    identity = json.dumps({"format": 1, "kind": "notes", "key": path.stem}, sort_keys=True).encode()
    path.unlink()
    path.write_bytes(hashlib.sha256(identity + b"\n" + text).hexdigest().encode() + b"\n" + text)
    path.chmod(0o600)


def crafted(change: Callable[[World, Any], Any]) -> Callable[[World], None]:
    """Return a case that changes what the notes say, and their checksums to match."""

    def case(world: World) -> None:
        for path in sorted(world.cache.glob("notes/*/*.json")):
            notes = json.loads(path.read_bytes().partition(b"\n")[2])
            changed = change(world, notes)
            seal(path, changed if isinstance(changed, bytes) else json.dumps(changed).encode())

    return case


def with_key(key: Any) -> Callable[[World, Any], Any]:
    def change(world: World, notes: Any) -> Any:
        notes[0]["value"]["artifacts"][0]["key"] = key.format(here=world.directory) if isinstance(key, str) else key
        return notes

    return change


def with_part(part: str, value: Any) -> Callable[[World, Any], Any]:
    def change(_: World, notes: Any) -> Any:
        notes[0]["value"][part] = value
        return notes

    return change


def with_path(name: str) -> Callable[[World, Any], Any]:
    def change(world: World, notes: Any) -> Any:
        elsewhere = f"{world.directory}/{name}"
        notes[0]["value"]["artifacts"][0] |= {"path": elsewhere, "constants": elsewhere}
        return notes

    return change


CASES |= {
    f"a note with the key {str(key)[:20]!r} ({number})": crafted(with_key(key)) for number, key in enumerate(KEYS)
}
PARTS: list[tuple[str, Any]] = [
    ("artifacts", []), ("artifacts", None), ("artifacts", [5]), ("artifacts", [{}]), ("artifacts", {"a": 1}),
    ("trace", None), ("trace", []), ("trace", {}), ("trace", {"files": 5, "folders": 5, "environ": 5}),
    ("signature", {}), ("signature", None), ("signature", {"class": "Dim"}), ("signature", {"class": "os"}),
    ("name", "../../victim"), ("name", None), ("device", "other"), ("error", {"reason": "x"}), ("unknown", 1),
]  # fmt: skip
CASES |= {f"a note whose {part} is {json.dumps(value)[:30]}": crafted(with_part(part, value)) for part, value in PARTS}
CASES |= {
    "a note that names files elsewhere": crafted(with_path("canary")),
    "a note that names a folder": crafted(with_path("victim/..")),
    "a note that is a number": crafted(lambda _, __: 5),
    "notes that are numbers": crafted(lambda _, __: [1, None, "x", []]),
    "a note that is not JSON": crafted(lambda _, __: b"[{"),
    "a note that is not text": crafted(lambda _, __: b"\xff\xfe["),
    "a note that is very deep": crafted(lambda _, __: b"[" * 100_000 + b"]" * 100_000),
    "a note without a checksum": lambda world: world.own(first(world, "notes/*/*.json")).write_text("[]") and None,
}


def change_number(world: World) -> None:
    """Change what the notes say of a dim, and no checksum."""
    for path in world.cache.glob("notes/*/*.json"):
        old = world.own(path).read_bytes()
        new = old.replace(b'"max": 16', b'"max": 17')
        assert new != old
        path.write_bytes(new)


CASES["a note: another number in it"] = change_number


def change_sums(change: Callable[[World, dict[str, Any]], Any]) -> Callable[[World], None]:
    def case(world: World) -> None:
        for path in sorted(world.cache.glob(f"*/*/*/{SUMS}")):
            changed = change(world, json.loads(path.read_text()))
            world.own(path).write_bytes(changed if isinstance(changed, bytes) else json.dumps(changed).encode())

    return case


def also(name: str) -> Callable[[World, dict[str, Any]], Any]:
    """Add a file elsewhere, with its right checksum."""

    def change(world: World, sums: dict[str, Any]) -> Any:
        path = name.format(here=world.directory)
        return {**sums, "files": {**sums["files"], path: hashlib.sha256(b"sings\n").hexdigest()}}

    return change


CASES |= {
    f"checksums: {how}": change_sums(change)
    for how, change in {
        "an empty table": lambda _, __: {},
        "a list": lambda _, __: [],
        "null": lambda _, __: None,
        "only the files": lambda _, sums: sums["files"],
        "no files": lambda _, sums: {**sums, "files": {}},
        "files in a list": lambda _, sums: {**sums, "files": list(sums["files"])},
        "numbers": lambda _, sums: {**sums, "files": dict.fromkeys(sums["files"], 5)},
        "another kind": lambda _, sums: {**sums, "kind": "other"},
        "another format": lambda _, sums: {**sums, "format": 2},
        "another key": lambda _, sums: {**sums, "key": "f" * 64},
        "one file less": lambda _, sums: {**sums, "files": dict(list(sums["files"].items())[1:])},
        "a file above": also("../../../../canary"),
        "an absolute file": also("{here}/canary"),
        "a name with a NUL": also("a\0b"),
        "very deep": lambda _, __: b"[" * 100_000,
        "not text": lambda _, __: b"\xff",
    }.items()
}


def forge(world: World, pattern: str, name: str, new: bytes) -> None:
    """Change a file of an entry and leave its checksum out, with everything else in order."""
    entry = first(world, pattern)
    sums = json.loads((entry / SUMS).read_text())
    del sums["files"][name]
    world.own(entry / SUMS).write_text(json.dumps(sums))
    world.own(entry / name).write_bytes(new)


def swap(world: World, one: str, other: str) -> None:
    a, b, away = first(world, one), first(world, other), world.directory / "moved"
    a.rename(away)
    b.rename(a)
    away.rename(b)


def swap_notes(world: World) -> None:
    one, other = sorted(world.cache.glob("notes/*/*.json"))
    one.rename(world.cache / "moved")
    other.rename(one)
    (world.cache / "moved").rename(other)


def leave(name: str | bytes, make: Callable[[World, Path], Any]) -> Callable[[World], None]:
    return lambda world: make(world, world.cache / os.fsdecode(name)) and None


def folder_with_a_link(world: World, path: Path) -> None:
    path.mkdir()
    (path / "link").symlink_to(world.victim)
    (path / "out").symlink_to("../../../..")


def link_locks(world: World) -> None:
    for path in world.cache.glob("artifacts/*/*"):
        (world.cache / "locks" / f"{path.name}.lock").symlink_to(world.canary)


def odd_locks(make: Callable[[Path], Any]) -> Callable[[World], Any]:
    return lambda world: [make(world.cache / "locks" / f"{p.name}.lock") for p in world.cache.glob("*/*/*")] and None


NAME = "build-" + "0" * 16
CASES |= {
    "an entry with a file left out of its checksums": lambda world: forge(
        world, "artifacts/*/*/outside.pt2/..", "outside.pt2", b"x"
    ),
    "texts with one left out of their checksums": lambda world: forge(
        world, "artifacts/*/*/_models.py/..", "_models.py", b"x"
    ),
    "two entries swapped": lambda world: swap(world, "artifacts/*/*/outside.pt2/..", "artifacts/*/*/bundled.pt2/.."),
    "texts and a bundle swapped": lambda world: swap(world, "artifacts/*/*/_models.py/..", "artifacts/*/*/both.pt2/.."),
    "a header as an artifact": lambda world: swap(world, "headers/*/*/shared.o/..", "artifacts/*/*/outside.pt2/.."),
    "notes swapped": swap_notes,
    "locks that are links": link_locks,
    "locks that are folders": odd_locks(lambda path: path.mkdir()),
    "locks that are FIFOs": odd_locks(os.mkfifo),
    **{
        f"scratch: {name!r} ({how})": leave(b"scratch/" + name, make)
        for name in (b"...lock", b"..lock", b".lock", b"x.lock", b"\xff\n.lock", f"{NAME}.lock".encode(), NAME.encode())
        for how, make in {
            "a file": lambda _, path: path.write_text(""),
            "a link to a canary": lambda world, path: path.symlink_to(world.canary),
            "a link to a folder": lambda world, path: path.symlink_to(world.victim),
            "a FIFO": lambda _, path: os.mkfifo(path),
            "a folder with links": folder_with_a_link,
        }.items()
    },
}


def possible(case: str) -> bool:
    return ROOT or not case.endswith((": another owner", "a device in its place"))


@pytest.fixture(scope="module")
def outcomes(built: Built, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Return what came of each case: what `hostile_runner` says, and the canaries `before` and `after`."""
    base = tmp_path_factory.mktemp("worlds")
    command = confined(base)
    if not command:
        pytest.skip("needs a namespace of its own, to keep what goes wrong in")
    clean = base / "clean"
    shutil.copytree(built.cache, clean, copy_function=os.link, ignore=shutil.ignore_patterns("headers"))
    cache = Cache(clean)
    cache.keyed_digest(b"")
    for number, names in enumerate([("header.h", "header.h.gch", "shared.o"), ("header.h",)]):
        with cache.scratch("test") as scratch:
            write_files(scratch / "entry", {name: f"{name} {number}\n" for name in names})
            cache.put(f"{number}" * 64, scratch / "entry", "headers")
    with cache.scratch("test") as scratch:
        cache.keep_folder(write_files(scratch / "kept", {"log.txt": "what it said\n"}), "package", "model")
    pristine = {path: path.read_bytes() for path in clean.rglob("*") if path.is_file()}
    worlds = {name: World(base / str(number), clean) for number, name in enumerate(["first", "sound", *CASES])}
    for name, world in worlds.items():
        if name in CASES and possible(name):
            CASES[name](world)
    before = {name: world.canaries() for name, world in worlds.items()}
    (base / "cases.json").write_text(json.dumps([str(w.directory) for n, w in worlds.items() if possible(n)]))
    environ = {**built.environ, "TMPDIR": os.fspath(base), "PYTHONDONTWRITEBYTECODE": "1"}
    runner = Path(__file__).with_name("hostile_runner.py")
    run(*command, sys.executable, runner, built.project, clean, base / "cases.json", environ=environ).check()
    assert {path: path.read_bytes() for path in clean.rglob("*") if path.is_file()} == pristine
    found = {}
    for name, world in worlds.items():
        outcome = world.directory / "outcome.json"
        said = json.loads(outcome.read_text()) if outcome.exists() else {"traceback": "hung, or killed"}
        found[name] = {**said, "before": before[name], "after": world.canaries()}
    return found


def test_the_sound_cache_has_all_that_the_build_needs(outcomes: dict[str, dict[str, Any]], built: Built):
    sound = outcomes["sound"]
    assert sound["remade"] == []
    assert sorted(sound["headers"]) == ["0" * 64, "1" * 64]
    with zipfile.ZipFile(built.wheel) as wheel:
        for name, content in sound["wheel"].items():
            data = wheel.read(f"hostile/{name}")
            assert content in {data.decode(errors="replace"), hashlib.sha256(data).hexdigest()}, name
    assert sound["freed"] > 0


@pytest.mark.parametrize("case", CASES)
def test_a_damaged_cache_gives_the_same_wheel_or_one_sentence_and_harms_nothing(
    case: str, outcomes: dict[str, dict[str, Any]]
):
    if not possible(case):
        pytest.skip("only root can give a file away, or make a device")
    outcome, sound = outcomes[case], outcomes["sound"]
    assert "traceback" not in outcome, outcome["traceback"]
    assert outcome["after"] == outcome["before"]
    if "refused" in outcome:
        assert "\n" not in outcome["refused"]
        assert "/a/b/cache" in outcome["refused"]
        return
    assert outcome["wheel"] == sound["wheel"]
    for key, files in outcome["headers"].items():
        assert files == sound["headers"][key]


def test_there_are_enough_cases_and_most_are_no_reason_to_refuse(outcomes: dict[str, dict[str, Any]]):
    assert len([case for case in CASES if possible(case)]) >= 120
    refused = {case for case in CASES if "refused" in outcomes[case]}
    assert {case.partition(":")[0] for case in refused} <= {"the tag", *FOLDERS_OF}


# --- Real builds, and the command ------------------------------------------------------------------------------------


def test_whatever_is_damaged_is_compiled_again_into_the_same_wheel(built: Built, tmp_path: Path):
    world = World(tmp_path, built.cache)
    for pattern in ("artifacts/*/*/outside.pt2", "headers/*/*/shared.o"):
        path = first(world, pattern)
        flip(world, path, path.stat().st_size // 2)
    for path in world.cache.glob("headers/*/*/header.h.gch"):
        path.unlink()
        path.write_bytes(b"gpch")  # a compiler that is given this one fails
    for path in world.cache.glob("notes/*/*.json"):
        flip(world, path, -5)
    ran = build_again(built, world.cache, tmp_path / "dist").check()
    assert [line.split()[0] for line in ran.output.splitlines() if line[:1] == " " and " compiled " in line] == [
        "outside"
    ]
    assert [line.split()[0] for line in ran.output.splitlines() if "from the cache" in line] == ["bundled"]
    assert (tmp_path / "dist" / built.wheel.name).read_bytes() == built.wheel.read_bytes()
    assert all(path.stat().st_size > 1 << 20 for path in world.cache.glob("headers/*/*/header.h.gch"))


def test_a_cache_that_others_can_write_to_is_refused_unless_they_are_trusted(built: Built, tmp_path: Path):
    world = World(tmp_path, built.cache)
    (world.cache / "artifacts").chmod(0o777)
    ran = build_again(built, world.cache, tmp_path / "dist")
    assert ran.returncode != 0
    assert "can be written by others (mode 777)" in ran.output
    assert "chmod -R go-w" in ran.output
    assert "Traceback" not in ran.output
    assert not list(tmp_path.glob("dist/*.whl"))
    ran = build_again(built, world.cache, tmp_path / "dist", HATCH_AOTI_TRUST_CACHE="1").check()
    assert ran.output.count("from the cache") == 2
    assert (tmp_path / "dist" / built.wheel.name).read_bytes() == built.wheel.read_bytes()


@pytest.mark.parametrize(
    "command",
    [
        ("cache", "--clear", "--cache-dir", "."),
        ("cache", "--trim", "0", "--cache-dir", "."),
        ("cache", "--cache-dir", "."),
        ("cache", "--clear"),
        ("build", ".", "--output", "out"),
    ],
)
def test_a_directory_that_is_no_cache_is_left_alone(command: tuple[str, ...], tmp_path: Path, environ: dict[str, str]):
    home = make_project("hostile", tmp_path / "home")
    write_files(home, {"artifacts/ab/mine": "x", "notes/diary.json": "x", "scratch/x": "x"})
    prefix = confined(tmp_path)
    if not prefix:
        pytest.skip("needs a namespace of its own, to keep what goes wrong in")
    before = {path: path.lstat().st_mtime_ns for path in home.rglob("*")}
    variables = {**environ, "HOME": os.fspath(home), "HATCH_AOTI_CACHE_DIR": os.fspath(home)}
    ran = run(*prefix, sys.executable, "-m", "hatch_aoti", *command, cwd=home, environ=variables)
    assert ran.returncode == 1
    assert "is not a cache of hatch-aoti" in ran.output
    assert {path: path.lstat().st_mtime_ns for path in home.rglob("*")} == before


def test_a_full_disk_leaves_no_half_entry_and_no_note(tmp_path: Path):
    program = """
        import pathlib, sys
        from hatch_aoti.artifact.cache import Cache
        from hatch_aoti.errors import AotiError
        cache, key = Cache(pathlib.Path(sys.argv[1]) / "cache"), "ab" * 32
        cache.add_note(key, {"before": 1})
        for attempt in (lambda: cache.keep_texts({"a": "x" * 900_000}), lambda: cache.keep_texts({"a": "", "b": "x" * 900_000})):
            try:
                attempt()
            except AotiError as error:
                print("refused:", error)
        cache.add_note(key, {"after": "x" * 900_000})
        print(cache.notes(key), list(cache.root.glob("artifacts/*/*")), list(cache.root.glob("scratch/*")))
    """
    script = write_files(tmp_path, {"fill.py": program}) / "fill.py"
    (tmp_path / "disk").mkdir()
    mount = 'mount -t tmpfs -o size=400k none "$0" && exec "$@"'
    for options in (["-m"], ["-rm"]):
        prefix = ["unshare", *options, "sh", "-c", mount, os.fspath(tmp_path / "disk")]
        if shutil.which("unshare") and run(*prefix, "true").returncode == 0:
            break
    else:
        pytest.skip("needs a namespace of its own, to mount a small disk in")
    ran = run(*prefix, sys.executable, script, tmp_path / "disk").check()
    *refused, last = ran.output.splitlines()
    assert len(refused) == 2
    assert all(line.startswith("refused: the disk with the artifact cache ") and "--trim" in line for line in refused)
    assert last == "[{'before': 1}] [] []"
