"""Tensors in plain attributes of a module: what forward leaves in them, which `torch.export` does not see.

Parameters and buffers are known to the export. A tensor that is anywhere else (`self.cache.keys`, a list) is a constant
to it, or a value that is made anew, and while it traces, forward leaves placeholders there.
"""

from __future__ import annotations

import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

__all__ = ["PlainState"]

_DEEPEST = 8  # attributes of attributes
_MOST = 10_000  # objects that are looked at: more are no model's state, but a data set, say
_OPAQUE = (type, types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.ModuleType, str, bytes)


class PlainState:
    """What a module's plain attributes hold, directly or in lists, tuples, dicts and objects, when this is made."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._containers: list[tuple[Any, Any]] = []
        self._tensors = {path: (tensor, _version(tensor)) for path, tensor in self._walk(self._containers)}

    def changed(self) -> list[str]:
        """Return the paths of tensors that were replaced by others, or written to. What is new does not count."""
        import torch

        now = dict(self._walk([]))
        registered = {tensor.untyped_storage().data_ptr() for tensor in _registered(self._module)}
        changed = []
        for path, (tensor, version) in self._tensors.items():
            other = now.get(path)
            if other is None or tensor.untyped_storage().data_ptr() in registered:
                continue
            written = _version(tensor) != version
            if written or (other is not tensor and not _equal(torch, other, tensor)):
                changed.append(path)
        return changed

    def restore(self) -> None:
        """Put everything back if a trace has left placeholders, which nothing can compute with."""
        from torch._subclasses.fake_tensor import FakeTensor

        if not any(isinstance(tensor, FakeTensor) for _, tensor in self._walk([])):
            return
        for container, content in self._containers:
            if isinstance(container, list):
                container[:] = content
            else:
                for key in [key for key in container if key not in content and key not in _internal()]:
                    del container[key]
                container.update(content)

    def _walk(self, containers: list[tuple[Any, Any]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors with their paths; note the lists and dicts that hold them, with what is in each."""
        import torch

        seen: set[int] = set()
        todo: list[tuple[str, Any, int]] = []

        def enter(path: str, items: dict[Any, Any], form: str, depth: int) -> None:
            containers.append((items, dict(items)))
            todo.extend((form.format(path, key), value, depth + 1) for key, value in items.items())

        for name, part in self._module.named_modules():
            plain = {key: value for key, value in vars(part).items() if key not in _internal()}
            containers.append((vars(part), plain))
            todo += [(f"{name}.{key}".lstrip("."), value, 1) for key, value in plain.items()]
        while todo:
            path, value, depth = todo.pop()
            if isinstance(value, torch.Tensor):
                yield path, value
            elif depth > _DEEPEST or len(seen) > _MOST or id(value) in seen or isinstance(value, _OPAQUE):
                continue
            elif isinstance(value, list | tuple):
                if isinstance(value, list):
                    containers.append((value, list(value)))
                todo += [(f"{path}[{number}]", item, depth + 1) for number, item in enumerate(value)]
            elif isinstance(value, dict):
                enter(path, value, "{}[{!r}]", depth)
            elif hasattr(value, "__dict__") and not isinstance(value, torch.nn.Module):
                enter(path, vars(value), "{}.{}", depth)
            seen.add(id(value))


def _registered(module: torch.nn.Module) -> list[torch.Tensor]:
    from torch.nn.parameter import is_lazy

    return [tensor for tensor in (*module.parameters(), *module.buffers()) if not is_lazy(tensor)]


def _internal() -> set[str]:
    """Return the names of the attributes that `nn.Module` itself has."""
    import torch

    return {*vars(torch.nn.Module())}


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version  # noqa: SLF001 - only it tells that a tensor was written to


def _equal(torch: Any, a: torch.Tensor, b: torch.Tensor) -> bool:
    """Say whether two tensors are the same to whoever reads them: a value may be computed anew in every call."""
    if a.dtype != b.dtype or a.shape != b.shape or a.device != b.device:
        return False
    return bool(torch.equal(a, b))
