"""The artifact cache: whole entries or none, whatever is damaged, killed or too large."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import stat
import time
from concurrent.futures import ProcessPoolExecutor
from typing import TYPE_CHECKING

import pytest

from hatch_aoti.cache import Cache, open_cache
from hatch_aoti.errors import AotiError

if TYPE_CHECKING:
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
    cache.trim(3500)
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
