"""`[tool.aoti]` as a JSON schema, for editors and for validate-pyproject.

It is generated from the declarations of the settings, and kept as a file that is packaged. It refuses what is wrong in
itself; what depends on files, on the names that a project chose, or on torch is left to the build.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from hatch_aoti.settings.declaration import REQUIRED, Setting, declared
from hatch_aoti.settings.model import Dim, ModelSettings, Settings, TensorInput, is_plain
from hatch_aoti.settings.values import DTYPES, INT64_MAX, upper_bound

__all__ = ["SCHEMA_FILE", "generate_schema", "read_schema"]

SCHEMA_FILE: Final = Path(__file__).parent.parent / "resources" / "aoti.schema.json"
"""Where `hatch run generate` puts the schema."""

_TOOL = "aoti"


def read_schema(tool_name: str = _TOOL) -> dict[str, Any]:
    """Return the schema of the table `[tool.aoti]`: what validate-pyproject loads as a `tool_schema`.

    `tool_name` is the name of the table; there is no schema for any but `aoti`.
    """
    if tool_name != _TOOL:
        raise ValueError(f"hatch-aoti has a schema for [tool.{_TOOL}], and none for [tool.{tool_name}]")
    schema: dict[str, Any] = json.loads(SCHEMA_FILE.read_text(encoding="utf-8"))
    return schema


def generate_schema() -> dict[str, Any]:
    """Return the schema that follows from the declarations."""
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "$id": f"https://json.schemastore.org/partial-{_TOOL}.json",
        "title": "hatch-aoti",
        "description": "PyTorch models that are compiled ahead of time while the wheel is built.",
        **_table(Settings),
        "definitions": {
            "model": {"title": "Model", **_table(ModelSettings), "allOf": _rules_of_models()},
            "input": {"title": "Input", **_table(TensorInput), "allOf": _rules_of_inputs()},
            "dim": {"title": "Dimension", **_table(Dim)},
            "shapes": _dynamic_shapes(),
        },
    }


def _table(settings: type) -> dict[str, Any]:
    items = [item for item in declared(settings) if not item.only_variable]
    required = [item.key for item in items if item.default is REQUIRED and not item.in_program]
    return {
        "type": "object",
        "additionalProperties": False,
        **({"required": required} if required else {}),
        "properties": {
            item.key: {"description": _description(item), **item.kind.schema, **_default(item)} for item in items
        },
    }


def _description(item: Setting) -> str:
    otherwise = f" Default: {item.default_text}." if item.default_text and item.default is not REQUIRED else ""
    instead = f" The environment variable {item.variable} wins over it." if item.variable else ""
    return f"{item.description}{otherwise}{instead}"


def _default(item: Setting) -> dict[str, Any]:
    """Return the default where it is a value that a project could write, and no rule stands behind it."""
    has_one = not item.default_text and is_plain(item.default) and item.default != {}
    return {"default": item.default} if has_one else {}


def _rules_of_models() -> list[dict[str, Any]]:
    """Return what holds between the keys of a model, as the reader says it in sentences."""
    in_program = {item.key: False for item in declared(ModelSettings) if item.in_program}
    required = [item.key for item in declared(ModelSettings) if item.default is REQUIRED]
    return [
        {
            "if": {"required": ["exported"]},
            "then": {"properties": {**in_program, "device": {"enum": ["cpu", "cuda"]}}},
            "else": {"required": required},
        },
        # Declared inputs say in their shapes what is dynamic.
        _not_together({"inputs": {"type": "object"}, "dynamic-shapes": {}}),
        # Constants outside the compiled object cannot be prepacked into it.
        _not_together({"constants": {"const": "external"}, "optimize": {"const": True}}),
        _not_together(
            {
                "constants": {"const": "external"},
                "inductor-configs": {"required": ["freezing"], "properties": {"freezing": {"const": True}}},
            }
        ),
    ]


def _not_together(values: dict[str, Any]) -> dict[str, Any]:
    return {"not": {"required": sorted(values), "properties": values}}


def _rules_of_inputs() -> list[dict[str, Any]]:
    """Return that only integers have an upper bound, and none above those of the dtype."""
    bounds = {name: bound for name in DTYPES if (bound := upper_bound(name))}
    of_integers = {"required": ["dtype"], "properties": {"dtype": {"enum": list(bounds)}}}
    return [
        {"if": {"required": ["high"]}, "then": of_integers},
        *(
            {
                "if": {"required": ["dtype"], "properties": {"dtype": {"const": name}}},
                "then": {"properties": {"high": {"maximum": bound}}},
            }
            for name, bound in bounds.items()
            if bound < INT64_MAX
        ),
    ]


def _dynamic_shapes() -> dict[str, Any]:
    """Return what stands for one argument of forward: its dims by the index of a dimension, or a container of such."""
    this, indices = {"$ref": "#/definitions/shapes"}, {"pattern": "^(0|[1-9][0-9]*)$"}
    of_tensor = {"type": "object", "propertyNames": indices, "additionalProperties": {"type": "string", "minLength": 1}}
    is_empty_or_named = {"not": {"minProperties": 1, "propertyNames": indices}}
    return {
        "title": "Dynamic shapes",
        "anyOf": [
            of_tensor,
            {"type": "object", "additionalProperties": this, **is_empty_or_named},
            {"type": "array", "items": this},
        ],
    }
