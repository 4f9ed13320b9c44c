"""A wheel runs on every CPU of its baseline and is refused, in words, by the others.

AOTInductor's default is the builder's own instructions, and its artifacts die on older CPUs with SIGILL
(pytorch/pytorch#121516). Here an emulated Haswell, which has AVX2 and no AVX-512, runs what this machine has built.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from conftest import EXAMPLE, Builder, Ran, copy_project, make_project, once, run, unpack
from filelock import FileLock

from hatch_aoti.compiler.target import builder_cpu_features

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    pytest.mark.qemu,
    pytest.mark.skipif(sys.platform != "linux", reason="qemu-user emulates Linux programs"),
    pytest.mark.skipif(not shutil.which("qemu-x86_64"), reason="qemu-user is not installed"),
]

HASWELL = ("qemu-x86_64", "-cpu", "Haswell")

# Prints what each model answers and which file it comes from, then runs a wheel that this CPU may not be able to run.
PROGRAM = """
import json, runpy, sys
import torch

example, variants, demanding = sys.argv[1:]

sys.path.insert(0, example)
from example_project._models import digits, ranker
from example_project.samples import as_batch, load_samples
answers = {
    "digits": digits(as_batch(load_samples())).tolist(),
    "ranker": ranker(torch.linspace(-1, 1, 30).reshape(3, 10)).tolist(),
}
print(json.dumps(answers), flush=True)

if variants:
    sys.path.insert(0, variants)
    from tiny._models import scale
    print(json.dumps({"file": scale.path.name, "scale": scale(torch.arange(8.0).reshape(2, 4)).tolist()}), flush=True)

if demanding:
    for name in [name for name in sys.modules if name.partition(".")[0] == "example_project"]:
        del sys.modules[name]
    sys.path.insert(0, demanding)
    runpy.run_module("example_project", run_name="__main__")
"""


@dataclasses.dataclass(frozen=True)
class Sites:
    """Directories with installed wheels; the last two are None where the builder has no AVX-512."""

    example: Path
    variants: Path | None  # a model for x86-64-v3 and -v4
    demanding: Path | None  # the example for x86-64-v4

    def arguments(self) -> list[str]:
        return [str(path or "") for path in (self.example, self.variants, self.demanding)]


def can_build_v4() -> bool:
    return {"avx512_f", "avx512_bw", "avx512_cd", "avx512_dq", "avx512_vl"} <= builder_cpu_features()


needs_avx512 = pytest.mark.skipif(not can_build_v4(), reason="the builder has no AVX-512, so it refuses x86-64-v4")


@pytest.fixture(scope="session")
def sites(shared: Path, environ: dict[str, str], installed_example: Path) -> Sites:
    if not can_build_v4():
        return Sites(installed_example, None, None)
    build = Builder(environ)
    variants, demanding = shared / "variants", shared / "demanding"

    def make_variants(site: Path) -> None:
        project = make_project("tiny", shared / "variants-project")
        unpack(build.wheel(project, HATCH_AOTI_TARGET="x86-64-v3,x86-64-v4"), site)

    def make_demanding(site: Path) -> None:
        project = copy_project(EXAMPLE, shared / "demanding-project")
        unpack(build.wheel(project, HATCH_AOTI_TARGET="x86-64-v4"), site)

    return Sites(installed_example, once(variants, make_variants), once(demanding, make_demanding))


@pytest.fixture(scope="session")
def on_haswell(shared: Path, sites: Sites) -> Ran:
    return run_once(shared / "on-haswell", *HASWELL, sys.executable, "-c", PROGRAM, *sites.arguments())


@pytest.fixture(scope="session")
def on_this_machine(shared: Path, sites: Sites) -> Ran:
    return run_once(shared / "on-this-machine", sys.executable, "-c", PROGRAM, *sites.arguments()).check()


def run_once(result: Path, *command: str) -> Ran:
    """Run a command in one of the workers of a test run; the others take the result from a file."""
    with FileLock(f"{result}.lock"):
        if not result.exists():
            ran = run(*command)
            result.write_text(json.dumps(dataclasses.asdict(ran)), encoding="utf-8")
    return Ran(**json.loads(result.read_text(encoding="utf-8")))


def answers(ran: Ran) -> list[dict[str, object]]:
    """Return the answers that `PROGRAM` printed; what it said is the message where there are none."""
    found = [json.loads(line) for line in ran.output.splitlines() if line.startswith("{")]
    assert found, f"no model answered (status {ran.returncode}):\n{ran.output}"
    return found


def test_the_emulated_cpu_has_no_avx512(tmp_path: Path):
    source, program = tmp_path / "program.c", tmp_path / "program"
    source.write_text('int main(void) { __asm__ volatile("vpxord %zmm0, %zmm0, %zmm0"); return 0; }\n')
    run("gcc", "-mavx512f", "-o", program, source).check()
    done = subprocess.run([*HASWELL, program], capture_output=True, check=False)
    assert done.returncode in {-signal.SIGILL, 128 + signal.SIGILL}


def test_a_default_wheel_gives_the_same_numbers_on_a_cpu_without_avx512(on_haswell: Ran, on_this_machine: Ran):
    # pytorch/pytorch#121516
    there, here = answers(on_haswell)[0], answers(on_this_machine)[0]
    for model in ("digits", "ranker"):
        assert flat(there[model]) == pytest.approx(flat(here[model]), rel=1e-5, abs=1e-5)


@needs_avx512
def test_of_several_targets_each_cpu_gets_the_best_that_it_can_run(on_haswell: Ran, on_this_machine: Ran):
    there, here = answers(on_haswell)[1], answers(on_this_machine)[1]
    assert there["file"] == "scale.x86-64-v3.pt2"
    assert here["file"] == "scale.x86-64-v4.pt2"
    assert there["scale"] == here["scale"] == [[1.0, 3.0, 5.0, 7.0], [9.0, 11.0, 13.0, 15.0]]


@needs_avx512
def test_a_wheel_for_better_cpus_is_refused_in_words_and_not_by_a_signal(on_haswell: Ran, on_this_machine: Ran):
    # pytorch/pytorch#121516
    assert on_haswell.returncode == 1, on_haswell.output
    error = on_haswell.output.rstrip().splitlines()[-1]
    assert "LoadError: digits needs x86-64-v4 (AVX-512); this CPU (" in error
    assert "lacks avx512_f" in error
    assert "accuracy" not in on_haswell.output
    assert "digits: 20 of 20 right" in on_this_machine.output


def flat(value: Any) -> list[float]:
    return [number for row in value for number in flat(row)] if isinstance(value, list) else [value]
