"""The artifact cache: whole entries or none, whatever is damaged, killed or too large."""

from __future__ import annotations

import gc
import hashlib
import multiprocessing
import os
import stat
import time
from concurrent.futures import ProcessPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from hatch_aoti.artifact.cache import Cache, open_cache
from hatch_aoti.errors import AotiError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

KEY = "ab" + "0" * 62


def put(cache: Cache, key: str, content: bytes = b"data") -> Path:
    with cache.scratch("test") as directory:
        (directory / "entry").mkdir()
        (directory / "entry" / "file").write_bytes(content)
        return cache.put(key, directory / "entry")


def test_what_is_put_is_found_again(tmp_path):
    cache = Cache(tmp_path)
    assert cache.get(KEY) is None
    entry = put(cache, KEY)
    assert cache.get(KEY) == entry
    assert (entry / "file").read_bytes() == b"data"


@pytest.mark.parametrize("damage", ["content", "missing", "sums", "no sums"])
def test_a_damaged_entry_counts_as_absent_and_goes(tmp_path, damage):
    cache = Cache(tmp_path)
    entry = put(cache, KEY)
    if damage == "content":
        (entry / "file").write_bytes(b"dato")
    elif damage == "missing":
        (entry / "file").unlink()
    elif damage == "sums":
        (entry / "SHA256SUMS.json").write_text("{")
    else:
        (entry / "SHA256SUMS.json").unlink()
    assert cache.get(KEY) is None
    assert not entry.exists()
    put(cache, KEY)
    assert cache.get(KEY) is not None


def test_the_first_of_two_equal_entries_stays(tmp_path):
    cache = Cache(tmp_path)
    first = put(cache, KEY)
    inode = (first / "file").stat().st_ino
    assert put(cache, KEY) == first
    assert (first / "file").stat().st_ino == inode


def test_scratch_of_a_dead_process_is_swept_and_that_of_a_living_one_is_not(tmp_path):
    cache = Cache(tmp_path)
    child = os.fork()
    if child == 0:  # dies inside the block, as by SIGKILL
        with cache.scratch("dead") as directory:
            (directory / "file").write_text("left")
            os._exit(0)
    os.waitpid(child, 0)
    assert list((tmp_path / "scratch").glob("dead-*/file"))
    with cache.scratch("alive") as alive:
        Cache(tmp_path)
        assert alive.is_dir()
        assert not list((tmp_path / "scratch").glob("dead-*"))


def test_trimming_removes_what_was_unused_for_the_longest_time(tmp_path):
    cache = Cache(tmp_path)
    keys = [f"{number}{'0' * 63}" for number in range(4)]
    hours_ago = time.time() - 7200
    for number, key in enumerate(keys):
        entry = put(cache, key, b"x" * 1000)
        os.utime(entry, (hours_ago + number, hours_ago + number))
    cache.get(keys[0])  # used now
    cache.trim(4000)
    assert [cache.get(key) is not None for key in keys] == [True, False, True, True]


def test_trimming_leaves_what_was_used_within_the_hour(tmp_path):
    cache = Cache(tmp_path)
    put(cache, KEY, b"x" * 1000)
    assert cache.trim(0) == 0
    assert cache.get(KEY) is not None


def test_notes_are_a_hint_and_the_latest_come_first(tmp_path):
    cache = Cache(tmp_path)
    assert cache.notes(KEY) == []
    for number in range(12):
        cache.add_note(KEY, {"number": number})
    assert [note["number"] for note in cache.notes(KEY)][:3] == [11, 10, 9]
    assert len(cache.notes(KEY)) == 8
    (tmp_path / "notes" / "ab" / f"{KEY}.json").write_text("[")
    assert cache.notes(KEY) == []


