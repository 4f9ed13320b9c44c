"""Containers in what a model takes and gives, in the terms of a calling contract."""

from __future__ import annotations

import collections
import dataclasses
from typing import TYPE_CHECKING, Any

from hatch_aoti.errors import UnsupportedModelError
from hatch_aoti.runtime.contract import Group

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from hatch_aoti.runtime.contract import Node

__all__ = ["SCALARS", "container_of", "leaves", "named_items", "register_output_types"]


SCALARS = (bool, int, float, complex, str, type(None))


def _type_name(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


def _container(value: Any) -> tuple[str, tuple[Any, ...] | None]:
    """Return the kind of a container (as in `Group.kind`) and its keys or fields; ("", None) if it is none known."""
    import torch
    from torch.utils import _pytree

    cls = type(value)
    if cls in {tuple, list}:
        return cls.__name__, ()
    if cls in {dict, collections.OrderedDict}:
        return cls.__name__, tuple(value)
    if isinstance(value, tuple) and cls.__module__ == torch.return_types.__name__:
        return "structseq", tuple(cls.__match_args__)
    if isinstance(value, tuple) and hasattr(cls, "_fields"):
        return "namedtuple", tuple(cls._fields)
    if dataclasses.is_dataclass(cls) and cls in _pytree.SUPPORTED_NODES:
        # By the registration, not by the fields: a model output of transformers drops those that are None.
        _, context = _pytree.SUPPORTED_NODES[cls].flatten_fn(value)
        if isinstance(context, (list, tuple)) and context and isinstance(context[0], (list, tuple)):
            return "dataclass", tuple(context[0])
        if isinstance(context, (list, tuple)) and all(isinstance(key, str) for key in context):
            return "dataclass", tuple(context)
    return "", None


def named_items(value: Any, path: str) -> Iterator[tuple[Any, Any, str]]:
    """Yield (key or field or place, item, path) of a container, in pytree's order."""
    kind, keys = _container(value)
    if keys is None:
        raise UnsupportedModelError(
            f"{path} is a {type(value).__module__}.{type(value).__qualname__}; compiled models take and give tensors, "
            "None, numbers and strings, in tuples, lists, dicts, named tuples and dataclasses"
        )
    if kind in {"tuple", "list"}:
        for place, item in enumerate(value):
            yield place, item, f"{path}[{place}]"
    elif kind in {"dict", "OrderedDict"}:
        for key in keys:
            if type(key) not in SCALARS:
                raise UnsupportedModelError(
                    f"{path} has the key {key!r}, a {type(key).__name__}; only strings and numbers can be keys"
                )
            yield key, value[key], f"{path}[{key!r}]"
    else:
        for key in keys:
            yield key, getattr(value, key), f"{path}.{key}"


def leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield the paths and values of the tensors and scalars in `value`, whose own path is `path`."""
    import torch

    if isinstance(value, torch.Tensor) or type(value) in SCALARS:
        yield path, value
        return
    for _, item, item_path in named_items(value, path):
        yield from leaves(item, item_path)


def container_of(value: Any, path: str, node: Callable[[Any, str], Node]) -> Group:
    """Return the contract of a container; `node` gives that of an item."""
    items = list(named_items(value, path))
    kind, keys = _container(value)
    named = kind in {"namedtuple", "dataclass", "structseq"}
    return Group(
        kind=kind,
        items=tuple(node(item, item_path) for _, item, item_path in items),
        keys=tuple(keys or ()),
        type=_type_name(type(value)) if named else "",
        path=path,
    )


def register_output_types(output: Any) -> None:
    """Register the dataclasses in `output` with pytree, so that an export can return them (pytorch/pytorch#140615).

    `output` is what eager answered; the same works for inputs. Other containers and known types are left alone.
    """
    import torch
    from torch.utils import _pytree

    items: Sequence[Any]
    if dataclasses.is_dataclass(output) and not isinstance(output, type):
        cls = type(output)
        if cls not in _pytree.SUPPORTED_NODES:
            torch.export.register_dataclass(cls, serialized_type_name=_type_name(cls))
        items = [getattr(output, field.name) for field in dataclasses.fields(output)]
    else:
        items = (
            list(output.values()) if isinstance(output, dict) else output if isinstance(output, (tuple, list)) else []
        )
    for item in items:
        register_output_types(item)
