"""`[tool.aoti]` and `HATCH_AOTI_…`: what is accepted, and what each mistake is answered with."""

from __future__ import annotations

import dataclasses
import json
import pickle
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import jsonschema
import pytest

from hatch_aoti.errors import SettingsError
from hatch_aoti.settings.model import Dim, ModelSettings, Settings, TensorInput
from hatch_aoti.settings.reader import RESERVED_NAMES, check_hook_config, parse_settings
from hatch_aoti.settings.schema import read_schema
from hatch_aoti.settings.values import DTYPES

MODEL = 'model = "pkg.digits:Net"'
INPUTS = 'inputs = { image = { shape = ["batch", 1, 8, 8] } }'
DIMS = "dims = { batch = { min = 1, max = 64 } }"

BUNDLE = "tool.aoti.models.digits.bundle"

FULL = """
[tool.aoti]
package = "example_project.nets"
target = ["x86-64-v3", "x86-64-v4"]
jobs = 2
cache-dir = "build/cache"
platform-tag = "manylinux_2_28_x86_64"
include-sources = true
keep-intermediates = true

[tool.aoti.models.ranker]
model = "example_project.ranker:Ranker.build"
weights = "weights/ranker.safetensors"
inputs = "example_project.ranker:example_inputs"
dims = { batch = { min = 2, max = 64 }, length = {} }
dynamic-shapes = { x = { 0 = "batch" }, rest = [{ 0 = "batch", 1 = "length" }, {}], options = { mask = { 1 = "length" } } }
device = "auto"
inductor-configs = { max_autotune = true, cpp = { min_chunk_size = 64 } }
seed = 7
verify = false
rtol = 1
atol = 1e-6
num-runners = 4
bundle = "nets"

[tool.aoti.models.digits]
model = "example_project.digits:DigitsNet"
inputs = { ids = { shape = ["batch"], dtype = "int64", high = 100 }, image = { shape = ["batch", 1, 8, 8] } }
dims = { batch = { max = 1024 } }
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "project"
    (root / "weights").mkdir(parents=True)
    for name in ("weights/ranker.safetensors", "weights/net.bin", "../outside.pt"):
        (root / name).write_bytes(b"")
    (root / "weights" / "link.pt").symlink_to("../../outside.pt")
    (root / "weights" / "folder.pt").mkdir()
    return root


def parse(text: str, root: Path, **environ: str) -> Settings:
    """Return the settings; what is valid for the reader must be so for the schema."""
    config = tomllib.loads(text)
    settings = parse_settings(config, root=root, environ={"HOME": "/root", **environ})
    jsonschema.Draft7Validator(read_schema()).validate(config["tool"]["aoti"])
    return settings


def problems(text: str, root: Path, **environ: str) -> dict[str, str]:
    with pytest.raises(SettingsError) as caught:
        parse(text, root, **environ)
    found = caught.value.problems
    assert len({problem.key for problem in found}) == len(found), "two problems with one key"
    return {problem.key: problem.message for problem in found}


def project(lines: str) -> str:
    return f"[tool.aoti]\n{lines}\n[tool.aoti.models.digits]\n{MODEL}\n{INPUTS}\n{DIMS}\n"


def model(*lines: str, name: str = "digits") -> str:
    return "\n".join([f"[tool.aoti.models.{name}]", *lines])


def declared(*lines: str) -> str:
    return model(MODEL, INPUTS, DIMS, *lines)


def called(*lines: str) -> str:
    return model(MODEL, 'inputs = "pkg.digits:example"', *lines)


def image(text: str) -> str:
    return model(MODEL, f"inputs = {{ image = {{ {text} }} }}")


def test_every_setting_arrives_where_the_design_puts_it(root):
    assert parse(FULL, root) == Settings(
        package="example_project.nets",
        target=("x86-64-v3", "x86-64-v4"),
        jobs=2,
        cache_dir=root / "build/cache",
        platform_tag="manylinux_2_28_x86_64",
        include_sources=True,
        keep_intermediates=True,
        skip=False,
        models={
            "digits": ModelSettings(
                name="digits",
                model="example_project.digits:DigitsNet",
                inputs={
                    "ids": TensorInput(("batch",), "int64", 100),
                    "image": TensorInput(("batch", 1, 8, 8), "float32"),
                },
                dims={"batch": Dim(1, 1024)},
            ),
            "ranker": ModelSettings(
                name="ranker",
                model="example_project.ranker:Ranker.build",
                weights="weights/ranker.safetensors",
                inputs="example_project.ranker:example_inputs",
                dims={"batch": Dim(2, 64), "length": Dim(1, None)},
                dynamic_shapes={
                    "options": {"mask": {"1": "length"}},
                    "rest": [{"0": "batch", "1": "length"}, {}],
                    "x": {"0": "batch"},
                },
                device="auto",
                inductor_configs={"cpp.min_chunk_size": 64, "max_autotune": True},
                seed=7,
                verify=False,
                rtol=1.0,
                atol=1e-6,
                num_runners=4,
                bundle="nets",
            ),
        },
    )


def test_everything_but_model_and_inputs_has_a_default(root):
    settings = parse(model(MODEL, "inputs = {}"), root)
    assert settings == Settings(models={"digits": ModelSettings(name="digits", model="pkg.digits:Net", inputs={})})
    assert settings.target == ()
    assert settings.models["digits"].device == "cpu"


@pytest.mark.torch
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_is_one_of_torch(dtype, root):
    import torch

    assert isinstance(getattr(torch, dtype), torch.dtype)
    assert parse(image(f'shape = [0, 3], dtype = "{dtype}"'), root).models["digits"].inputs["image"].dtype == dtype


def test_one_target_may_be_a_string(root):
    assert parse(project('target = "native"'), root).target == ("native",)


@pytest.mark.parametrize(
    ("text", "size"), [("'10 GB'", 10**10), ("'512MiB'", 512 << 20), ("'1.5 kB'", 1500), ("4096", 4096), ("'0'", 0)]
)
def test_the_cache_size_may_have_a_unit(text, size, root):
    assert parse(project(f"cache-size = {text}"), root).cache_size == size


def test_an_absolute_cache_dir_and_a_home_folder_are_expanded(root, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert parse(project('cache-dir = "~/cache"'), root).cache_dir == tmp_path / "cache"
    assert parse(project(f'cache-dir = "{tmp_path}/c"'), root).cache_dir == tmp_path / "c"


def test_code_that_makes_the_dynamic_shapes_may_use_any_dim(root):
    settings = parse(called(DIMS, 'dynamic-shapes = "pkg.digits:shapes"'), root)
    assert settings.models["digits"].dynamic_shapes == "pkg.digits:shapes"


# Each: the configuration, the key of its one problem, and the telling part of the message.
WRONG = {
    # The project's own keys
    "no table at all": ("", "tool.aoti.models", "there is no model to compile"),
    "no models": ("[tool.aoti]\njobs = 1", "tool.aoti.models", "[tool.aoti.models.digits]"),
    "empty models": ("[tool.aoti.models]", "tool.aoti.models", "there is no model to compile"),
    "models of a wrong type": ("[tool.aoti]\nmodels = 1", "tool.aoti.models", "expected a table, but it is the number"),
    "unknown key": (project("jbos = 1"), "tool.aoti.jbos", 'unknown key. Did you mean "jobs"?'),
    "unknown key with nothing near": (project("xyz = 1"), "tool.aoti.xyz", "Known keys: build-timeout, cache-dir, cache-size, include-sources"),
    "underscore for dash": (project('cache_dir = "x"'), "tool.aoti.cache_dir", 'Did you mean "cache-dir"?'),
    "key that needs quotes": (project('"a b" = 1'), 'tool.aoti."a b"', "unknown key"),
    "time limit of zero": (project("build-timeout = 0"), "tool.aoti.build-timeout", "an integer of at least 1"),
    "time limit with a unit": (project('build-timeout = "1 h"'), "tool.aoti.build-timeout", "an integer of at least 1"),
    "one variable, no list": (project('pass-environment = "A"'), "tool.aoti.pass-environment", 'such as ["MODEL_VARIANT"'),
    "every variable": (project('pass-environment = ["*"]'), "tool.aoti.pass-environment", 'it is the string "*"'),
    "a value beside the variable": (project('pass-environment = ["A=1"]'), "tool.aoti.pass-environment", '"A=1"'),
    "torch's options": (project('pass-environment = ["TORCHINDUCTOR_CPP_SIMDLEN"]'), "tool.aoti.pass-environment", "belong into `inductor-configs`"),
    "a variable that is set": (project('pass-environment = ["PYTHONHASHSEED"]'), "tool.aoti.pass-environment", "sets it itself"),
    "singular table": (declared() + "\n[tool.aoti.model.x]", "tool.aoti.model", 'Did you mean "models"?'),
    "a model's key in the project": (project('device = "cpu"'), "tool.aoti.device", "belongs to a model: write it"),
    "skip in TOML": (project("skip = true"), "tool.aoti.skip", "HATCH_AOTI_SKIP=1"),
    "sanitize in TOML": (project('sanitize = "address"'), "tool.aoti.sanitize", "HATCH_AOTI_SANITIZE"),
    "trust-cache in TOML": (project("trust-cache = true"), "tool.aoti.trust-cache", "HATCH_AOTI_TRUST_CACHE=1"),
    "package with a dash": (project('package = "my-pkg"'), "tool.aoti.package", 'Did you mean "my_pkg"?'),
    "package that is a keyword": (project('package = "a.class"'), "tool.aoti.package", "the import name of a package"),
    "package as a list": (project('package = ["a"]'), "tool.aoti.package", "but it is a list"),
    "target as a number": (project("target = 3"), "tool.aoti.target", 'such as "x86-64-v3", or a list of them'),
    "no target": (project("target = []"), "tool.aoti.target", "at least one entry, but it is an empty list"),
    "a target twice": (project('target = ["a", "b", "a"]'), "tool.aoti.target", '"a" is there twice'),
    "a target of a wrong type": (project('target = ["a", 1]'), "tool.aoti.target", "but it is the number 1"),
    "no jobs": (project("jobs = 0"), "tool.aoti.jobs", "an integer of at least 1, but it is the number 0"),
    "jobs as a string": (project('jobs = "2"'), "tool.aoti.jobs", 'but it is the string "2"'),
    "jobs as a boolean": (project("jobs = true"), "tool.aoti.jobs", "but it is the boolean true"),
    "jobs as a fraction": (project("jobs = 1.5"), "tool.aoti.jobs", "but it is the number 1.5"),
    "empty cache-dir": (project('cache-dir = ""'), "tool.aoti.cache-dir", "a folder, but it is an empty string"),
    "home of nobody": (project('cache-dir = "~no-such-user/x"'), "tool.aoti.cache-dir", "does not know"),
    "include-sources as a string": (project('include-sources = "yes"'), "tool.aoti.include-sources", "true or false"),
    "keep-intermediates as a number": (project("keep-intermediates = 1"), "tool.aoti.keep-intermediates", "true or false"),
    "a date": (project("include-sources = 2024-01-01"), "tool.aoti.include-sources", "the date or time 2024-01-01"),
    "a whole wheel tag": (
        project('platform-tag = "py3-none-manylinux_2_28_x86_64"'),
        "tool.aoti.platform-tag",
        'Did you mean "manylinux_2_28_x86_64"?',
    ),
    # Reported against other build systems as wheels that install where they cannot run (pypa/hatch#1955).
    "a tag for every platform": (project('platform-tag = "any"'), "tool.aoti.platform-tag", "expected a platform tag"),
    # Names of models
    "model name with a dash": (
        model(MODEL, "inputs = {}", name="my-net"),
        "tool.aoti.models.my-net",
        'Did you mean "my_net"?',
    ),
    "model name with a digit first": (
        model(MODEL, "inputs = {}", name="3d"),
        "tool.aoti.models.3d",
        "Python identifier: letters a-z",
    ),
    "model name with a dot": (model(MODEL, "inputs = {}", name='"a.b"'), 'tool.aoti.models."a.b"', "Python identifier"),
    "model name outside ASCII": (
        model(MODEL, "inputs = {}", name='"größe"'),
        'tool.aoti.models."größe"',
        "Python identifier",
    ),
    "keyword": (model(MODEL, "inputs = {}", name="lambda"), "tool.aoti.models.lambda", "is a Python keyword"),
    "soft keyword": (model(MODEL, "inputs = {}", name="match"), "tool.aoti.models.match", "is a Python keyword"),
    "private name": (model(MODEL, "inputs = {}", name="_net"), "tool.aoti.models._net", "start with an underscore"),
    "accessor's name": (model(MODEL, "inputs = {}", name="load"), "tool.aoti.models.load", "Choose another name"),
    "builtin": (model(MODEL, "inputs = {}", name="list"), "tool.aoti.models.list", "meaning of its own in _models.py"),
    "one name in two cases": (
        model(MODEL, "inputs = {}", name="Net") + "\n" + model(MODEL, "inputs = {}", name="net"),
        "tool.aoti.models.net",
        '"Net" and "net" are one name',
    ),
    "one name with two underscores": (
        model(MODEL, "inputs = {}", name="a_b") + "\n" + model(MODEL, "inputs = {}", name="a__b"),
        "tool.aoti.models.a_b",
        '"a__b" and "a_b" are one name',
    ),
    "a model that is no table": ('[tool.aoti.models]\nx = "pkg:Net"', "tool.aoti.models.x", "[tool.aoti.models.<name>]"),
    # Bundles
    "bundle with a dash": (declared('bundle = "my-nets.pt2"'), BUNDLE, 'Did you mean "my_nets"?'),
    "bundle as a path": (declared('bundle = "../nets"'), BUNDLE, "letters a-z, digits and _, a letter first"),
    "private bundle": (declared('bundle = "_models"'), BUNDLE, 'expected a name such as "vision"'),
    "bundle as a list": (declared('bundle = ["vision"]'), BUNDLE, 'such as "vision": letters'),
    "bundle of the whole project": (project('bundle = "vision"'), "tool.aoti.bundle", "this key belongs to a model"),
    "a bundle with the file of a model": (
        declared('bundle = "Net"\n') + model(MODEL, "inputs = {}", name="net"),
        BUNDLE,
        'the bundle "Net" and the model "net" would have one file, net.pt2. Rename one',
    ),
    "one bundle in two cases": (
        model(MODEL, "inputs = {}", 'bundle = "Vision"', name="a") + "\n" + declared('bundle = "vision"'),
        BUNDLE,
        '"Vision" (of a) and "vision" are one name',
    ),
    "a bundle for two devices": (
        model(MODEL, "inputs = {}", 'bundle = "nets"', 'device = "cuda"', name="a") + "\n" + declared('bundle = "nets"'),
        BUNDLE,
        'for one device, but a has `device = "cuda"` and digits "cpu"',
    ),
    # model, weights
    "no model": (model("inputs = {}"), "tool.aoti.models.digits.model", "missing; write where the model is defined"),
    "model without colon": (
        model('model = "pkg.digits.Net"', "inputs = {}"),
        "tool.aoti.models.digits.model",
        'Did you mean "pkg.digits:Net"?',
    ),
    "model as a file": (
        model('model = "pkg/digits.py:Net"', "inputs = {}"),
        "tool.aoti.models.digits.model",
        'expected "module:attribute"',
    ),
    "model as a call": (
        model('model = "pkg.digits:Net()"', "inputs = {}"),
        "tool.aoti.models.digits.model",
        'expected "module:attribute", such as "example_project.digits:DigitsNet"',
    ),
    "empty model": (model('model = ""', "inputs = {}"), "tool.aoti.models.digits.model", "but it is an empty string"),
    "weights as a list": (declared("weights = []"), "tool.aoti.models.digits.weights", "but it is an empty list"),
    "weights missing (pypa/hatch#1946)": (
        declared('weights = "weights/no.pt"'),
        "tool.aoti.models.digits.weights",
        'there is no file "weights/no.pt"',
    ),
    "weights that are a folder": (
        declared('weights = "weights/folder.pt"'),
        "tool.aoti.models.digits.weights",
        "is a folder",
    ),
    "weights of another format": (
        declared('weights = "weights/net.onnx"'),
        "tool.aoti.models.digits.weights",
        "ends in one of .safetensors, .pt, .pth, .bin, .ckpt, .index.json",
    ),
    "weights outside": (
        declared('weights = "../outside.pt"'),
        "tool.aoti.models.digits.weights",
        "below the project's root folder",
    ),
    "weights with an absolute path": (
        declared('weights = "/data/net.pt"'),
        "tool.aoti.models.digits.weights",
        "A wheel that is built from the sdist would lack any other file",
    ),
    "weights linked from outside": (
        declared('weights = "weights/link.pt"'),
        "tool.aoti.models.digits.weights",
        "is a link to a file outside",
    ),
    # inputs, dims, dynamic-shapes
    "no inputs": (model(MODEL), "tool.aoti.models.digits.inputs", "missing; write the inputs of forward"),
    "inputs as a list": (model(MODEL, "inputs = []"), "tool.aoti.models.digits.inputs", "a table of inputs, or the"),
    "inputs without colon": (
        model(MODEL, 'inputs = "pkg.example"'),
        "tool.aoti.models.digits.inputs",
        'Did you mean "pkg:example"?',
    ),
    "an input that is no table": (
        model(MODEL, "inputs = { image = [1, 2] }"),
        "tool.aoti.models.digits.inputs.image",
        'a table such as { shape = ["batch", 8], dtype = "float32" }, but it is a list',
    ),
    "an input that is no parameter": (
        model(MODEL, "inputs = { in-put = { shape = [] } }"),
        "tool.aoti.models.digits.inputs.in-put",
        "the name of this input must be a Python identifier",
    ),
    "no shape": (image('dtype = "int8"'), "tool.aoti.models.digits.inputs.image.shape", "missing; write its sizes"),
    "shape as a number": (image("shape = 3"), "tool.aoti.models.digits.inputs.image.shape", "expected a list of sizes"),
    "negative size": (image("shape = [-1]"), "tool.aoti.models.digits.inputs.image.shape", "the number -1 is in it"),
    "boolean size": (image("shape = [true]"), "tool.aoti.models.digits.inputs.image.shape", "the boolean true is in it"),
    "size in quotes": (image('shape = ["3"]'), "tool.aoti.models.digits.inputs.image.shape", "Write the number 3"),
    "expression": (image('shape = ["2*n"]'), "tool.aoti.models.digits.inputs.image.shape", "depends on others"),
    "undeclared dim": (
        image('shape = ["batch"]'),
        "tool.aoti.models.digits.inputs.image.shape",
        "Declare it, as in dims = { batch = { min = 1, max = 1024 } }",
    ),
    "misspelled dim": (
        model(MODEL, 'inputs = { image = { shape = ["bacth"] } }', DIMS),
        "tool.aoti.models.digits.inputs.image.shape",
        '"bacth" is not in the `dims` of this model. Did you mean "batch"?',
    ),
    "unknown key of an input": (
        image('shape = [], dtyp = "int8"'),
        "tool.aoti.models.digits.inputs.image.dtyp",
        'Did you mean "dtype"?',
    ),
    "unknown dtype": (
        image('shape = [], dtype = "flaot32"'),
        "tool.aoti.models.digits.inputs.image.dtype",
        'Did you mean "float32"?',
    ),
    "dtype as code": (
        image('shape = [], dtype = "torch.int64"'),
        "tool.aoti.models.digits.inputs.image.dtype",
        'Write "int64".',
    ),
    "dtype by another name": (
        image('shape = [], dtype = "long"'),
        "tool.aoti.models.digits.inputs.image.dtype",
        'Write "int64".',
    ),
    "high of a float": (image("shape = [], high = 5"), "tool.aoti.models.digits.inputs.image.high", "only integer inputs"),
    "high of a boolean": (
        image('shape = [], high = 2, dtype = "bool"'),
        "tool.aoti.models.digits.inputs.image.high",
        "this one is bool",
    ),
    "high beyond the dtype": (
        image('shape = [], high = 200, dtype = "int8"'),
        "tool.aoti.models.digits.inputs.image.high",
        "at most 128, the bound of int8, but it is 200",
    ),
    "high of zero": (
        image('shape = [], high = 0, dtype = "int8"'),
        "tool.aoti.models.digits.inputs.image.high",
        "at least 1",
    ),
    "a dim that is no table": (
        model(MODEL, "inputs = {}", "dims = { batch = 3 }"),
        "tool.aoti.models.digits.dims.batch",
        "a table such as { min = 1, max = 1024 }, but it is the number 3",
    ),
    "a dim that is no identifier": (
        called('dims = { "batch size" = {} }', 'dynamic-shapes = "pkg:shapes"'),
        'tool.aoti.models.digits.dims."batch size"',
        "the name of this dim must be a Python identifier",
    ),
    "min above max": (
        model(MODEL, INPUTS, "dims = { batch = { min = 9, max = 8 } }"),
        "tool.aoti.models.digits.dims.batch.min",
        "the smallest size, 9, is above the largest, which is 8",
    ),
    "max below the default min": (
        model(MODEL, INPUTS, "dims = { batch = { max = 0 } }"),
        "tool.aoti.models.digits.dims.batch.min",
        "the smallest size, 1, is above the largest, which is 0",
    ),
    "a dim of one size": (
        model(MODEL, INPUTS, "dims = { batch = { min = 4, max = 4 } }"),
        "tool.aoti.models.digits.dims.batch.min",
        "write the number in the shape",
    ),
    "negative min": (
        model(MODEL, INPUTS, "dims = { batch = { min = -1, max = 8 } }"),
        "tool.aoti.models.digits.dims.batch.min",
        "an integer of at least 0",
    ),
    "max beyond 64 bits": (
        model(MODEL, INPUTS, f"dims = {{ batch = {{ max = {2**63} }} }}"),
        "tool.aoti.models.digits.dims.batch.max",
        "an integer of at most 9223372036854775807",
    ),
    "unknown key of a dim": (
        model(MODEL, INPUTS, "dims = { batch = { maximum = 8 } }"),
        "tool.aoti.models.digits.dims.batch.maximum",
        'Did you mean "max"?',
    ),
    "unused dim": (
        model(MODEL, INPUTS, "dims = { batch = {}, width = {} }"),
        "tool.aoti.models.digits.dims.width",
        'nothing uses this dim. Write "width" in the shape of an input, or remove it.',
    ),
    "unused dim of a callable": (
        called(DIMS),
        "tool.aoti.models.digits.dims.batch",
        'Write "batch" in `dynamic-shapes`',
    ),
    "dynamic-shapes beside shapes": (
        declared('dynamic-shapes = { image = { 0 = "batch" } }'),
        "tool.aoti.models.digits.dynamic-shapes",
        "declared inputs say this in their shapes",
    ),
    "dynamic-shapes without an argument": (
        called(DIMS, 'dynamic-shapes = { 0 = "batch" }'),
        "tool.aoti.models.digits.dynamic-shapes",
        "name the argument first",
    ),
    "dynamic-shapes of a wrong type": (
        called("dynamic-shapes = true"),
        "tool.aoti.models.digits.dynamic-shapes",
        'a table such as { image = { 0 = "batch" } }, or "module:attribute"',
    ),
    "dim in place of a table": (
        called(DIMS, 'dynamic-shapes = { x = ["batch"] }'),
        "tool.aoti.models.digits.dynamic-shapes.x[0]",
        "a table from the index of a dimension to a dim",
    ),
    "undeclared dim in dynamic-shapes": (
        called(DIMS, 'dynamic-shapes = { x = { 1 = "bach" } }'),
        "tool.aoti.models.digits.dynamic-shapes.x.1",
        'Did you mean "batch"?',
    ),
    "size in dynamic-shapes": (
        called("dynamic-shapes = { x = { 0 = 8 } }"),
        "tool.aoti.models.digits.dynamic-shapes.x.0",
        "expected the name of a dim, but it is the number 8",
    ),
    # The rest of a model
    "a project's key in a model": (
        declared('target = "native"'),
        "tool.aoti.models.digits.target",
        "for the whole project: write it under [tool.aoti]",
    ),
    "unknown key of a model": (
        declared("num_runners = 2"),
        "tool.aoti.models.digits.num_runners",
        'Did you mean "num-runners"?',
    ),
    "numbered device": (declared('device = "cuda:0"'), "tool.aoti.models.digits.device", 'Did you mean "cuda"?'),
    "unknown device": (declared('device = "tpu"'), "tool.aoti.models.digits.device", '"cpu", "cuda", "auto"'),
    "negative seed": (declared("seed = -1"), "tool.aoti.models.digits.seed", "at least 0, but it is the number -1"),
    "seed beyond 64 bits": (declared(f"seed = {2**63}"), "tool.aoti.models.digits.seed", "at most 9223372036854775807"),
    "verify as a number": (declared("verify = 0"), "tool.aoti.models.digits.verify", "true or false, but it is the"),
    "negative tolerance": (declared("rtol = -0.1"), "tool.aoti.models.digits.rtol", "a finite number of at least 0"),
    "boundless tolerance": (declared("atol = inf"), "tool.aoti.models.digits.atol", "a finite number of at least 0"),
    "tolerance that is no number": (declared("atol = nan"), "tool.aoti.models.digits.atol", "a finite number"),
    "constants of no kind": (declared('constants = "outside"'), "tool.aoti.models.digits.constants", '"external"'),
    "prepacked constants outside": (
        declared('constants = "external"\noptimize = true'),
        "tool.aoti.models.digits.constants",
        "cannot be prepacked",
    ),
    "frozen constants outside": (
        declared('constants = "external"\ninductor-configs = { freezing = true }'),
        "tool.aoti.models.digits.constants",
        "cannot be prepacked",
    ),
    "optimize as a level": (declared("optimize = 3"), "tool.aoti.models.digits.optimize", "true or false"),
    "cache size in words": (project('cache-size = "plenty"'), "tool.aoti.cache-size", '"10 GB"'),
    "negative cache size": (project("cache-size = -1"), "tool.aoti.cache-size", '"512 MiB"'),
    "no runners": (declared("num-runners = 0"), "tool.aoti.models.digits.num-runners", "an integer of at least 1"),
    "inductor-configs as a list": (
        declared("inductor-configs = [1]"),
        "tool.aoti.models.digits.inductor-configs",
        "expected a table, but it is a list",
    ),
    "date as an inductor option": (
        declared("inductor-configs = { max_autotune_gemm_backends = 2024-01-01 }"),
        "tool.aoti.models.digits.inductor-configs.max_autotune_gemm_backends",
        "but it is the date or time 2024-01-01",
    ),
    "an inductor option that is decided": (
        declared("inductor-configs = { cpp = { march = 'native' } }"),
        "tool.aoti.models.digits.inductor-configs.cpp.march",
        "choose one with `tool.aoti.target`. Remove it.",
    ),
    "inductor option given as a value and as a table": (
        declared('inductor-configs = { "cpp.x" = 1, cpp = { x = { y = 2 } } }'),
        "tool.aoti.models.digits.inductor-configs.cpp.x.y",
        "given twice",
    ),
    "inductor option given twice": (
        declared('inductor-configs = { cpp.max_horizontal_fusion_size = 1, "cpp.max_horizontal_fusion_size" = 2 }'),
        "tool.aoti.models.digits.inductor-configs.cpp.max_horizontal_fusion_size",
        "given twice",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("text", "key", "telling"), WRONG.values(), ids=WRONG)
def test_a_mistake_is_reported_once_at_its_key_with_what_to_do(text, key, telling, root):
    found = problems(text, root)
    assert list(found) == [key]
    assert telling in found[key]


def test_a_bundle_may_be_called_like_a_model_in_it_and_have_one_model(root):
    settings = parse(declared('bundle = "digits"'), root)
    assert settings.models["digits"].bundle == "digits"


def test_missing_weights_say_how_gitignore_keeps_them_out_of_an_sdist(root):
    """The wheel of an sdist that lacks git-ignored files was built without them (pypa/hatch#1946)."""
    (message,) = problems(declared('weights = "weights/no.pt"'), root).values()
    assert ".gitignore" in message
    assert "tool.hatch.build.targets.sdist.artifacts" in message


def test_all_mistakes_are_reported_together_in_the_order_of_their_keys(root):
    text = (
        project('jobs = "many"\ntraget = "native"')
        + 'seed = -1\ndevice = "gpu"\n'
        + model('model = "nowhere"', 'inputs = { x = { shape = ["n", true], dtype = "f32" } }', name="other")
    )
    found = problems(text, root, HATCH_AOTI_INCLUDE_SOURCES="perhaps")
    assert list(found) == [
        "HATCH_AOTI_INCLUDE_SOURCES",
        "tool.aoti.jobs",
        "tool.aoti.models.digits.device",
        "tool.aoti.models.digits.seed",
        "tool.aoti.models.other.inputs.x.dtype",
        "tool.aoti.models.other.inputs.x.shape",
        "tool.aoti.models.other.model",
        "tool.aoti.traget",
    ]


def test_the_whole_error_is_text_for_a_terminal(root):
    with pytest.raises(SettingsError) as caught:
        parse(project('jobs = "many"'), root)
    assert str(caught.value) == (
        "1 mistake in the configuration:\n"
        '  - `tool.aoti.jobs`: expected an integer of at least 1, but it is the string "many".'
    )


@pytest.mark.parametrize("name", sorted(RESERVED_NAMES))
def test_no_model_takes_a_name_that_the_accessor_needs(name, root):
    assert f"tool.aoti.models.{name}" in problems(model(MODEL, "inputs = {}", name=name), root)


# --- Environment ---


def test_the_environment_wins_over_toml(root):
    settings = parse(
        FULL,
        root,
        HATCH_AOTI_PACKAGE="other",
        HATCH_AOTI_TARGET="x86-64-v2, native",
        HATCH_AOTI_JOBS="3",
        HATCH_AOTI_CACHE_DIR="/var/cache/aoti",
        HATCH_AOTI_PLATFORM_TAG="linux_x86_64",
        HATCH_AOTI_INCLUDE_SOURCES="no",
        HATCH_AOTI_KEEP_INTERMEDIATES="0",
        HATCH_AOTI_SKIP="1",
        HATCH_AOTI_TRUST_CACHE="yes",
    )
    assert dataclasses.replace(settings, models={}) == Settings(
        models={},
        package="other",
        target=("x86-64-v2", "native"),
        jobs=3,
        cache_dir=Path("/var/cache/aoti"),
        platform_tag="linux_x86_64",
        include_sources=False,
        keep_intermediates=False,
        skip=True,
        trust_cache=True,
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        *[(word, True) for word in ("1", "true", "YES", "On", " true ")],
        *[(word, False) for word in ("0", "False", "no", "OFF", "", " ")],
    ],
)
def test_a_boolean_variable_has_the_usual_words_and_empty_is_unset(text, expected, root):
    assert parse(declared(), root, HATCH_AOTI_SKIP=text).skip is expected


