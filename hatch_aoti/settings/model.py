"""What a project may set, as values: each field of these dataclasses declares a setting (see `declaration`)."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

from hatch_aoti.settings import paths, values
from hatch_aoti.settings.debugging import SANITIZERS, Debugging
from hatch_aoti.settings.declaration import setting
from hatch_aoti.settings.environment import is_settled
from hatch_aoti.settings.inductor import options_schema

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = ["Dim", "ModelSettings", "Settings", "TensorInput", "is_plain", "plain"]


def _named(definition: str, name: str = f"^{values.IDENTIFIER}$") -> dict[str, Any]:
    """Return what the schema says of a table whose keys are names, and whose values are tables of one kind."""
    return {"propertyNames": {"pattern": name}, "additionalProperties": {"$ref": f"#/definitions/{definition}"}}


@dataclasses.dataclass(frozen=True)
class ModelSettings:
    """One table `[tool.aoti.models.<name>]`.

    `model` is empty, and so are `inputs` and `dims`, where a saved program (`exported`) stands in its place. Files are
    relative to the project's root, with `/` between folders. `inputs` is `module:attribute` of a callable, or the
    declared inputs by the name of forward's parameter. `dynamic_shapes` is None, `module:attribute`, or nested dicts
    and lists in the shape of the inputs whose leaves map the index of a dimension, as a string of digits, to the name
    of a dim; an empty dict is an input without dynamic dimensions. `inductor_configs` maps dotted names of torch's
    options to TOML values (see `inductor`). `rtol` and `atol` are None where the tolerance follows from the dtype,
    `optimize` and `constants` where a rule decides (`compiler.optimize`), and `bundle` for a file of the model's own.
    """

    name: str
    model: str = setting(
        values.of_module("example_project.digits:DigitsNet"),
        "`module:attribute` of the model: an `nn.Module` class, an instance, or a function without arguments that "
        "returns one.",
        since="0.1.0",
        default_text="required, or `exported`",
        missing='write where the model is defined, such as model = "example_project.digits:DigitsNet"; or name a '
        'program saved by torch.export.save, as in exported = "programs/digits.pt2".',
        in_program="the program is the model, with its code",
    )
    inputs: str | Mapping[str, TensorInput] = setting(
        values.of_module(
            "example_project.ranker:example_inputs",
            "a table of inputs, or the callable that makes them as ",
            "table, or ",
            [{"type": "object", **_named("input")}],
        ),
        "A table with a `shape`, and perhaps a `dtype`, for each parameter of `forward`; or `module:attribute` of a "
        "function that returns example inputs: a tuple of args, a dict of kwargs, or `(args, kwargs)`.",
        since="0.1.0",
        default_text="required, or `exported`",
        missing='write the inputs of forward, such as inputs = { image = { shape = ["batch", 1, 8, 8] } }, or the '
        'callable that makes them, as "module:attribute".',
        in_program="the inputs are the example inputs in the program",
    )
    exported: str | None = setting(
        paths.project_file("programs/encoder.pt2", ".pt2"),
        "A file that `torch.export.save` wrote, perhaps on another machine. It stands in place of `model`, `weights`, "
        "`inputs`, `dims` and `dynamic-shapes`.",
        see="docs/saved-programs.md",
        since="0.1.0",
        default=None,
    )
    weights: str | None = setting(
        paths.project_file(
            "weights/digits.safetensors", *(".safetensors", ".pt", ".pth", ".bin", ".ckpt", ".index.json"), keyed=True
        ),
        "A file with the model's state dict: `.safetensors`, the `.index.json` of one in several files, or a `.pt`, "
        "`.pth`, `.bin` or `.ckpt`, which are loaded with `weights_only=True`. `checkpoint.pt#ema` is the state dict "
        "under the key `ema`.",
        since="0.1.0",
        default=None,
        default_text="the module's own",
        in_program="the weights are in the program",
    )
    dims: Mapping[str, Dim] = setting(
        values.table(_named("dim"), "table"),
        "The smallest and the largest size (`min`, `max`) of each dimension that has a name.",
        since="0.1.0",
        default_factory=dict,
        in_program="the ranges of sizes are in the program",
    )
    dynamic_shapes: str | dict[str, Any] | list[Any] | None = setting(
        values.of_module(
            "example_project.ranker:dynamic_shapes",
            'a table such as { image = { 0 = "batch" } }, or ',
            "table, or ",
            [
                {"type": "object", "additionalProperties": {"$ref": "#/definitions/shapes"}},
                {"type": "array", "items": {"$ref": "#/definitions/shapes"}},
            ],
        ),
        'Which dimensions are dynamic where a function makes the `inputs`: `{ x = { 0 = "batch" } }`, or '
        "`module:attribute` of the same in the form of `torch.export`.",
        since="0.1.0",
        default=None,
        in_program="which sizes are dynamic is in the program",
    )
    device: str = setting(
        values.choice("cpu", "cuda", "auto"),
        "What the model is compiled for; `auto` is cuda where the build finds a GPU. CUDA is untested.",
        see="docs/devices.md",
        since="0.1.0",
        default="cpu",
    )
    optimize: bool | None = setting(
        values.flag,
        'Whether weights are folded and prepacked ("freezing"), and small linear layers multiplied inline; with false '
        "the graph stays as it is.",
        see="docs/how-it-works.md#what-makes-compiled-code-fast",
        since="0.1.0",
        default=None,
        default_text="weights are frozen if a convolution or matrix product has one of 65 536 elements or more; small "
        "linear layers are inline",
    )
    constants: str | None = setting(
        values.choice("embedded", "external"),
        "Where weights are: in the compiled object, or in one memory-mapped file that all processes and CPU variants "
        "share, identical tensors once.",
        since="0.1.0",
        default=None,
        default_text='`"external"` above 256 MiB',
    )
    bundle: str | None = setting(
        values.bundle,
        'The name of a file that the model shares with others of the same `bundle`: `"vision"` gives one `vision.pt2`.',
        since="0.1.0",
        default=None,
        default_text="a file of its own",
    )
    inductor_configs: Mapping[str, Any] = setting(
        values.table(options_schema(), "table"),
        "Options of `torch._inductor.config`: `{ max_autotune = true }`.",
        since="0.1.0",
        default_factory=dict,
    )
    seed: int = setting(
        values.integer(0),
        "The seed of weights and of everything else that is random at build.",
        since="0.1.0",
        default=0,
    )
    verify: bool = setting(
        values.flag,
        "Whether the compiled model is compared with eager before it may ship.",
        since="0.1.0",
        default=True,
    )
    rtol: float | None = setting(
        values.tolerance,
        "How far compiled and eager may be apart, relative to eager.",
        since="0.1.0",
        default=None,
        default_text="by dtype",
    )
    atol: float | None = setting(
        values.tolerance,
        "How far compiled and eager may be apart beyond that.",
        since="0.1.0",
        default=None,
        default_text="by dtype",
    )
    num_runners: int = setting(
        values.integer(1),
        "Calls that run at the same time in C++. In Python they take turns, since torch 2.13 holds Python's lock.",
        since="0.1.0",
        default=1,
    )

    @property
    def weights_file(self) -> str | None:
        """The file that `weights` names."""
        return None if self.weights is None else paths.split_key(self.weights)[0]

    @property
    def weights_key(self) -> str:
        """The key in that file; empty if none is named."""
        return "" if self.weights is None else paths.split_key(self.weights)[1]

    def files(self, root: Path) -> list[str]:
        """Return the files below `root` that the model is made of: weights, all parts of them, and saved programs."""
        named = [file for file in (self.weights_file, self.exported) if file is not None]
        return [part for file in named for part in (file, *paths.shards(root, file))]

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON data from which `from_json` makes an equal object.

        Equal settings give the same JSON text, so its hash may stand for them.
        """
        data: dict[str, Any] = plain(self)
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ModelSettings:
        """Return the settings that `to_json` turned into `data`."""
        inputs, dims = data["inputs"], data["dims"]
        if not isinstance(inputs, str):
            inputs = {name: TensorInput(**{**item, "shape": tuple(item["shape"])}) for name, item in inputs.items()}
        return cls(**{**data, "inputs": inputs, "dims": {name: Dim(**item) for name, item in dims.items()}})


