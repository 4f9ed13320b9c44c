"""`hatch-aoti bench`: what it measures and reports. How long anything takes is nothing that a test can promise."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Ran, make_project, run, run_python, snapshot, write_files

from hatch_aoti.benchmark import options, reference, wheel
from hatch_aoti.benchmark.answers import compare_answers, leaves
from hatch_aoti.benchmark.contenders import CONTENDERS
from hatch_aoti.benchmark.figures import Builds, ContenderFigures, Machine, ModelFigures, Report, Spread
from hatch_aoti.benchmark.processes import ContenderError, Fresh
from hatch_aoti.benchmark.table import human_time
from hatch_aoti.errors import AotiError
from hatch_aoti.plugin import project
from hatch_aoti.runtime.contract import Constant, Dim, Group, Omitted, Parameter, Signature, Size, TensorInput
from hatch_aoti.runtime.models import Model

# A model that TorchScript cannot have.
MODULE = """
import torch

class Scale(torch.nn.Module):
    def forward(self, x):
        if torch.jit.is_tracing():
            raise NotImplementedError("not in TorchScript")
        return x * 2 + 1
"""

# Spares stock AOTInductor six small runs of the compiler.
SHORTER = {"TORCHINDUCTOR_VEC_ISA_OK": "1"}

# The command, with two processes side by side where it has four: each costs an `import torch`.
QUICK = """
import sys
from hatch_aoti.runtime.models import Model
from hatch_aoti.benchmark import measure_model
from hatch_aoti.cli import main