def test_empty_variables_leave_toml_as_it_is(root):
    keys = ("PACKAGE", "TARGET", "JOBS", "CACHE_DIR", "PLATFORM_TAG", "INCLUDE_SOURCES", "KEEP_INTERMEDIATES")
    assert parse(FULL, root, **{f"HATCH_AOTI_{key}": "" for key in keys}) == parse(FULL, root)


@pytest.mark.parametrize(
    ("name", "text", "telling"),
    [
        ("HATCH_AOTI_PACKAGE", "my-pkg", 'Did you mean "my_pkg"?'),
        ("HATCH_AOTI_TARGET", "x86-64-v3,", "but it is an empty string"),
        ("HATCH_AOTI_TARGET", "native,native", '"native" is there twice'),
        ("HATCH_AOTI_JOBS", "two", 'an integer of at least 1, but it is the string "two"'),
        ("HATCH_AOTI_JOBS", "0", "an integer of at least 1, but it is the number 0"),
        ("HATCH_AOTI_PLATFORM_TAG", "Linux-x86_64", "expected a platform tag"),
        ("HATCH_AOTI_INCLUDE_SOURCES", "2", 'true or false, but it is the string "2"'),
        ("HATCH_AOTI_KEEP_INTERMEDIATES", "please", 'true or false, but it is the string "please"'),
        ("HATCH_AOTI_BUILD_TIMEOUT", "1h", 'an integer of at least 1, but it is the string "1h"'),
        ("HATCH_AOTI_PASS_ENVIRONMENT", "MODEL_*,", "but it is an empty string"),
        ("AOT_INDUCTOR_DEBUG_COMPILE", "yes", 'must be 0 or 1, but it is "yes"'),
        ("HATCH_AOTI_SKIP", "maybe", 'true or false, but it is the string "maybe"'),
        ("HATCH_AOTI_JOB", "2", 'unknown variable. Did you mean "JOBS"? hatch-aoti reads HATCH_AOTI_BUILD_TIMEOUT, '),
        ("HATCH_AOTI_XYZ", "2", "unknown variable. hatch-aoti reads"),
    ],
)
def test_a_wrong_variable_is_reported_by_its_name(name, text, telling, root):
    found = problems(declared(), root, **{name: text})
    assert list(found) == [name]
    assert telling in found[name]


