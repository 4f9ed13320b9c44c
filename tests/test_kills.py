"""A build that dies at any moment takes everything it started with it, and the next one succeeds."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from conftest import TINY_MODULE, Builder, names_in, run_python, unpack, write_files
from test_build import TINY_FILES

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")

MARK = "MARK_OF_A_BUILD_TO_KILL"
BUILD = [sys.executable, "-c", "import hatchling.build; hatchling.build.build_wheel('dist')"]
PATIENCE = 300  # seconds; not what is tested, only an end to waiting


def processes(mark: str) -> dict[int, str]:
    """Return the command lines of all living processes whose environment has the mark, by process number."""
    found = {}
    for directory in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"{MARK}={mark}".encode() in (directory / "environ").read_bytes():
                found[int(directory.name)] = (directory / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    return found


def wait_until(condition: Callable[[], bool], build: subprocess.Popen[bytes] | None = None) -> None:
    give_up = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < give_up
        assert build is None or build.poll() is None, "the build ended before the moment to kill it"
        time.sleep(0.02)


def start(root: Path, environ: dict[str, str], mark: str) -> subprocess.Popen[bytes]:
    # A test run that a shell started in the background ignores interrupts, and its children would, too.
    heed = "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"
    command = [sys.executable, "-c", heed, *BUILD]
    with (root / "log.txt").open("wb") as log:
        return subprocess.Popen(
            command, cwd=root, env={**environ, MARK: mark, "HATCH_AOTI_PASS_ENVIRONMENT": MARK}, stdout=log, stderr=log
        )


def said(root: Path, text: str) -> Callable[[], bool]:
    return lambda: text in (root / "log.txt").read_text(encoding="utf-8", errors="replace")


def runs(mark: str, *words: str) -> Callable[[], bool]:
    return lambda: any(all(word in command for word in words) for command in processes(mark).values())


def test_a_build_killed_while_it_compiles_leaves_no_process_and_the_next_build_succeeds(
    tiny: Path, environ: dict[str, str], tmp_path: Path
):
    cache = tmp_path / "cache"
    environ = {**environ, "HATCH_AOTI_CACHE_DIR": os.fspath(cache), "TMPDIR": os.fspath(tmp_path)}
    moments = {
        "while the model is exported": lambda mark: said(tiny, "scale: export"),
        "while a header is precompiled": lambda mark: runs(mark, "cc1plus", "header.h"),
        "while the generated code is compiled": lambda mark: runs(mark, "cc1plus", ".cpp"),
    }
    for moment, reached in moments.items():
        mark = uuid.uuid4().hex
        build = start(tiny, environ, mark)
        wait_until(reached(mark), build)
        build.kill()
        build.wait()
        wait_until(lambda mark=mark: not processes(mark))
        assert not list(cache.glob("artifacts/*/*")), moment

    Builder(environ)(tiny).check()
    [wheel] = (tiny / "dist").glob("*.whl")
    assert names_in(wheel) == TINY_FILES
    code = "import torch; from tiny._models import scale; print(scale(torch.ones(3, 4)).sum().item())"
    assert run_python(code, unpack(wheel, tmp_path / "installed")).check().output.strip() == "36.0"
    assert list((cache / "scratch").iterdir()) == [], "what the killed builds left has been swept away"


STARTS_A_CHILD = """
import subprocess, sys

for own_session in (False, True):
    command = [sys.executable, "-c", "import time; time.sleep(1000)", "the child"]
    subprocess.Popen(command, start_new_session=own_session)
"""
NEVER_ENDS = (
    STARTS_A_CHILD
    + """
import time

time.sleep(1000)
"""
)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_what_user_code_started_dies_with_the_build(how: signal.Signals, tiny: Path, environ: dict[str, str]):
    write_files(tiny, {"tiny/model.py": NEVER_ENDS})
    mark = uuid.uuid4().hex
    build = start(tiny, environ, mark)
    wait_until(runs(mark, "the child"), build)
    build.send_signal(how)
    assert build.wait() != 0
    wait_until(lambda: not processes(mark))


def test_what_a_finished_model_left_running_is_killed(tiny: Path, environ: dict[str, str]):
    write_files(tiny, {"tiny/model.py": TINY_MODULE + STARTS_A_CHILD})
    mark = uuid.uuid4().hex
    assert start(tiny, environ, mark).wait() == 0, (tiny / "log.txt").read_text(encoding="utf-8")
    wait_until(lambda: not processes(mark))
