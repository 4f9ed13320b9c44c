"""What a project may set, as values."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

from hatch_aoti.settings.debugging import Debugging

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = ["Dim", "ModelSettings", "Settings", "TensorInput", "is_plain", "plain"]


@dataclasses.dataclass(frozen=True)
class ModelSettings:
    """One table `[tool.aoti.models.<name>]`.

    `model` is `module:attribute`. `weights` is a file relative to the project's root, with `/` between folders.
    `exported` is such a file, too: a saved program, which stands in place of `model` (then empty) and of everything
    that is said about its inputs.
    `inputs` is `module:attribute` of a callable, or the declared inputs by the name of forward's parameter.
    `dynamic_shapes` is None, `module:attribute`, or nested dicts and lists in the shape of the inputs whose leaves
    map the index of a dimension, as a string of digits, to the name of a dim; an empty dict is an input without
    dynamic dimensions. `inductor_configs` maps dotted names of torch's options to TOML values. `rtol` and `atol` are
    None where the tolerance follows from the dtype. `optimize` says whether weights are folded and prepacked, and
    `constants` (`"embedded"` or `"external"`) where they are; None leaves either to a rule (`compiler.optimize`).
    `bundle` is the stem of the file that the model shares with others, or None for a file of its own.
    """

    name: str
    model: str
    inputs: str | Mapping[str, TensorInput]
    weights: str | None = None
    dims: Mapping[str, Dim] = dataclasses.field(default_factory=dict)
    dynamic_shapes: str | dict[str, Any] | list[Any] | None = None
    device: str = "cpu"
    inductor_configs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    seed: int = 0
    verify: bool = True
    rtol: float | None = None
    atol: float | None = None
    num_runners: int = 1
    optimize: bool | None = None
    constants: str | None = None
    exported: str | None = None
    bundle: str | None = None

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

    `package` is a dotted import name, or None for the wheel's only package. `target` is empty for the portable
    default. `jobs` is None where the build chooses. `cache_size` is in bytes: what a build leaves in the cache at most,
    its own artifacts apart. `cache_dir` is absolute, or None for the platform's own cache directory. `pass_environment`
    has names of variables, and globs, that models and compilers see beside those that they see in any case.
    `build_timeout` is for each model, in seconds. `skip` and `trust_cache` (use a cache that others can write to) come
    from the environment alone, `debugging` from torch's own variables. `models` is sorted by name.
    """

    models: Mapping[str, ModelSettings]
    package: str | None = None
    target: tuple[str, ...] = ()
    jobs: int | None = None
    cache_dir: Path | None = None
    cache_size: int = 10 * 1000**3
    platform_tag: str | None = None
    include_sources: bool = False
    keep_intermediates: bool = False
    pass_environment: tuple[str, ...] = ()
    build_timeout: int | None = None
    skip: bool = False
    trust_cache: bool = False
    debugging: Debugging = dataclasses.field(default_factory=Debugging)


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
    """The sizes that a dynamic dimension may have: from `min` to `max`, both included; None is no upper limit."""

    min: int = 1
    max: int | None = None


@dataclasses.dataclass(frozen=True)
class TensorInput:
    """One declared input: a size or the name of a dim for each dimension, and one of `DTYPES`.

    `high` is the exclusive upper bound of the example data of an integer input, such as the number of rows of an
    embedding. The default suits every mask and every index into a table of more than one row.
    """

    shape: tuple[int | str, ...]
    dtype: str = "float32"
    high: int = 2
