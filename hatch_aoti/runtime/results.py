"""What a call answers with: compiled results in eager's structure, or the exception that eager would raise."""

from __future__ import annotations

import collections
import dataclasses
import functools
import importlib
from typing import TYPE_CHECKING, Any

from .contract import Constant, Group, Omitted, SameAsInput, Size, TensorInput, TensorOutput

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .contract import Node

__all__ = ["as_eager", "make_rebuild"]


def as_eager(name: str, error: RuntimeError) -> Exception:
    """Return what eager would raise where compiled code stops: an index out of range, a division by zero.

    Its text begins with the type, where that is not RuntimeError.
    """
    if type(error) is not RuntimeError:  # not from compiled code
        return error
    text = str(error).partition("\n")[0]
    kind: type[Exception] = RuntimeError
    for other in (IndexError, RuntimeError):
        if text.startswith(f"{other.__name__}: "):
            text, kind = text.removeprefix(f"{other.__name__}: "), other
    return kind(f"{name}: {text}")


def make_rebuild(node: Node, inputs: Sequence[TensorInput]) -> Callable[[Sequence[Any], Sequence[Any]], Any]:
    """Return a function of (compiled results, the input tensors as given) that answers in eager's structure."""
    if isinstance(node, TensorOutput):
        index = node.index
        if node.state:  # the result is the model's own memory: it would change under the caller, and go with the model
            return lambda results, _given: results[index].clone()
        return lambda results, _given: results[index]
    if isinstance(node, SameAsInput):
        place = next(place for place, leaf in enumerate(inputs) if leaf.path == node.path)
        return lambda _results, given: given[place]
    if isinstance(node, Constant):
        value = node.value
        return lambda _results, _given: value
    if isinstance(node, Size):
        spots = {
            leaf_size.terms: (place, dimension)
            for place, leaf in enumerate(inputs)
            for dimension, leaf_size in enumerate(leaf.shape)
            if leaf_size.plus == 0
        }
        terms, plus = [(factor, *spots[((1, dim),)]) for factor, dim in node.terms], node.plus
        return lambda _results, given: plus + sum(factor * given[place].shape[at] for factor, place, at in terms)
    if isinstance(node, Omitted | TensorInput):
        raise TypeError(f"a {type(node).__name__} is no result")
    parts = [make_rebuild(item, inputs) for item in node.items]
    keys = node.keys
    match node.kind:
        case "tuple":
            return lambda results, given: tuple([part(results, given) for part in parts])
        case "list":
            return lambda results, given: [part(results, given) for part in parts]
        case "dict":
            return lambda results, given: {key: part(results, given) for key, part in zip(keys, parts)}  # noqa: B905
        case "OrderedDict":
            return lambda results, given: collections.OrderedDict(
                (key, part(results, given)) for key, part in zip(keys, parts, strict=True)
            )
        case "structseq":
            cls = _class_of(node)
            return lambda results, given: cls([part(results, given) for part in parts])
        case _:
            cls = _class_of(node)
            return lambda results, given: cls(
                **{str(key): part(results, given) for key, part in zip(keys, parts, strict=True)}
            )


def _class_of(group: Group) -> Callable[..., Any]:
    """Return the class of a result: the model's own where its module can be imported, else an equal one."""
    module, _, qualname = group.type.partition(":")
    found: Any
    try:
        found = functools.reduce(getattr, qualname.split("."), importlib.import_module(module))
    except Exception:  # noqa: BLE001  (the wheel need not carry the model's source, nor what that imports)
        fields = [str(key) for key in group.keys]
        name = qualname.rpartition(".")[2]
        make: Any = dataclasses.make_dataclass if group.kind == "dataclass" else collections.namedtuple
        found = make(name, fields)
    return found  # type: ignore[no-any-return]  # whatever stands there is what eager returned
