"""Devices: the choice at build, the options at load, and what is said on a machine without the GPU.

No test here has a GPU. Code for one is checked up to the calls into CUDA: with machines made up by replacing functions
of `torch.cuda`, with stand-ins for tensors on a GPU, and with the `meta` device, which is "another device" to export,
the contract and verification. `tests/cuda_check.py` runs the rest where there is one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import json
import pickle
import sys
import types
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from conftest import run, run_python, write_files
from test_accessor import DOUBLE, V3, archive, declare, fake, install, temporary  # noqa: F401  (two are fixtures)

from hatch_aoti.artifact.archive import write_package
from hatch_aoti.artifact.cache import Cache, open_cache
from hatch_aoti.build import known, pipeline
from hatch_aoti.build.progress import Reporter
from hatch_aoti.codec import decode, encode, pack
from hatch_aoti.compiler.gpu import (
    BuilderGpu,
    GpuRecord,
    _ask_torch,
    _toolkit,
    architectures,
    find_gpu,
    gpu_options,
    resolve_devices,
)
from hatch_aoti.compiler.optimize import Plan, make_plan
from hatch_aoti.compiler.target import resolve_targets
from hatch_aoti.compiler.toolchain import ToolchainRecord
from hatch_aoti.errors import AotiError
from hatch_aoti.export.program import export_model
from hatch_aoti.export.signature import read_signature
from hatch_aoti.job import run as job
from hatch_aoti.job.values import Artifact, ArtifactRecord, Measured, ModelRequest, ModelResult, Verified
from hatch_aoti.plugin.project import build_project, open_project
from hatch_aoti.runtime import arguments
from hatch_aoti.runtime.contract import Parameter, Signature, Size, TensorInput, TensorOutput
from hatch_aoti.runtime.declarations import Gpu
from hatch_aoti.settings.debugging import Debugging
from hatch_aoti.settings.model import ModelSettings
from hatch_aoti.wheel.contents import make_contents
from hatch_aoti.wheel.inspection import GpuReport, inspect_path
from hatch_aoti.wheel.platform_tag import TagChoice

if TYPE_CHECKING:
    from collections.abc import Iterator

    from conftest import Builder

BASELINE = ("sse3", "ssse3", "sse4_1", "sse4_2", "popcnt")  # of x86-64-v2
A100 = BuilderGpu("NVIDIA A100", "8.0", "12.6", "3.7.0", "Build cuda_12.6")
H100 = BuilderGpu("NVIDIA H100", "9.0", "12.6", "3.7.0", "Build cuda_12.6")
TARGETS = resolve_targets(("x86-64-v2",), system="linux", machine="x86_64", builder_features=BASELINE)
MULTI = {"aot_inductor.emit_multi_arch_kernel": True}
RECORD = ArtifactRecord(
    program="0" * 64,
    constants="0" * 64,
    target=TARGETS[0],
    toolchain=ToolchainRecord(compiler="g++", torch="2.13.0+cu126", torch_git=""),
    options={},
    seed=0,
    verified=Verified(2, None, None),
)


def entry(name="scale", **settings: Any) -> ModelSettings:
    return ModelSettings(name=name, model="tiny.model:Scale", inputs="tiny.model:inputs", **settings)


# --- The choice at build ---


def test_auto_is_the_gpu_where_there_is_one_and_the_cpu_elsewhere():
    entries = {"a": entry("a", device="auto"), "b": entry("b")}
    assert resolve_devices(entries, lambda: A100) == ({"a": "cuda", "b": "cpu"}, A100)
    assert resolve_devices(entries, lambda: "there is none") == ({"a": "cpu", "b": "cpu"}, None)


def test_torch_is_not_asked_for_a_gpu_that_no_model_wants():
    assert resolve_devices({"b": entry("b")}, lambda: pytest.fail("asked")) == ({"b": "cpu"}, None)


def test_all_models_that_must_have_a_gpu_are_named_where_there_is_none():
    entries = {"b": entry("b", device="cuda"), "a": entry("a", device="cuda"), "c": entry("c", device="auto")}
    with pytest.raises(AotiError) as caught:
        resolve_devices(entries, lambda: "torch finds none")
    assert str(caught.value).startswith("`tool.aoti.models.a.device`, `tool.aoti.models.b.device`: ")
    assert "torch finds none. Build on a machine" in str(caught.value)


class Machine:
    """A made-up machine: what `torch.cuda` says of it, and which GPU is current."""

    def __init__(self, *gpus: tuple[int, int], cuda: str | None = "12.6", trouble: str = "") -> None:
        self.gpus, self.cuda, self.trouble, self.current = gpus, cuda, trouble, 0

    def install(self, patch: pytest.MonkeyPatch) -> Machine:
        patch.setattr(torch.version, "cuda", self.cuda)
        patch.setattr(torch.cuda, "init", self.init)
        patch.setattr(torch.cuda, "device_count", lambda: len(self.gpus))
        patch.setattr(torch.cuda, "current_device", lambda: self.current)
        patch.setattr(torch.cuda, "get_device_capability", lambda index=None: self.gpus[index or 0])
        patch.setattr(torch.cuda, "get_device_name", lambda index=None: f"GPU {index or 0}")
        patch.setattr(torch.cuda, "device", self.device)
        return self

    def init(self) -> None:
        if self.trouble:
            raise RuntimeError(self.trouble)

    @contextlib.contextmanager
    def device(self, index: int) -> Iterator[None]:
        before, self.current = self.current, index
        yield
        self.current = before


def test_the_gpu_of_the_builder_is_described(monkeypatch):
    Machine((8, 6)).install(monkeypatch)
    monkeypatch.setenv("PATH", "")
    found = _ask_torch()
    assert isinstance(found, BuilderGpu)
    assert (found.name, found.capability, found.cuda, found.toolkit) == ("GPU 0", "8.6", "12.6", "")


def test_why_there_is_no_gpu_is_said_in_words(monkeypatch):
    Machine(trouble="Found no NVIDIA driver on your system.\nMore").install(monkeypatch)
    assert str(_ask_torch()).endswith("cannot use one here: Found no NVIDIA driver on your system.")
    monkeypatch.setattr(torch.version, "cuda", None)
    assert str(_ask_torch()).endswith("is built without CUDA")
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert str(_ask_torch()).endswith("is built for ROCm, which is not supported")


@pytest.mark.parametrize(
    ("broken", "reason"), [("", "is built without CUDA"), ("raise OSError('no libcuda')", "no libcuda")]
)
def test_torch_is_asked_in_a_process_of_its_own(tmp_path, monkeypatch, environ, broken, reason):
    text = f"{broken}\nimport types\n__version__ = '9'\nversion = types.SimpleNamespace(cuda=None, hip=None)\n"
    write_files(tmp_path, {"torch.py": text})
    monkeypatch.syspath_prepend(tmp_path)
    assert reason in str(find_gpu(environ))


def test_the_tools_that_pack_kernels_are_found_where_torch_looks(tmp_path):
    def tool(folder: str, name: str) -> str:
        path = tmp_path / folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\necho copyright\necho {folder}/{name}\n", encoding="utf-8")
        path.chmod(0o755)
        return str(path)

    assert _toolkit({"PATH": str(tmp_path / "bin")}) == ""
    tool("bin", "nvcc")
    assert _toolkit({"PATH": str(tmp_path / "bin")}) == "bin/nvcc"
    tool("bin", "fatbinary")
    assert _toolkit({"PATH": str(tmp_path / "bin")}) == "bin/fatbinary"
    other = tool("other", "nvcc")
    tool("other", "fatbinary")
    assert _toolkit({"PATH": str(tmp_path / "bin"), "CUDACXX": other}) == "other/fatbinary"


@pytest.mark.parametrize(
    ("gpu", "configured", "options"),
    [
        (None, {}, {}),
        (A100, {}, MULTI),
        (dataclasses.replace(A100, toolkit=""), {}, {}),
        (A100, {"aot_inductor.emit_multi_arch_kernel": False}, {}),
        (A100, {"max_autotune_gemm_backends": "ATEN,CUTLASS"}, {}),
    ],
)
def test_kernels_for_several_architectures_are_asked_for_where_torch_can_make_them(gpu, configured, options):
    assert gpu_options(gpu, configured) == options


def test_what_kernels_are_for_follows_from_the_gpu_and_the_options():
    assert architectures(A100, {}) == ("sm_80",)
    assert architectures(A100, MULTI) == ("sm_80", "compute_80")
    assert architectures(H100, MULTI) == ("sm_90a", "compute_90a")
    assert architectures(dataclasses.replace(H100, capability="12.1"), {}) == ("sm_121a",)


def test_results_of_another_machine_are_not_taken_for_this_ones(tmp_path, monkeypatch, environ):
    """A GPU that came, went or was replaced: neither an export's trace nor an artifact is reused."""
    layout = types.SimpleNamespace(import_paths=(), import_packages={})
    settings = types.SimpleNamespace(include_sources=False)
    monkeypatch.setattr(job, "_make", make_nothing)
    monkeypatch.setattr(job, "_needed_options", lambda *_: {})
    results, keys = set(), set()
    for device, gpu in (("cpu", None), ("cuda", A100), ("cuda", H100)):
        request = pipeline._request(entry(device="auto"), settings, layout, TARGETS, device, gpu, root=tmp_path)
        results.add(known._request_key(request, environ))
        exported = types.SimpleNamespace(
            entry=entry(),
            source=None,
            signature=DOUBLE,
            digest="the same",
            plan=Plan(freeze=False, external=False, inline=True),
        )
        plain = decode(ModelRequest, json.loads(json.dumps(encode(request))))
        assert plain == request
        work = job.ModelJob(
            plain, tmp_path, tmp_path / "c", tmp_path, tmp_path, Debugging(), bypass_cache=False, environ=environ
        )
        Cache(work.cache).root.mkdir(exist_ok=True)
        keys.add(job._artifact(work, exported, TARGETS[0], "scale.pt2").key)
    assert len(results) == len(keys) == 3