measure_model._PROCESSES = 2
sys.argv[1:] = ["bench", *{arguments!r}, "--repeats", "1", "--rounds", "1"]
main()
"""


def bench(*arguments: str | Path, environ: dict[str, str] | None = None, cwd: Path | None = None) -> Ran:
    return run(sys.executable, "-m", "hatch_aoti", "bench", *arguments, environ=environ, cwd=cwd)


def quick_bench(*arguments: str | Path, environ: dict[str, str], paths: tuple[Path, ...] = ()) -> Ran:
    return run_python(QUICK.format(arguments=[os.fspath(part) for part in arguments]), *paths, environ=environ)


def positive(value: Any) -> bool:
    """Whether every number in nested JSON data is above zero; there must be at least one."""
    numbers = [value] if isinstance(value, (int, float)) else [*(value.values() if isinstance(value, dict) else value)]
    return bool(numbers) and all(
        number > 0 if isinstance(number, (int, float)) else positive(number) for number in numbers
    )


@dataclasses.dataclass(frozen=True)
class Measured:
    output: str
    report: dict[str, Any]
    changed: bool  # the project's files
    left: list[str]  # what stayed in TMPDIR

    @property
    def contenders(self) -> dict[str, dict[str, Any]]:
        [model] = self.report["models"]
        return {item["key"]: item for item in model["contenders"]}


@pytest.fixture(scope="module")
def measured(environ: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Measured:
    """Return what the command says of a project with one model, builds left out."""
    root = tmp_path_factory.mktemp("bench")
    project = write_files(make_project("tiny", root / "project"), {"tiny/model.py": MODULE})
    (root / "tmp").mkdir()
    before = snapshot(project)
    keys = ("hatch-aoti", "eager", "torchscript", "aotinductor")
    chosen = [part for key in keys for part in ("--contender", key)]
    ran = quick_bench(
        project, "--no-builds", "--threads", "1", "--json", root / "out.json", *chosen,
        environ={**environ, **SHORTER, "TMPDIR": os.fspath(root / "tmp")},
    ).check()  # fmt: skip
    return Measured(
        ran.output,
        json.loads((root / "out.json").read_text(encoding="utf-8")),
        snapshot(project) != before,
        [path.name for path in (root / "tmp").iterdir()],
    )


def test_every_figure_of_every_contender_is_there(measured: Measured):
    contenders = measured.contenders
    assert list(contenders) == ["hatch-aoti", "eager", "torchscript", "aotinductor"]
    for key in ("hatch-aoti", "eager", "aotinductor"):
        found = contenders[key]
        assert not found["error"]
        assert positive([found["start"][step] for step in ("framework", "result", "total")])
        if key != "hatch-aoti" or hasattr(Model, "load"):
            assert positive(found["start"]["load"])
        assert positive(found["latency"])
        assert positive(found["rounds"])
        assert positive(found["relative_latency"])
        if Path("/proc/self/smaps_rollup").exists():
            assert positive(found["memory"])
            assert found["memory"]["four_pss"] > found["memory"]["pss"]
    assert positive([contenders[key]["artifact_bytes"] for key in ("hatch-aoti", "aotinductor")])
    assert contenders["eager"]["artifact_bytes"] is None
    assert positive(measured.report["wheel_bytes"])
    assert measured.report["builds"] is None


def test_the_answers_are_compared_with_those_of_eager(measured: Measured):
    for key in ("hatch-aoti", "eager", "aotinductor"):
        assert measured.contenders[key]["agrees"] is True
        assert measured.contenders[key]["max_error"] < 1e-5


def test_ratios_to_the_other_contenders_are_reported(measured: Measured):
    [scale] = measured.report["models"]
    assert scale["ratios"]["best_other"] in {"eager", "aotinductor"}
    assert positive([scale["ratios"][name] for name in ("latency_to_best_other", "first_result_to_aotinductor")])
    assert positive(scale["calls"])


def test_a_contender_that_fails_is_reported_with_the_reason(measured: Measured):
    failed = measured.contenders["torchscript"]
    assert failed["error"] == "NotImplementedError: not in TorchScript"
    assert failed["latency"] is failed["start"] is failed["memory"] is failed["agrees"] is None
    assert "TorchScript failed: NotImplementedError: not in TorchScript" in measured.output
    assert "FAILED" in measured.output


def test_the_table_names_models_contenders_and_the_machine(measured: Measured):
    assert "scale(float32[8, 4])" in measured.output
    assert f"torch {torch.__version__}" in measured.output
    for name in ("hatch-aoti", "eager", "TorchScript", "AOTInductor"):
        assert name in measured.output


def test_the_project_is_not_written_to_and_no_temporary_file_stays(measured: Measured):
    assert not measured.changed
    assert measured.left == []


def test_a_wrong_answer_is_marked(tmp_path: Path):
    figures = [
        contender_figures("hatch-aoti", 0.5),
        contender_figures("eager", 0.25, difference="2 of 8 elements differ"),
    ]
    model = ModelFigures("scale", ("float32[8, 4]",), tuple(figures))
    assert model.best_other is None, "whoever is wrong does not count as fast"
    assert [item["agrees"] for item in model.to_json()["contenders"]] == [True, False]
    text = printed(Report("tiny", "", MACHINE, (model,)), tmp_path)
    assert "WRONG" in text
    assert "eager gives another answer: 2 of 8 elements differ" in text


def test_answers_are_compared_leaf_by_leaf(tmp_path: Path):
    expected = [torch.ones(4), torch.tensor([1, 2])]
    torch.save((expected, [(1e-3, 1e-4), (0.0, 0.0)]), tmp_path / "answers.pt")

    def difference(*got: Any) -> str:
        return compare_answers(got, os.fspath(tmp_path / "answers.pt"))["difference"]

    assert difference(torch.ones(4) + 1e-5, torch.tensor([1, 2])) == ""
    assert (
        difference(torch.tensor([1, 1, 1, 3.0]), torch.tensor([1, 2])) == "output 0: 1 of 4 elements differ, by up to 2"
    )
    assert difference(torch.ones(4), torch.tensor([1, 3])) == "output 1: 1 of 2 elements differ, by up to 1"
    assert difference(torch.ones(3), torch.tensor([1, 2])) == "output 0: float32[3] instead of float32[4]"
    assert difference(torch.ones(4)) == "1 tensors instead of 2"


def test_tensors_are_found_in_results_of_any_structure():
    @dataclasses.dataclass
    class Answer:
        a: torch.Tensor
        b: Any

    one, two = torch.tensor(1), torch.tensor(2)
    assert leaves(Answer(one, {"x": [two, "text"], "y": None})) == [one, two]
    assert [leaf.item() for leaf in leaves([one.numpy(), (two,)])] == [1, 2]


@pytest.mark.slow
def test_an_installed_package_is_measured_without_its_source(
    installed_example: Path, environ: dict[str, str], tmp_path: Path
):
    arguments = ("--package", "example_project", "--model", "ranker", "--contender", "hatch-aoti")
    file = tmp_path / "out.json"
    ran = quick_bench(*arguments, "--json", file, environ=environ, paths=(installed_example,)).check()
    report = json.loads(file.read_text(encoding="utf-8"))
    [ranker] = report["models"]
    [found] = ranker["contenders"]
    assert found["agrees"] is True
    assert positive(found["latency"])
    assert positive(ranker["calls"]["stock"]), "which is what load() returns"
    assert report["wheel_bytes"] is None
    assert "ranker(float32[8, 10])" in ran.output


def test_a_model_is_changed_by_its_seed_for_the_build_alone(
    tiny: Path, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(project, "read_project", project.read_project)
    before = snapshot(tiny)
    wheel._change("scale")
    assert project.open_project(tiny, environ=environ).settings.models["scale"].seed == 1
    assert snapshot(tiny) == before


@pytest.mark.parametrize("key", ["torchscript", "onnxruntime"])
def test_a_contender_with_a_file_of_its_own_answers_as_eager_does(
    key: str, tiny: Path, environ: dict[str, str], tmp_path: Path
):
    code = f"""
    import json
    from pathlib import Path
    from hatch_aoti.benchmark import preparation, reference
    from hatch_aoti.benchmark.tasks import PreparationTask, ProjectModel, ReferenceTask
    from hatch_aoti.codec import pack
    from hatch_aoti.export.importing import ImportRoots
    from hatch_aoti.plugin.project import open_project

    root = Path({os.fspath(tiny)!r})
    entry = open_project(root, environ={{}}).settings.models["scale"]
    model, directory = ProjectModel(entry, root, ImportRoots((str(root),), {{}})), Path({os.fspath(tmp_path)!r})
    reference.from_module(pack(ReferenceTask("scale", directory, model)))
    assert preparation.prepare_all(pack(PreparationTask({key!r}, (model,), directory))) == {{"scale": None}}
    """
    run_python(code, environ=environ).check()
    task = {
        "contender": key, "paths": sys.path, "threads": 1, "project": None, "inputs": os.fspath(tmp_path / reference.INPUTS),
        "artifact": os.fspath(tmp_path / f"scale{CONTENDERS[key].artifact}"),
    }  # fmt: skip
    with Fresh(task, tmp_path, environ=environ, cwd=tmp_path) as process:
        steps = process.answer()
        assert process.spawned < steps["imported"] < steps["begun"] < steps["loaded"] < steps["answered"]
        assert process.ask("compare", answers=os.fspath(tmp_path / reference.ANSWERS))["difference"] == ""


def test_a_process_that_dies_says_how(environ: dict[str, str], tmp_path: Path):
    (tmp_path / "torch.py").write_text("import os; os.kill(os.getpid(), 11)", encoding="utf-8")
    task = {"contender": "torchscript", "paths": [os.fspath(tmp_path), *sys.path], "threads": 1}
    with (
        Fresh(task, tmp_path, environ=environ, cwd=tmp_path) as process,
        pytest.raises(ContenderError, match="SIGSEGV"),
    ):
        process.answer()


def test_inputs_are_made_up_for_every_kind_of_parameter():
    size = (Size((), 2), Size(((2, "n"),), 1))
    parameters = (
        Parameter("x", "positional", TensorInput("x", "float32", size, (1, 0))),
        Parameter("pair", "positional or keyword", Group("tuple", (TensorInput("i", "int64", size[:1]), Constant(3)))),
        Parameter("scale", "positional or keyword", Omitted("scale"), Omitted("scale")),
        Parameter("flag", "positional or keyword", Constant(True), Constant(False)),
        Parameter("options", "**kwargs", Group("**kwargs", (TensorInput("b", "bool", ()),), ("mask",))),
    )
    args, kwargs = reference.made_up_inputs(Signature(parameters, Constant(None), (Dim("n", 1, None),)))
    x, (index, three) = args
    assert x.shape == (2, 17)
    assert x.stride() == (1, 2)
    assert index.tolist() == [0, 0]
    assert three == 3
    assert kwargs["flag"] is True
    assert kwargs["mask"].dtype is torch.bool
    assert "scale" not in kwargs


def test_a_killed_command_takes_its_processes_along_and_leaves_no_file(
    tiny: Path, environ: dict[str, str], tmp_path: Path
):
    (tmp_path / "tmp").mkdir()
    command = [sys.executable, "-m", "hatch_aoti", "bench", os.fspath(tiny), "--no-builds", "--contender", "eager"]
    with subprocess.Popen(
        command, env={**environ, "TMPDIR": os.fspath(tmp_path / "tmp")}, stderr=subprocess.PIPE, text=True
    ) as process:
        for line in process.stderr or ():
            if "eager: starting" in line:
                break
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 128 + signal.SIGTERM
    assert list((tmp_path / "tmp").iterdir()) == []
    mine = os.fspath(tmp_path / "tmp").encode()
    for environment in Path("/proc").glob("[0-9]*/environ"):
        try:
            assert mine not in environment.read_bytes()
        except OSError:  # gone meanwhile
            time.sleep(0)


# --- Refusals -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model", "scalf"], 'there is no model `scalf`. Did you mean "scale"? There are: scale'),
        (["--contender", "aotinduktor"], 'there is no contender `aotinduktor`. Did you mean "aotinductor"?'),
        (["--json", "nowhere/out.json"], "--json nowhere/out.json: there is no folder nowhere; create it first"),
    ],
)
def test_a_wrong_name_is_an_error_that_says_what_there_is(
    arguments: list[str], said: str, tiny: Path, environ: dict[str, str]
):
    ran = bench(tiny, *arguments, environ=environ)
    assert ran.returncode == 1
    assert said in ran.output


def test_a_package_cannot_be_compared_with_what_needs_its_source():
    with pytest.raises(AotiError, match=r"`eager` needs the model's source.*there are: hatch-aoti, aotinductor"):
        options.available_contenders(["eager"], package=True)
    ran = bench("--package", "no_such_package")
    assert ran.returncode == 1
    assert "no_such_package._models cannot be imported here" in ran.output


def test_a_contender_that_is_not_installed_is_left_out_and_refused_by_name(monkeypatch: pytest.MonkeyPatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "onnxruntime" else found(name))
    assert options.available_contenders([], package=False) == tuple(key for key in CONTENDERS if key != "onnxruntime")
    with pytest.raises(AotiError, match=r'needs .*onnxruntime.*pip install "hatch-aoti\[bench\]"'):
        options.available_contenders(["onnxruntime"], package=False)


def test_a_plot_without_matplotlib_is_refused_before_anything_is_measured(tiny: Path, environ: dict[str, str]):
    # A module of this name that is None cannot be imported, wherever it is installed.
    code = f"""
    import sys
    sys.modules["matplotlib"] = None
    sys.argv[1:] = ["bench", {os.fspath(tiny)!r}, "--plot", "out.png"]
    from hatch_aoti.cli import main
    main()
    """
    ran = run_python(code, environ=environ)
    assert ran.returncode == 1
    assert ran.output.strip() == (
        'aoti: ERROR: --plot needs matplotlib, which is not installed here: pip install "hatch-aoti[bench]"'
    )


# --- Reports ------------------------------------------------------------------------------------------------------

MACHINE = Machine("a CPU", 2, 2, "Linux x86_64", "3.11", "2.13", "1")


def contender_figures(key: str, latency: float, difference: str = "") -> ContenderFigures:
    spread = Spread.of([latency, latency * 2])
    return ContenderFigures(
        key, CONTENDERS[key].name, latency=spread, rounds=(latency, latency * 2), difference=difference, max_error=0.0
    )


def printed(report: Report, tmp_path: Path) -> str:
    from rich.console import Console

    from hatch_aoti.benchmark.table import print_report

    with (tmp_path / "table.txt").open("w", encoding="utf-8") as file:
        print_report(report, Console(file=file, width=160))
    return (tmp_path / "table.txt").read_text(encoding="utf-8")


def test_latencies_are_compared_round_by_round():
    ours = dataclasses.replace(contender_figures("hatch-aoti", 1.0), rounds=(1.0, 10.0, 1.0))
    eager = dataclasses.replace(contender_figures("eager", 2.0), rounds=(2.0, 20.0, 3.0))
    slow = dataclasses.replace(contender_figures("compile", 9.0), rounds=(9.0, 90.0, 9.0))
    model = ModelFigures("m", (), (ours, eager, slow))
    assert model.relative_latency("eager") == 2.0
    assert model.to_json()["ratios"]["best_other"] == "eager"
    assert model.to_json()["ratios"]["latency_to_best_other"] == 0.5


def test_builds_are_compared_with_the_script(tmp_path: Path):
    builds = Builds(8, "mlp", 20.0, 6.0, 2.0, 50.0, None)
    assert builds.to_json()["ratios"] == {
        "cold_to_script": 0.4,
        "one_changed_to_script": 0.12,
        "unchanged_to_script": 0.04,
    }
    text = printed(Report("eight", "", MACHINE, (), 1000, builds), tmp_path)
    assert "build of 8 models" in text
    assert "0.40 x" in text
    assert "FAILED" in text, "the script that did not run to its end"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(104.2, "104 s"), (2.3, "2.30 s"), (0.0175, "17.5 ms"), (8.123e-6, "8.12 µs"), (2e-7, "0.20 µs")],
)
def test_times_have_three_digits(seconds: float, text: str):
    assert human_time(seconds) == text


def test_the_plot_has_a_bar_for_each_contender(tmp_path: Path):
    from hatch_aoti.benchmark.plot import check_plot, draw

    with pytest.raises(AotiError, match="the file's ending chooses the format, one of"):
        check_plot(tmp_path / "out.doc")
    model = ModelFigures("scale", (), (contender_figures("hatch-aoti", 1.0), contender_figures("eager", 2.0)))
    draw(Report("tiny", "", MACHINE, (model,), 1, Builds(1, "scale", 3, 2, 1, 4, 3)), tmp_path / "out.svg")
    drawn = (tmp_path / "out.svg").read_text(encoding="utf-8")
    assert drawn.count("<!-- eager -->") >= 1
    assert "<!-- script, cold -->" in drawn
