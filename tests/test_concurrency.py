"""Calls and loads in numbers: many threads, many loads, forks; through the installed example."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from conftest import run_python

if TYPE_CHECKING:
    from pathlib import Path


def test_eight_threads_of_a_thousand_calls_are_all_answered_right(
    installed_example: Path, environ: dict[str, str], tmp_path: Path
) -> None:
    code = """
        import threading
        import torch
        from example_project._models import ranker
        torch.set_num_threads(1)
        inputs = [torch.randn(1 + n, 10) for n in range(8)]
        want = [ranker(x) for x in inputs]
        wrong = []
        def work(n):
            x = inputs[n]
            for _ in range(1000):
                if not torch.equal(ranker(x), want[n]):
                    wrong.append(n)
        threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        assert not wrong, wrong
        print("all right")
    """
    assert "all right" in run_python(code, installed_example, environ=environ, cwd=tmp_path).check().output


def test_a_thousand_loads_leave_neither_memory_nor_files(
    installed_example: Path, environ: dict[str, str], tmp_path: Path
) -> None:
    """pytorch/pytorch#141772: PyTorch's loader leaves what it unpacked when it fails or is killed."""
    code = """
        import gc, os, pathlib, tempfile
        import torch
        from example_project._models import ranker
        x = torch.randn(3, 10)
        def resident():
            gc.collect()
            return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        def load(count):
            for _ in range(count):
                type(ranker)()(x)  # a model of its own, loaded by its first call
        load(200)
        before = resident()
        load(800)
        growth = resident() - before
        assert growth < 16 << 20, growth
        left = os.listdir(tempfile.gettempdir())
        assert not left, left
        print("nothing left")
    """
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    ran = run_python(code, installed_example, environ={**environ, "TMPDIR": os.fspath(temporary)}, cwd=tmp_path)
    assert "nothing left" in ran.check().output


def test_children_forked_before_and_after_the_first_call_answer_right(
    installed_example: Path, environ: dict[str, str], tmp_path: Path
) -> None:
    code = """
        import os
        import torch
        from example_project._models import digits, ranker
        torch.set_num_threads(1)  # OpenMP's threads do not survive a fork, in eager neither
        torch.manual_seed(0)
        x, image = torch.randn(3, 10), torch.randn(2, 1, 8, 8)
        def child(model, value):
            pid = os.fork()
            if pid == 0:
                os._exit(0 if model(value).isfinite().all() else 1)
            return os.waitpid(pid, 0)[1]
        assert child(ranker, x) == 0      # loads in the child alone
        want = ranker(x)
        assert child(ranker, x) == 0      # loaded before the fork
        assert child(digits, image) == 0  # loads in the child, after another was loaded
        assert torch.equal(ranker(x), want)
        print("all right")
    """
    assert "all right" in run_python(code, installed_example, environ=environ, cwd=tmp_path).check().output
