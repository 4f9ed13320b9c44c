"""Calls and loads in numbers: many threads, many loads, forks; through the installed example."""

from __future__ import annotations

import os
import shutil
import sys
from typing import TYPE_CHECKING

import pytest
from conftest import run, run_python

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow


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


def test_a_thread_computes_with_as_many_threads_as_the_program_asked_for(
    installed_guide: Path, environ: dict[str, str], tmp_path: Path
) -> None:
    """pytorch/pytorch#37259: OpenMP has a default of its own for each thread, which compiled loops ask for."""
    code = """
        import ctypes, re, threading
        from pathlib import Path
        import torch
        from guide._models import scale
        [library] = set(re.findall(r"/\\S*libgomp\\S*", Path("/proc/self/maps").read_text()))
        openmp = ctypes.CDLL(library)
        torch.set_num_threads(3)
        scale(torch.ones(2, 4))
        torch.set_num_threads(1)
        found = []
        def work():
            found.append(openmp.omp_get_max_threads())
            scale(torch.ones(2, 4))
            found.append(openmp.omp_get_max_threads())
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        print(found)
    """
    ran = run_python(code, installed_guide, environ={**environ, "OMP_NUM_THREADS": "2"}, cwd=tmp_path).check()
    assert ran.output.strip() == "[2, 1]"


def test_a_child_forked_after_a_call_with_several_threads_answers(
    installed_guide: Path, environ: dict[str, str], tmp_path: Path
) -> None:
    """pytorch/pytorch#49555, benoitc/gunicorn#2478: the threads of OpenMP are gone in the child, and eager hangs."""
    code = """
        import os, signal, threading
        import torch
        from guide._models import digits
        torch.set_num_threads(2)
        images = torch.randn(512, 1, 8, 8)
        want = digits(images)
        child = os.fork()
        if child == 0:
            signal.alarm(60)  # ends a child that hangs
            same = torch.allclose(digits(images), want, atol=1e-4)
            answers = []
            thread = threading.Thread(target=lambda: answers.append(digits(images)))
            thread.start()
            thread.join()
            same = same and torch.allclose(answers[0], want, atol=1e-4) and torch.get_num_threads() == 2
            os._exit(0 if same else 1)
        print("status", os.waitpid(child, 0)[1])
    """
    ran = run_python(code, installed_guide, environ={**environ, "OMP_NUM_THREADS": "2"}, cwd=tmp_path).check()
    assert "status 0" in ran.output


def test_a_byte_that_was_changed_in_the_constants_is_found(
    installed_guide: Path, environ: dict[str, str], tmp_path: Path
) -> None:
    shutil.copytree(installed_guide, tmp_path / "site")
    package = tmp_path / "site" / "guide"
    check = [sys.executable, "-m", "guide._models", "--verify"]
    assert run(*check, cwd=tmp_path / "site", environ=environ).check().output == "All files are as they were built.\n"
    content = bytearray((package / "_models.safetensors").read_bytes())
    content[-1] ^= 1
    (package / "_models.safetensors").write_bytes(content)
    (package / "ranker.pt2").write_bytes((package / "scale.pt2").read_bytes())
    ran = run(*check, cwd=tmp_path / "site", environ=environ)
    assert ran.returncode == 1
    assert "_models.safetensors is damaged: its SHA-256 is not the build's" in ran.output
    assert "ranker.pt2 is not the file that this _models.py was built with" in ran.output