def make_nothing(_job, _exported, _target, _toolchain, _options, file_name, directory) -> None:
    (directory / "entry").mkdir()
    for name, text in {
        file_name: "",
        "artifact.json": json.dumps(pack(RECORD)),
        "measured.json": json.dumps(pack(Measured(None))),
    }.items():
        (directory / "entry" / name).write_text(text, encoding="utf-8")


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch could use a GPU")
def test_a_build_for_a_gpu_fails_before_any_model_is_exported(tiny, environ, tmp_path):
    text = (tiny / "pyproject.toml").read_text(encoding="utf-8")
    (tiny / "pyproject.toml").write_text(f'{text}device = "cuda"\n', encoding="utf-8")
    (tiny / "tiny" / "model.py").write_text("raise SystemExit('imported')\n", encoding="utf-8")
    with pytest.raises(AotiError, match=r"^`tool\.aoti\.models\.scale\.device`: .* is built without CUDA\. Build on"):
        build_project(open_project(tiny, environ=environ), open_cache(tmp_path / "cache"), Reporter(), environ=environ)


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch could use a GPU")
def test_what_auto_came_to_is_in_the_output_and_the_manifest(tiny: Path, build: Builder):
    text = (tiny / "pyproject.toml").read_text(encoding="utf-8")
    (tiny / "pyproject.toml").write_text(f'{text}device = "auto"\n', encoding="utf-8")
    ran = build(tiny).check()
    assert 'scale: `device = "auto"` is cpu here' in ran.output
    [wheel] = (tiny / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive_file:
        model = json.loads(archive_file.read("tiny/_models.json"))["models"]["scale"]
        assert (model["device"], model["gpu"]) == ("cpu", None)
        assert not [name for name in archive_file.namelist() if "extra_metadata" in name]


class Weighted(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(512, 512)
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x):
        return self.layer(x) + self.count


def example():
    return (torch.ones(2, 512),)


def test_a_model_is_exported_on_its_device_and_the_contract_names_the_kind_alone(tmp_path):
    """`meta` stands in for `cuda`: which one of several GPUs is for the caller to say."""
    programs = {}
    for device in ("cpu", "meta"):
        this = ModelSettings("weighted", f"{__name__}:Weighted", f"{__name__}:example")
        source = export_model(this, root=tmp_path, device=device)
        assert {tensor.device.type for tensor in source.program.state_dict.values()} == {device}
        signature = read_signature(
            source.program, forward=source.module.forward, args=source.args, kwargs=source.kwargs, output=source.output
        )
        assert [leaf.device for leaf in signature.inputs] == [device]
        programs[device] = source.program, signature, this
    program, signature, this = programs["cpu"]
    assert make_plan(program, signature, this, device="cpu") == Plan(freeze=True, external=False, inline=True)
    assert make_plan(program, signature, this, device="cuda") == Plan(freeze=False, external=False, inline=False)


# --- The wheel ---


@pytest.fixture
def gpu_bundle(tmp_path):
    artifact = tmp_path / "scale.pt2"
    # Any shared object will do: nothing here loads it.
    write_package(artifact, {"model": {"model.wrapper.so": Path(torch._C.__file__)}})
    gpu = GpuRecord(**dataclasses.asdict(A100), architectures=architectures(A100, MULTI))
    made = Artifact(TARGETS[0].name, "key", artifact, None, 8, False, RECORD, Measured(None))
    return make_contents(
        [ModelResult("scale", "cuda", ON_GPU, (made,), gpu=gpu)],
        {"scale": entry(device="cuda")},
        TARGETS,
        package="tiny",
        version="1.0",
        torch_version="2.13.0+cu126",
        tag=TagChoice("manylinux_2_35_x86_64", "made up"),
        debug={},
        environment={},
        cache=open_cache(tmp_path / "cache"),
    )


ON_GPU = Signature(
    (
        Parameter("x", "positional or keyword", TensorInput("x", "float32", (Size(plus=4),), device="cuda")),
        Parameter("y", "positional or keyword", TensorInput("y", "float32", (Size(plus=4),), device="cuda")),
        Parameter("n", "positional or keyword", TensorInput("n", "float32", (), device="cpu")),
    ),
    TensorOutput(0, "float32", (4,)),
)


def test_a_wheel_for_a_gpu_says_so_in_metadata_that_installers_keep(tiny, tmp_path, monkeypatch, gpu_bundle, environ):
    from hatchling.builders.wheel import WheelBuilder

    built = pipeline.Built(gpu_bundle, TagChoice("any", "made up"))
    monkeypatch.setattr("hatch_aoti.plugin.project.build_project", lambda *_, **__: (built, None))
    monkeypatch.setenv("HATCH_AOTI_CACHE_DIR", str(tmp_path / "cache"))
    [wheel] = WheelBuilder(str(tiny)).build(directory=str(tmp_path / "dist"), versions=["standard"])
    options = ("--no-deps", "--no-index", "--target", tmp_path / "site")
    run(sys.executable, "-m", "pip", "install", "--quiet", *options, wheel, environ=environ).check()
    [installed] = importlib.metadata.distributions(path=[str(tmp_path / "site")])
    said = json.loads(installed.read_text("extra_metadata/hatch_aoti/devices.json") or "")
    assert said == {"schema": 1, "models": {"scale": {"cuda": "12.6", "architectures": ["sm_80", "compute_80"]}}}
    [model] = inspect_path(tmp_path / "site" / "tiny").models
    assert model.gpu == GpuReport("NVIDIA A100", "12.6", ("sm_80", "compute_80"))
    shown = run(sys.executable, "-m", "hatch_aoti", "inspect", wheel, environ=environ).check().output
    assert "for cuda 12.6, compiled on NVIDIA A100; kernels for sm_80, compute_80" in shown
    listed = run_python("import tiny._models as m; m._aoti.main([])", tmp_path / "site", environ=environ).check().output
    assert "GPU: CUDA 12.6, kernels for sm_80, compute_80" in listed


# --- Options at load ---


def test_the_same_options_are_the_same_model_loaded_once(tmp_path, fake, temporary):  # noqa: F811
    module = install(tmp_path, declare(num_runners=3))
    archive(module.double.path)
    single = module.double.with_options(run_single_threaded=True)
    assert single is module.double.with_options(run_single_threaded=True, num_runners=3)
    assert single.with_options(run_single_threaded=False) is module.double is module.double.with_options()
    assert isinstance(single, type(module.double))
    assert (single.path, single.signature) == (module.double.path, module.double.signature)
    x = torch.ones(2, 4)
    for model in (single, module.double, single, single.with_options(num_runners=2)):
        assert torch.equal(model(x), x * 2)
    assert [loader.options for loader in fake] == [(True, 3, -1), (False, 3, -1), (True, 2, -1)]
    assert len({loader.folder for loader in fake}) == 1  # so that the system maps the code once


def test_options_are_told_apart_in_print_and_kept_in_pickles(tmp_path, monkeypatch):
    module = install(tmp_path, declare(), package="pickled_options")
    monkeypatch.syspath_prepend(tmp_path)
    other = module.double.with_options(num_runners=2, run_single_threaded=True)
    assert repr(other).startswith("<double.with_options(run_single_threaded=True, num_runners=2)(x: ")
    assert repr(module.double).startswith("<double(x: ")
    assert pickle.loads(pickle.dumps(other)) is other
    assert pickle.loads(pickle.dumps(module.double)) is module.double


WRONG = [
    ({"device_index": 0}, ValueError, "device_index must be -1, since the model was compiled for the CPU; got 0"),
    ({"device_index": -2}, ValueError, "device_index must be -1, since"),
    ({"device_index": True}, TypeError, "device_index must be an int, got True"),
    ({"device_index": "cuda:0"}, TypeError, "device_index must be an int, got 'cuda:0'"),
    ({"run_single_threaded": 1}, TypeError, "run_single_threaded must be True or False, got 1"),
    ({"num_runners": 0}, ValueError, "num_runners must be at least 1, got 0"),
    ({"num_runners": 2.0}, TypeError, "num_runners must be an int, got 2.0"),
]


@pytest.mark.parametrize(("options", "error", "text"), WRONG)
def test_wrong_options_are_refused_by_name_before_anything_is_loaded(tmp_path, fake, options, error, text):  # noqa: F811
    module = install(tmp_path, declare())
    with pytest.raises(error, match=f"^double: {text}"):
        module.double.with_options(**options)
    if "num_runners" not in options:
        with pytest.raises(error, match=f"^double: {text}"):
            module.load("double", **options)


def test_calls_with_run_single_threaded_are_right_also_from_several_threads(installed_example, environ, tmp_path):
    """PyTorch's code without synchronisation serves one caller at a time, which Python's lock sees to: torch 2.13 holds
    it during a call (pytorch/pytorch#197516), so `num_runners` helps C++ alone (pytorch/pytorch#148937, #134946).
    """
    code = """
        import threading
        import torch
        from example_project._models import digits, load, ranker
        torch.set_num_threads(1)
        for model, shape in ((ranker, (10,)), (digits, (1, 8, 8))):
            single, several = model.with_options(run_single_threaded=True), model.with_options(num_runners=4)
            inputs = [torch.randn(1 + n, *shape) for n in range(8)]
            want = [model(x) for x in inputs]
            wrong = []
            def work(n):
                for _ in range(200):
                    if not all(torch.equal(one(inputs[n]), want[n]) for one in (single, several)):
                        wrong.append(n)
            threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
            [thread.start() for thread in threads]
            [thread.join() for thread in threads]
            assert not wrong, wrong
        print("all right")
    """
    assert "all right" in run_python(code, installed_example, environ=environ, cwd=tmp_path).check().output


# --- A model for a GPU, on machines that are made up ---

BUILT_FOR = Gpu("12.6", ("sm_80", "compute_80"))


def gpu_model(tmp_path: Path, architectures=BUILT_FOR.architectures, state: tuple[str, ...] = ()):
    signature = dataclasses.replace(ON_GPU, state=state)
    model = declare(signature=signature, device="cuda", gpu=Gpu("12.6", architectures))
    module = install(tmp_path, model, torch_version="2.13.0+cu126")
    archive(module.double.path)
    return module


MISSING = [
    (Machine(cuda=None), "is built without CUDA. Install a CUDA build of torch 2.13 or newer."),
    (Machine(trouble="No CUDA GPUs are available"), "torch cannot use one here: No CUDA GPUs are available Check the"),
    (Machine((8, 0), cuda="13.0"), "compiled with CUDA 12.6, and this torch"),
    (
        Machine((7, 5)),
        r"has GPU code for sm_80, compute_80, which this GPU \(GPU 0, 7.5\) cannot run. Use a wheel that",
    ),
]


@pytest.mark.parametrize(("machine", "text"), MISSING)
def test_what_a_machine_lacks_is_said_before_anything_is_loaded(tmp_path, fake, monkeypatch, machine, text):  # noqa: F811
    machine.install(monkeypatch)
    module = gpu_model(tmp_path)
    x = torch.ones(4)
    for attempt in (lambda: module.double(x, x, x), lambda: module.load("double")):
        with pytest.raises(module.LoadError, match=f"^double .*{text}"):
            attempt()
    assert fake == []


def test_a_gpu_that_is_not_there_is_named(tmp_path, fake, monkeypatch):  # noqa: F811
    Machine((8, 0), (8, 0)).install(monkeypatch)
    module = gpu_model(tmp_path)
    with pytest.raises(module.LoadError, match=r"^double: there is no cuda:2: torch finds 2 GPUs here\.$"):
        module.double.with_options(device_index=2)(torch.ones(4), torch.ones(4), torch.ones(()))
    with pytest.raises(ValueError, match=r"^double: device_index must be the number of a GPU, or -1 .*; got -2$"):
        module.double.with_options(device_index=-2)
    assert fake == []


@pytest.mark.parametrize(
    ("architecture", "runs", "does_not"),
    [
        ("sm_80", [(8, 0), (8, 6), (8, 9)], [(7, 5), (9, 0), (12, 0)]),
        ("sm_86", [(8, 6), (8, 9)], [(8, 0)]),
        ("compute_80", [(8, 0), (9, 0), (12, 1)], [(7, 5)]),
        ("sm_90a", [(9, 0)], [(8, 9), (10, 0)]),
        ("compute_90a", [(9, 0)], [(10, 0), (12, 0)]),
        ("sm_120a", [(12, 0)], [(12, 1), (10, 0)]),
    ],
)
def test_which_gpus_run_a_kernel_follows_cudas_rules(tmp_path, architecture, runs, does_not):
    module = gpu_model(tmp_path)
    assert all(module._aoti.gpu._runs_on(architecture, capability) for capability in runs)
    assert not any(module._aoti.gpu._runs_on(architecture, capability) for capability in does_not)


def on(device: str) -> Any:
    """Stand in for a tensor on a device that this machine does not have."""
    return types.SimpleNamespace(device=torch.device(device), dtype=torch.float32, shape=(4,))


class GpuLoader:
    """Stands in for PyTorch's loader: notes which GPU was current when it was made, and when it ran."""

    made: list[GpuLoader]

    def __init__(self, folder, name, single_threaded, num_runners, device_index):
        del folder, name, single_threaded, num_runners
        self.index, self.current, self.ran = device_index, torch.cuda.current_device(), []
        self.load_constants = None
        self.made.append(self)

    def boxed_run(self, flat):
        self.ran.append(torch.cuda.current_device())
        return list(flat)


@pytest.fixture
def two_gpus(monkeypatch, fake, temporary):  # noqa: F811
    monkeypatch.setattr(GpuLoader, "made", [], raising=False)
    monkeypatch.setattr(torch._C._aoti, "AOTIModelPackageLoader", GpuLoader)
    return Machine((8, 0), (8, 0)).install(monkeypatch)


def test_a_model_runs_where_its_inputs_are_and_is_loaded_there_once(tmp_path, two_gpus):
    module = gpu_model(tmp_path)
    run_on = module._aoti.gpu.OnGpus(module.double, module.double.variants[0])
    for device in ("cuda:1", "cuda:0", "cuda:1"):
        run_on([on("cpu"), on(device)])
    assert [(loader.index, loader.current, loader.ran) for loader in GpuLoader.made] == [(1, 1, [1, 1]), (0, 0, [0])]
    assert two_gpus.current == 0  # as the caller had it
    two_gpus.current = 1
    run_on([on("cpu")])  # nothing to follow
    assert GpuLoader.made[0].ran == [1, 1, 1]


def test_a_model_with_state_stays_where_it_was_first_called(tmp_path, two_gpus):
    module = gpu_model(tmp_path, state=("count",))
    run_on = module._aoti.gpu.OnGpus(module.double, module.double.variants[0])
    run_on([on("cuda:1")])
    with pytest.raises(
        ValueError, match=r"^double keeps state, which is on cuda:1, .*\.with_options\(device_index=0\)"
    ):
        run_on([on("cuda:0")])
    assert len(GpuLoader.made) == 1


def test_a_device_index_is_where_a_model_runs(tmp_path, two_gpus):
    module = gpu_model(tmp_path)
    model = module.double.with_options(device_index=1)
    module._aoti.gpu.OnGpus(model, model.variants[0])([on("cuda:1")])
    assert [loader.index for loader in GpuLoader.made] == [1]


@pytest.mark.parametrize(
    ("values", "index", "text"),
    [
        (("cuda:0", "cuda:1", "cpu"), -1, "y must be on cuda:0, since x is, got float32[4] on cuda:1"),
        (("cuda:0", "cuda:0", "cpu"), 1, "x must be on cuda:1, got float32[4] on cuda:0"),
    ],
)
def test_inputs_on_the_wrong_gpu_are_refused_by_name(values, index, text):
    tensors = [on(value) for value in values]
    arguments.check_places("double", ON_GPU.inputs, [on("cuda:1"), on("cuda:1"), on("cpu")], -1)
    with pytest.raises(ValueError, match=r"^double: ") as caught:
        arguments.check_places("double", ON_GPU.inputs, tensors, index)
    assert str(caught.value) == f"double: {text}"


def test_constants_in_a_file_are_copied_to_a_gpu_and_shared_on_the_cpu(tmp_path, monkeypatch):
    given: list[Any] = []
    module = gpu_model(tmp_path)
    monkeypatch.setattr(module._aoti.constants, "map_constants", lambda *_: {"w": "tensor"})
    for device, state in (("cuda", ()), ("cpu", ()), ("cpu", ("count",))):
        signature = dataclasses.replace(ON_GPU, state=state)
        model = types.SimpleNamespace(
            name="double", constants="c", constants_id="", device=device, signature=signature, folder=tmp_path
        )
        module._aoti.constants.give_own_constants(model, lambda *arguments: given.append(arguments))
    # tensors, use_inactive, check_full_update, user_managed, allow_h2d_copy: torch excludes the last two together
    assert given == [({"w": "tensor"}, False, True, shared, not shared) for shared in (False, True, False)]
