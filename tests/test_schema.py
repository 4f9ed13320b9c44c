"""What follows from the declarations of the settings: the JSON schema, the tables of the documentation."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import generate
import hypothesis
import jsonschema
import pytest
from conftest import run, write_files
from hypothesis import strategies
from test_settings import WRONG

from hatch_aoti.settings.declaration import declared
from hatch_aoti.settings.inductor import check_inductor_configs
from hatch_aoti.settings.model import Dim, ModelSettings, Settings, TensorInput
from hatch_aoti.settings.schema import SCHEMA_FILE, generate_schema, read_schema
from hatch_aoti.settings.toml import WrongValueError

HOME = Path(__file__).parent.parent
EXAMPLE = HOME / "example_project" / "pyproject.toml"
ALL = [item for settings in (Settings, ModelSettings, TensorInput, Dim) for item in declared(settings)]

# What a schema cannot say, or should not: by why.
BEYOND = {
    "files": {
        "home of nobody", "weights missing (pypa/hatch#1946)", "weights that are a folder", "weights linked from outside",
    },
    "names that mean something to Python, or to a build": {
        "package that is a keyword", "keyword", "soft keyword", "accessor's name", "builtin", "torch's options",
        "a variable that is set",
    },
    "names that have to fit each other": {
        "one name in two cases", "one name with two underscores", "a bundle with the file of a model",
        "one bundle in two cases", "a bundle for two devices", "undeclared dim", "misspelled dim", "unused dim",
        "unused dim of a callable", "undeclared dim in dynamic-shapes",
    },
    "values against each other": {
        "min above max", "max below the default min", "a dim of one size", "inductor option given twice", "inductor option given as a value and as a table",
    },
    "numbers that JSON does not have": {"boundless tolerance", "tolerance that is no number"},
}  # fmt: skip


def errors(config: dict[str, Any]) -> list[str]:
    validator = jsonschema.Draft7Validator(read_schema())
    return [error.message for error in validator.iter_errors(config.get("tool", {}).get("aoti", {}))]


def model(**settings: object) -> dict[str, Any]:
    return {"tool": {"aoti": {"models": {"digits": {"model": "pkg:Net", "inputs": {}, **settings}}}}}


def test_the_files_are_as_the_declarations_have_them():
    names = [str(path.relative_to(HOME)) for path in generate.stale()]
    assert names == [], "`hatch run generate` writes them"


def test_a_table_that_is_out_of_date_is_found(monkeypatch, tmp_path):
    stale = tmp_path / "a.md"
    text = "<!-- settings:begin jobs seed: key, default, since -->\n{}<!-- settings:end -->\n"
    stale.write_text(text.format(""))
    monkeypatch.setattr(generate, "DOCUMENTS", (stale,))
    rows = "| key | default | since |\n| --- | --- | --- |\n"
    rows += (
        "| `jobs` | what cores and memory allow, within the limits of a container | 0.1.0 |\n| `seed` | `0` | 0.1.0 |\n"
    )
    assert generate.stale() == {stale: text.format(rows)}


@pytest.mark.parametrize("name", ["README.md", "docs/settings.md", "docs/debugging.md"])
def test_no_table_of_settings_is_written_by_hand(name):
    text = (HOME / name).read_text(encoding="utf-8")
    by_hand, tables = generate.MARKED.subn("", text)
    assert tables == text.count("settings:begin") > 0
    rows = set(re.findall(r"^\| `(.*?)`", by_hand, re.MULTILINE))
    assert rows.isdisjoint({item.key for item in ALL} | {item.variable for item in ALL})


@pytest.mark.parametrize("item", ALL, ids=lambda item: item.key)
def test_a_declaration_is_complete(item):
    assert re.fullmatch(r"[A-Z`].*[.]", item.description), "a sentence"
    assert "](" not in item.description, "links are for `see`"
    assert re.fullmatch(r"\d+\.\d+\.\d+", item.since)
    if item.see:
        file, _, heading = item.see.partition("#")
        titles = re.findall(r"^#+ (.*)$", (HOME / file).read_text(encoding="utf-8"), re.MULTILINE)
        anchors = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
        assert not heading or heading in anchors


def test_every_field_of_the_settings_is_declared_and_every_setting_of_the_project_has_a_variable():
    for settings in (Settings, ModelSettings, TensorInput, Dim):
        fields = {field.name for field in dataclasses.fields(settings)} - {"name"}
        assert {item.field for item in declared(settings)} == fields
    assert [item.key for item in declared(Settings) if not item.variable] == ["models"]


def test_the_schema_is_one_of_draft_7():
    schema = read_schema()
    jsonschema.Draft7Validator.check_schema(schema)
    assert schema == generate_schema()
    assert schema["$schema"] == "http://json-schema.org/draft-07/schema#"
    descriptions = [part["properties"] for part in (schema, *schema["definitions"].values()) if "properties" in part]
    assert all(value["description"] for properties in descriptions for value in properties.values())


def test_defaults_are_valid():
    defaults = {item.key: item.default for item in declared(ModelSettings) if item.key in {"device", "seed", "verify"}}
    assert errors(model(**defaults)) == []
    schema = read_schema()
    for part in (schema, *schema["definitions"].values()):
        for value in part.get("properties", {}).values():
            if "default" in value:
                jsonschema.Draft7Validator(value).validate(value["default"])


def test_the_example_is_valid():
    assert errors(tomllib.loads(EXAMPLE.read_text(encoding="utf-8"))) == []


def test_the_list_of_what_no_schema_says_has_only_mistakes_that_are_tested():
    assert set().union(*BEYOND.values()) <= set(WRONG)


@pytest.mark.parametrize("name", WRONG)
def test_the_schema_refuses_every_mistake_that_it_can_know_of(name):
    assert bool(errors(tomllib.loads(WRONG[name][0]))) is (name not in set().union(*BEYOND.values()))


@pytest.mark.parametrize(
    ("settings", "valid"),
    [
        ({"weights": "a/b.c/net.safetensors", "bundle": "Nets_2"}, True),
        ({"weights": "a/..b/net.pth"}, True),
        ({"weights": "a/../net.pth"}, False),
        ({"weights": "~/net.pth"}, False),
        ({"weights": "a/.pt"}, False),
        ({"model": "größe.netz:Netz.bau"}, True),
        ({"model": "1a:b"}, False),
        ({"model": "a:b:c"}, False),
        ({"inputs": "a.b"}, False),
        ({"inputs": {"größe": {"shape": []}}}, True),
        ({"inputs": {"x": {"shape": ["n", 3, 2**63]}}, "dims": {"n": {}}}, False),
        ({"inputs": {"x": {"shape": [2], "dtype": "int8", "high": 5}}}, True),
        ({"dynamic-shapes": "a:b"}, False),
        ({"inputs": "a:b", "dynamic-shapes": "a:b"}, True),
        ({"inputs": "a:b", "dynamic-shapes": {"x": {}, "y": [{"0": "n"}, {"z": {"0": "n"}}]}}, True),
        ({"inputs": "a:b", "dynamic-shapes": [{"0": "n"}, {}]}, True),
        ({"inputs": "a:b", "dynamic-shapes": {"x": {"0": {"1": "n"}}}}, False),
        ({"constants": "external", "optimize": False}, True),
        ({"constants": "embedded", "optimize": True}, True),
        ({"inductor-configs": {"cpp": {"min_chunk_size": 1}, "max_autotune": True}}, True),
        ({"inductor-configs": {"cpp.march": "x"}}, False),
        ({"inductor-configs": {"cpp": {"march": "x"}}}, False),
    ],
)
def test_values_at_the_edge(settings, valid):
    assert (errors(model(**settings)) == []) is valid


@pytest.mark.parametrize(
    ("settings", "valid"),
    [
        ({"exported": "a.pt2"}, True),
        ({"exported": "a.pt2", "device": "cuda", "rtol": 1e-3}, True),
        ({"exported": "a.pt2", "device": "auto"}, False),
        ({"exported": "a.pt"}, False),
        *[
            ({"exported": "a.pt2", key: value}, False)
            for key, value in (("model", "a:b"), ("inputs", {}), ("dims", {}))
        ],
        ({"exported": "a.pt2", "weights": "a.pt"}, False),
        ({"exported": "a.pt2", "dynamic-shapes": {}}, False),
    ],
)
def test_a_saved_program_stands_for_the_model(settings, valid):
    assert (errors({"tool": {"aoti": {"models": {"net": settings}}}}) == []) is valid


def patterns(schema: object) -> list[str]:
    parts = schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else []
    this = [schema["pattern"]] if isinstance(schema, dict) and "pattern" in schema else []
    return this + [pattern for part in parts for pattern in patterns(part)]


@pytest.mark.parametrize(
    "item", [item for item in ALL if "$ref" not in json.dumps(item.kind.schema)], ids=lambda i: i.key
)
@hypothesis.settings(max_examples=60, deadline=None, suppress_health_check=list(hypothesis.HealthCheck))
@hypothesis.given(data=strategies.data())
def test_the_schema_refuses_nothing_that_the_reader_takes(item, data):
    near = [strategies.from_regex(pattern, fullmatch=True) for pattern in patterns(item.kind.schema)]
    name = strategies.from_regex(r"[^\W\d]\w*")
    text = strategies.one_of(name, strategies.builds("{}.{}:{}".format, name, name, name), strategies.text(), *near)
    plain = strategies.one_of(text, strategies.integers(), strategies.floats(allow_nan=False), strategies.booleans())
    value = data.draw(strategies.one_of(plain, strategies.lists(plain), strategies.dictionaries(text, plain)))
    try:
        item.kind.parse(value)
    except WrongValueError:
        return
    if item.key == "inductor-configs" and isinstance(value, dict) and check_inductor_configs(value, ""):
        return  # refused by name, not by its kind
    # Whether the suffix is right is seen with the file at hand.
    if item.key not in {"weights", "exported"} or value.endswith((".pt", ".pth", ".pt2", ".safetensors")):
        jsonschema.Draft7Validator(item.kind.schema).validate(value)


# --- Where it comes out ---


def test_the_command_prints_the_file():
    ran = run(sys.executable, "-m", "hatch_aoti", "schema", environ=dict(os.environ)).check()
    assert json.loads(ran.output) == json.loads(SCHEMA_FILE.read_text(encoding="utf-8"))
    assert ran.output == SCHEMA_FILE.read_text(encoding="utf-8")


def test_the_wheel_of_hatch_aoti_has_the_file():
    from hatchling.builders.wheel import WheelBuilder

    files = [file.distribution_path for file in WheelBuilder(str(HOME)).recurse_selected_project_files()]
    assert str(SCHEMA_FILE.relative_to(HOME)) in files


def test_the_entry_point_of_validate_pyproject_gives_the_schema():
    [found] = metadata.entry_points(group="validate_pyproject.tool_schema", name="aoti")
    assert found.load()("aoti") == read_schema()
    with pytest.raises(ValueError, match=r"none for \[tool.other\]"):
        found.load()("other")


def test_validate_pyproject_takes_the_example_and_refuses_a_misspelled_key(tmp_path: Path):
    environ = {**os.environ, "VALIDATE_PYPROJECT_NO_NETWORK": "1"}
    command = (sys.executable, "-m", "validate_pyproject")
    assert "Valid file" in run(*command, EXAMPLE, environ=environ).check().output
    text = EXAMPLE.read_text(encoding="utf-8").replace("weights = ", "wieghts = ")
    ran = run(*command, write_files(tmp_path, {"pyproject.toml": text}) / "pyproject.toml", environ=environ)
    assert ran.returncode == 1
    assert "tool.aoti.models.digits" in ran.output
    assert "wieghts" in ran.output