def test_a_cache_that_cannot_be_written_names_the_ways_to_choose_another(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(AotiError, match="HATCH_AOTI_CACHE_DIR"):
        open_cache(tmp_path / "file" / "cache")


def test_keyed_digests_are_equal_within_a_cache_and_tell_nothing_outside_of_it(tmp_path):
    caches = [Cache(tmp_path / name) for name in ("a", "a", "b")]
    same, again, other = [cache.keyed_digest(b"token") for cache in caches]
    assert same == again != other
    assert same != caches[0].keyed_digest(b"Token")
    assert hashlib.sha256(b"token").hexdigest() not in {same, other}
    assert stat.S_IMODE((tmp_path / "a" / "secret").stat().st_mode) == 0o600


def test_processes_that_start_at_once_agree_on_the_secret(tmp_path):
    cache = Cache(tmp_path)
    with ProcessPoolExecutor(8, mp_context=multiprocessing.get_context("spawn")) as pool:
        digests = set(pool.map(cache.keyed_digest, [b"token"] * 16))
    assert len(digests) == 1


# --- What a cache is -------------------------------------------------------------------------------------------------


def test_a_cache_is_tagged_and_its_owner_s_alone_whatever_the_umask(tmp_path):
    before = os.umask(0)
    try:
        cache = Cache(tmp_path / "a" / "cache")
        put(cache, KEY)
        cache.add_note(KEY, {"a": 1})
    finally:
        os.umask(before)
    tag = (cache.root / "CACHEDIR.TAG").read_text()
    assert tag.startswith("Signature: 8a477f597d28d172789f06886806bc55\n")
    paths = [cache.root, *cache.root.rglob("*")]
    assert [path for path in paths if path.is_dir() and stat.S_IMODE(path.stat().st_mode) != 0o700] == []
    assert [path for path in paths if path.stat().st_mode & 0o022] == []
    assert cache.get(KEY) is not None
    assert cache.notes(KEY) == [{"a": 1}]


def test_an_empty_directory_becomes_a_cache_and_a_tagged_one_is_closed_to_others(tmp_path):
    tmp_path.chmod(0o777)
    put(Cache(tmp_path), KEY)
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o700
    tmp_path.chmod(0o755)  # as some ways to copy it leave it
    assert Cache(tmp_path).get(KEY) is not None
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o700


@pytest.mark.parametrize("tag", ["", "Signature: 8a477f597d28d172789f06886806bc55\n# cargo\n"])
def test_a_directory_with_anything_else_in_it_is_not_touched(tmp_path, tag):
    (tmp_path / "artifacts").mkdir()
    (tmp_path / "CACHEDIR.TAG").write_text(tag)
    with pytest.raises(AotiError, match="is not a cache of hatch-aoti, but has other files in it"):
        open_cache(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"CACHEDIR.TAG", "artifacts"}


def test_a_cache_of_another_format_is_not_touched(tmp_path):
    tag = Cache(tmp_path).root / "CACHEDIR.TAG"
    tag.write_text(tag.read_text().replace("format 1", "format 2"))
    with pytest.raises(
        AotiError, match=r"another version of hatch-aoti \(it has format 2, this one uses 1\); remove it"
    ):
        open_cache(tmp_path)


def test_a_cache_that_others_can_write_to_is_refused_unless_trusted(tmp_path):
    put(Cache(tmp_path), KEY)
    tmp_path.chmod(0o770)
    with pytest.raises(
        AotiError, match=r"can be written by others \(mode 770\).*chmod -R go-w .*HATCH_AOTI_TRUST_CACHE"
    ):
        open_cache(tmp_path)
    assert open_cache(tmp_path, trusted=True).get(KEY) is not None
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o770


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_a_cache_of_another_user_is_refused_unless_trusted(tmp_path):
    put(Cache(tmp_path), KEY)
    os.chown(tmp_path, 4242, -1)
    with pytest.raises(AotiError, match=r"belongs to another user \(number 4242\).*chown -R 0"):
        open_cache(tmp_path)
    assert open_cache(tmp_path, trusted=True).get(KEY) is not None


def test_processes_that_start_at_once_make_one_cache(tmp_path):
    with ProcessPoolExecutor(8, mp_context=multiprocessing.get_context("spawn")) as pool:
        sizes = list(pool.map(size_of_new_cache, [tmp_path / str(number // 8) for number in range(64)]))
    assert sizes == [0] * 64


def size_of_new_cache(root: Path) -> int:
    return Cache(root).size()


def test_a_path_with_spaces_gets_a_link_that_nobody_else_can_have_made(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    root = tmp_path / "a cache"
    assert open_cache(root).root.parent == tmp_path / "temporary"
    put(open_cache(root), KEY)
    assert open_cache(root).get(KEY) is not None
    (tmp_path / "temporary").chmod(0o777)  # anybody can replace the link
    with pytest.raises(AotiError, match=r"has a space or a quote in its path.* cannot stand in for it"):
        open_cache(root)
    (tmp_path / "temporary").chmod(0o1777)
    assert open_cache(root).get(KEY) is not None
    [link] = (tmp_path / "temporary").iterdir()
    link.unlink()
    link.symlink_to(tmp_path)
    with pytest.raises(AotiError, match="cannot stand in for it"):
        open_cache(root)


# --- Keys and names --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["", "..", "../../x", "ab", KEY.upper(), f"{KEY}\n", f"{KEY}0", f"/{KEY}", None, 5])
def test_what_is_no_digest_is_no_key(tmp_path, key):
    cache = Cache(tmp_path)
    uses: list[Callable[..., Any]] = [
        cache.get,
        cache.place,
        cache.notes,
        lambda key: cache.add_note(key, {}),
        lambda key: put(cache, key),
    ]
    uses.append(lambda key: cache.lock(key).__enter__())
    for use in uses:
        with pytest.raises(ValueError, match="is not a key of the cache"):
            use(key)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/", "a\0", "-a", "a\n"])
def test_what_is_no_name_gets_no_folder(tmp_path, name):
    cache = Cache(tmp_path)
    for project, model in [(name, "model"), ("project", name)]:
        with pytest.raises(ValueError, match="is not the name of a package or a model"):
            cache.debug_folder(project, model)


# --- What is in use --------------------------------------------------------------------------------------------------


def test_what_a_running_build_has_used_stays_however_long_it_takes(tmp_path):
    build = open_cache(tmp_path)
    [session] = (tmp_path / "scratch").glob("session-*.lock")
    hours_ago = time.time() - 10 * 3600
    before, since = hours_ago - 3 * 3600, hours_ago + 3600
    os.utime(session, (hours_ago, hours_ago))
    keys = {"ab" * 32: before, "cd" * 32: since}
    for key, used in keys.items():
        os.utime(put(build, key, b"x" * 1000), (used, used))
    other = open_cache(tmp_path)
    other.trim(0)
    assert [other.place(key).exists() for key in keys] == [False, True]
    del build
    gc.collect()
    other.trim(0)
    assert [other.place(key).exists() for key in keys] == [False, False]


def test_what_dead_builds_left_in_scratch_goes_and_what_living_ones_have_there_stays(tmp_path):
    cache = Cache(tmp_path)
    scratch = tmp_path / "scratch"
    for name in ("discarded-0123456789abcdef", "build-0123456789abcdef", "tmpabc", "..."):
        (scratch / name / "deep").mkdir(parents=True)
        (scratch / name / "deep" / "file").write_text("")
    (scratch / "build-0123456789abcdef.lock").touch()
    with cache.scratch("alive") as alive:
        (alive / "file").touch()
        Cache(tmp_path)
        assert {path.name for path in scratch.iterdir()} == {alive.name, f"{alive.name}.lock"}
    assert list(scratch.iterdir()) == []


def test_one_process_at_a_time_has_a_lock_and_none_is_left(tmp_path):
    cache = Cache(tmp_path)
    (tmp_path / "count").write_text("0")
    with ProcessPoolExecutor(4, mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(count_up, [cache] * 4))
    assert (tmp_path / "count").read_text() == "400"
    assert list((tmp_path / "locks").iterdir()) == []


def count_up(cache: Cache) -> None:
    for _ in range(100):
        with cache.lock(KEY):
            number = int((cache.root / "count").read_text())
            (cache.root / "count").write_text(str(number + 1))
