"""Frozen dataclasses through JSON and back: what does not fit the type hints is refused by name."""

from __future__ import annotations

import json
from collections.abc import Mapping  # noqa: TC003 - the codec reads annotations at run time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from hatch_aoti.codec import LEFT_OUT, DecodeError, decode, encode, pack, unpack
from hatch_aoti.runtime.contract import Constant, Signature


@dataclass(frozen=True)
class Yes:
    count: int
    on: Literal[True] = True


@dataclass(frozen=True)
class No:
    on: Literal[False] = False


@dataclass(frozen=True)
class All:
    text: str
    number: int
    real: float
    flag: bool
    path: Path
    maybe: int | None
    either: int | str
    names: tuple[str, ...]
    many: Mapping[str, tuple[Path, ...]]
    answer: Yes | No
    signature: Signature
    anything: dict[str, Any]
    kind: Literal["a", "b"] = "a"
    rare: dict[str, str] = field(default_factory=dict, metadata=LEFT_OUT)


ALL = All(
    "t", 1, 1.5, True, Path("/x"), None, "e", ("a", "b"), {"k": (Path("p"),)}, Yes(3), Signature((), Constant(1)),
    {"a": [1, {"b": None}]},
)  # fmt: skip


def through_json(value: Any) -> Any:
    return json.loads(json.dumps(encode(value)))


def test_what_is_encoded_comes_back_equal():
    assert decode(All, through_json(ALL)) == ALL
    assert unpack(All, json.loads(json.dumps(pack(ALL)))) == ALL


def test_a_field_that_is_left_out_at_its_default_may_be_missing_and_is_written_otherwise():
    assert "rare" not in encode(ALL)
    full = All(**{**vars(ALL), "rare": {"a": "b"}})
    assert encode(full)["rare"] == {"a": "b"}
    assert decode(All, through_json(full)) == full


def test_the_fitting_class_of_several_is_taken():
    other = All(**{**vars(ALL), "answer": No()})
    assert decode(All, through_json(other)).answer == No()


WRONG = {
    "a number for a text": ("text", 5, "text must be a text, not 5"),
    "true for a number": ("number", True, "number must be a whole number, not True"),
    "a real number for a whole one": ("number", 1.0, "number must be a whole number, not 1.0"),
    "a text for a real number": ("real", "1", "real must be a number, not '1'"),
    "a number for a truth": ("flag", 1, "flag must be true or false, not 1"),
    "a number for a path": ("path", 1, "path must be a path, not 1"),
    "null where there is none": ("text", None, "text must be a text, not None"),
    "neither of two": ("either", [], "either must be a text, not []"),
    "an object for a list": ("names", {}, "names must be a list, not {}"),
    "an item": ("names", ["a", 5], "names[1] must be a text, not 5"),
    "an item of an item": ("many", {"k": ["p", None]}, "many.k[1] must be a path, not None"),
    "another word": ("kind", "c", "kind must be 'a' or 'b', not 'c'"),
    "1 for true": ("answer", {"count": 3, "on": 1}, "answer has 'count', which is not known here"),
    "no class": ("answer", [], "answer must be an object, not []"),
    "no signature": ("signature", {"class": "Dim"}, "signature is no Signature"),
    "a long value": ("number", "x" * 1000, "number must be a whole number, not 'xxx"),
}


@pytest.mark.parametrize(("name", "value", "message"), WRONG.values(), ids=WRONG.keys())
def test_a_value_that_does_not_fit_is_named(name: str, value: Any, message: str):
    with pytest.raises(DecodeError) as caught:
        decode(All, {**through_json(ALL), name: value})
    assert message in str(caught.value)
    assert len(str(caught.value)) < 200


def test_missing_and_unknown_fields_are_named_with_a_default_too():
    data = through_json(ALL)
    for name in ("text", "kind"):
        with pytest.raises(DecodeError, match=f"it has no '{name}'"):
            decode(All, {key: value for key, value in data.items() if key != name})
    with pytest.raises(DecodeError, match="it has 'more', which is not known here"):
        decode(All, {**data, "more": 1})
    with pytest.raises(DecodeError, match="answer has no 'on'"):
        decode(All, {**data, "answer": {}})


def test_what_another_version_wrote_may_lack_fields_with_defaults_and_have_more():
    data = through_json(ALL)
    del data["kind"]
    assert decode(All, {**data, "more": 1}, lenient=True) == ALL
    del data["text"]
    with pytest.raises(DecodeError, match="it has no 'text'"):
        decode(All, data, lenient=True)


@pytest.mark.parametrize("data", [None, [], {}, {"value": {}}, {"codec": 2, "value": {"on": False}}, {"on": False}])
def test_another_version_of_the_form_is_refused(data: Any):
    with pytest.raises(DecodeError, match="it is not of version 1"):
        unpack(No, data)


def test_what_has_no_form_is_a_fault_of_ours():
    with pytest.raises(TypeError, match="bytes has no form in JSON"):
        encode({"a": b""})

    @dataclass(frozen=True)
    class Odd:
        data: bytes

    with pytest.raises(TypeError, match="is no type that fields of such classes may have"):
        decode(Odd, {"data": ""})