def test_reading_settings_does_not_need_torch(root, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert parse(declared("inductor-configs = { max_autotune = true }"), root)


# --- Values for other processes ---


@pytest.mark.parametrize("name", ["digits", "ranker"])
def test_model_settings_survive_json_and_pickle(name, root):
    settings = parse(FULL, root).models[name]
    assert ModelSettings.from_json(json.loads(json.dumps(settings.to_json()))) == settings
    assert settings.to_json() == json.loads(json.dumps(settings.to_json()))
    assert pickle.loads(pickle.dumps(settings)) == settings


def reverse(value):
    if isinstance(value, dict):
        return {key: reverse(value[key]) for key in reversed(value)}
    return value


def test_the_order_of_toml_tables_changes_nothing(root):
    config = tomllib.loads(FULL)
    settings = parse_settings(config, root=root, environ={})
    other = parse_settings(reverse(config), root=root, environ={})
    assert list(settings.models) == list(other.models) == ["digits", "ranker"]
    for name in settings.models:
        assert json.dumps(settings.models[name].to_json()) == json.dumps(other.models[name].to_json())
        assert repr(settings.models[name]) == repr(other.models[name])


# --- The hook's own table ---


def test_the_hook_table_keeps_hatchlings_keys():
    config = {"dependencies": ["x"], "enable-by-default": False}
    assert check_hook_config({**config, "require-runtime-dependencies": True, "require-runtime-features": []}) == []


def test_settings_in_the_hook_table_are_sent_to_their_place():
    found = check_hook_config({"target": "native", "foo": 1, "dependencies": []})
    prefix = "tool.hatch.build.targets.wheel.hooks.aoti"
    assert [problem.key for problem in found] == [f"{prefix}.foo", f"{prefix}.target"]
    assert found[0].message == "this table only turns the hook on; settings live under [tool.aoti]."
    assert "Write it as `tool.aoti.target`." in found[1].message


def test_settings_import_neither_torch_nor_hatchling(root):
    code = f"""
        import sys, tomllib, pathlib
        from hatch_aoti.settings.reader import parse_settings
        parse_settings(tomllib.loads({FULL!r}), root=pathlib.Path({str(root)!r}), environ={{}})
        print([name for name in ("torch", "hatchling", "pydantic") if name in sys.modules])
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True, cwd=root
    )
    assert done.stdout == "[]\n"
