"""What the build says besides the table: the platform tag and its reason, and what a publisher should know."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from hatch_aoti.build import report
from hatch_aoti.build.progress import Reporter
from hatch_aoti.job.values import Artifact, Measured, ModelResult, NotVerified, Verified
from hatch_aoti.runtime.contract import Constant, Signature
from hatch_aoti.settings.model import ModelSettings
from hatch_aoti.wheel.contents import WheelContents
from hatch_aoti.wheel.platform_tag import TagChoice

if TYPE_CHECKING:
    from conftest import Builder

WAIT = "_ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE@GLIBCXX_3.4.30 (libstdc++.so.6)"


@pytest.fixture
def reporter() -> Reporter:
    return Reporter()


def test_the_build_says_which_tag_why_and_what_would_lower_it(tiny: Path, build: Builder):
    lines = [line for line in build(tiny).check().output.splitlines() if line.startswith("aoti: platform tag ")]
    [wheel] = (tiny / "dist").glob("*.whl")
    assert len(lines) == 1
    assert lines[0].startswith(f"aoti: platform tag {wheel.stem.rpartition('-')[2]}: ")


def test_the_reason_and_the_way_down_name_symbols_as_people_write_them(
    reporter: Reporter, capsys: pytest.CaptureFixture[str]
):
    assert shutil.which("c++filt")
    choice = TagChoice(
        "manylinux_2_35_x86_64", f"the compiled objects need {WAIT}", f"without {WAIT} the tag would be manylinux_2_34_x86_64"
    )  # fmt: skip
    report.explain_tag(choice, reporter)
    said = capsys.readouterr().err.splitlines()
    symbol = "std::condition_variable::wait(std::unique_lock<std::mutex>&)@GLIBCXX_3.4.30 (libstdc++.so.6)"
    assert said == [
        f"aoti: platform tag manylinux_2_35_x86_64: the compiled objects need {symbol}",
        f"aoti: for older systems: without {symbol} the tag would be manylinux_2_34_x86_64",
    ]


def test_without_the_tool_that_reads_symbols_they_are_shown_as_they_are(
    reporter: Reporter, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setenv("PATH", str(tmp_path))
    report.explain_tag(TagChoice("manylinux_2_35_x86_64", f"the compiled objects need {WAIT}"), reporter)
    assert capsys.readouterr().err == f"aoti: platform tag manylinux_2_35_x86_64: the compiled objects need {WAIT}\n"


def test_a_library_that_neither_the_system_nor_torch_has_is_pointed_out(
    reporter: Reporter, capsys: pytest.CaptureFixture[str]
):
    choice = TagChoice("manylinux_2_28_x86_64", "torch's own tag", foreign=("libmagic.so.1", "libodd.so.2"))
    report.explain_tag(choice, reporter)
    said = capsys.readouterr().err
    assert "WARNING: the compiled objects need libmagic.so.1, libodd.so.2, which neither" in said


@pytest.mark.parametrize(("size", "warned"), [((100 << 20) - 1, False), (100 << 20, True)])
def test_a_wheel_over_the_limit_of_public_indexes_is_pointed_out(
    size: int, warned: bool, reporter: Reporter, capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    artifact = tmp_path / "large.pt2"
    with artifact.open("wb") as file:
        file.truncate(size)
    report.warn_of_size(WheelContents({"_models.py": "#"}, {"large.pt2": artifact}), reporter)
    said = capsys.readouterr().err
    assert ("WARNING: the models take 104.9 MB in the wheel" in said) is warned
    assert ("files up to 100 MiB" in said) is warned
    assert bool(said) is warned


def test_kernels_chosen_by_measuring_are_pointed_out(reporter: Reporter, capsys: pytest.CaptureFixture[str]):
    plain = ModelSettings(name="plain", model="m:M", inputs="m:inputs")
    models = {
        "plain": plain,
        "tuned": dataclasses.replace(plain, name="tuned", inductor_configs={"max_autotune": True}),
        "not_tuned": dataclasses.replace(plain, name="not_tuned", inductor_configs={"max_autotune": False}),
        "chosen": dataclasses.replace(
            plain, name="chosen", inductor_configs={"max_autotune": True, "deterministic": True}
        ),
    }
    report.warn_of_tuning(models, reporter)
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert said[0].startswith("aoti: tuned: `max_autotune` chooses kernels by measuring them here")


def result(*artifacts: Artifact) -> ModelResult:
    return ModelResult("net", "cpu", Signature((), Constant(None)), artifacts)


def made(verified: Verified | NotVerified, measured: Measured) -> Artifact:
    record: Any = SimpleNamespace(verified=verified)
    return Artifact("v3", "key", Path("net.pt2"), None, 1, cached=False, record=record, measured=measured)


def test_an_output_that_no_check_could_find_wrong_is_pointed_out_once(
    reporter: Reporter, capsys: pytest.CaptureFixture[str]
):
    measured = Measured(0.0, vacuous=("output is 0 wherever it was compared",))
    report.warn_of_vacuous_checks([result(*[made(Verified(8, None, None), measured)] * 2)], reporter)
    said = capsys.readouterr().err
    assert said.count("output is 0 wherever it was compared") == 1
    assert "WARNING: net: verification shows little, since" in said
    report.warn_of_vacuous_checks([result(made(Verified(8, None, None), Measured(0.0)))], reporter)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("verified", "error", "said"),
    [
        (Verified(8, None, None), 1.5e-7, "1.5e-07"),
        (Verified(8, None, None), None, "equal"),
        (NotVerified(), None, "not checked"),
    ],
)
def test_the_table_says_what_was_checked(verified: Verified | NotVerified, error: float | None, said: str):
    assert report._error(made(verified, Measured(error))) == said