@dataclasses.dataclass(frozen=True)
class Settings:
    """The whole of `[tool.aoti]`, with the environment's overrides applied.

    `models` is sorted by name. `package` is None for the wheel's only package, `target` empty for the portable default,
    `jobs` None where the build chooses. `cache_size` is in bytes, and what a build leaves in the cache at most, its own
    artifacts apart. `cache_dir` is absolute, or None for the platform's own cache directory. `debugging` comes from
    `HATCH_AOTI_SANITIZE` and torch's own variables.
    """

    models: Mapping[str, ModelSettings] = setting(
        values.table({"minProperties": 1, **_named("model", "^[A-Za-z][A-Za-z0-9_]*$")}, "table of tables"),
        "A table for each model, `[tool.aoti.models.<name>]`; users import the model by that name.",
        since="0.1.0",
    )
    package: str | None = setting(
        values.package,
        "The import package that receives `_models.py`.",
        since="0.1.0",
        default=None,
        default_text="the wheel's only package",
        has_variable=True,
        shapes_wheel=True,
    )
    target: tuple[str, ...] = setting(
        values.cpu_baselines,
        "CPU baseline: `x86-64-v2`, `x86-64-v3`, `x86-64-v4`; `armv8-a`, `armv8.2-a`; `apple-m1`; `native`. A list "
        "compiles for each, and the best that a CPU can run is picked when a model is loaded.",
        since="0.1.0",
        default=(),
        default_text="`x86-64-v3` (AVX2), `armv8-a`, `apple-m1`",
        has_variable=True,
        shapes_wheel=True,
    )
    jobs: int | None = setting(
        values.integer(1),
        "Models that are compiled at once.",
        since="0.1.0",
        default=None,
        default_text="what cores and memory allow, within the limits of a container",
        has_variable=True,
    )
    build_timeout: int | None = setting(
        values.integer(1),
        "Seconds that one model may take before it is stopped.",
        since="0.1.0",
        default=None,
        has_variable=True,
    )
    pass_environment: tuple[str, ...] = setting(
        values.environment_variables(is_settled),
        "Environment variables that models and compilers see beside those that they need, names or globs: "
        '`["MODEL_VARIANT", "OMP_*"]`.',
        see="docs/how-it-works.md#the-environment-of-a-model",
        since="0.1.0",
        default=(),
        has_variable=True,
        shapes_wheel=True,
    )
    cache_dir: Path | None = setting(
        paths.folder,
        "Where finished artifacts are kept.",
        since="0.1.0",
        default=None,
        default_text="the platform's cache directory",
        has_variable=True,
    )
    cache_size: int = setting(
        values.size,
        'What the cache holds at most, such as `"10 GB"`; the longest unused goes first.',
        since="0.1.0",
        default=10 * 1000**3,
        default_text='`"10 GB"`',
        has_variable=True,
    )
    platform_tag: str | None = setting(
        values.platform_tag,
        "The wheel's platform tag.",
        since="0.1.0",
        default=None,
        default_text="the lowest that the compiled objects and torch admit",
        has_variable=True,
        shapes_wheel=True,
    )
    include_sources: bool = setting(
        values.flag,
        "Whether the generated C++ is put into the wheel, too.",
        since="0.1.0",
        default=False,
        has_variable=True,
        shapes_wheel=True,
    )
    keep_intermediates: bool = setting(
        values.flag,
        "Compile anew, and keep the generated C++ and the compiler's commands in a folder that the build names.",
        see="docs/debugging.md",
        since="0.1.0",
        default=False,
        has_variable=True,
    )
    skip: bool = setting(
        values.flag,
        "Build a wheel without compiled models, which says so loudly, at build and when `_models` is imported.",
        since="0.1.0",
        default=False,
        only_variable="skipping is for a single build: set the variable HATCH_AOTI_SKIP=1 instead.",
    )
    trust_cache: bool = setting(
        values.flag,
        "Take a cache that others can write to, which is otherwise refused.",
        see="docs/cli.md#hatch-aoti-cache---trim-size----clear---cache-dir-dir",
        since="0.1.0",
        default=False,
        only_variable="a cache is trusted where it is: set the variable HATCH_AOTI_TRUST_CACHE=1 there instead.",
    )
    debugging: Debugging = setting(
        values.choice(*SANITIZERS),
        "Compile models with the C++ compiler's sanitizers, as a debug build.",
        see="docs/debugging.md#the-variables",
        since="0.1.0",
        key="sanitize",
        default_factory=Debugging,
        default_text="`0`, none",
        only_variable="a debug build is a single build: set the variable HATCH_AOTI_SANITIZE instead.",
    )


def plain(value: Any) -> Any:
    """Return dataclasses and tuples as JSON has them, with the keys of every mapping sorted."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return plain({field.name: getattr(value, field.name) for field in dataclasses.fields(value)})
    if isinstance(value, dict):
        return {key: plain(value[key]) for key in sorted(value)}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


def is_plain(value: Any) -> bool:
    """Whether JSON has a value: TOML also has dates, infinities and NaN."""
    if isinstance(value, dict | list):
        return all(is_plain(item) for item in (value.values() if isinstance(value, dict) else value))
    return isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value))


@dataclasses.dataclass(frozen=True)
class Dim:
    """The sizes that a dynamic dimension may have; `max` is None without an upper limit."""

    min: int = setting(
        values.integer(0),
        "The smallest size of the dimension.",
        since="0.1.0",
        default=1,
    )
    max: int | None = setting(
        values.integer(0),
        "The largest size of the dimension.",
        since="0.1.0",
        default=None,
    )


@dataclasses.dataclass(frozen=True)
class TensorInput:
    """One declared input. The default of `high` suits every mask and every index into a table of more than one row."""

    shape: tuple[int | str, ...] = setting(
        values.shape,
        "The size of each dimension: a number, or the name of a dim. `[]` is a scalar.",
        since="0.1.0",
        missing='write its sizes, such as shape = ["batch", 3, 224, 224]; [] is a scalar.',
    )
    dtype: str = setting(
        values.dtype,
        "The name of a dtype of torch.",
        since="0.1.0",
        default="float32",
    )
    high: int = setting(
        values.integer(1),
        "The exclusive upper bound of example values of an integer input, such as the number of rows of an embedding.",
        since="0.1.0",
        default=2,
    )
