"""The calling contract of one compiled model, as plain frozen values.

This is the vocabulary that the build (`export.signature` reads a contract from an exported program), the manifest and
the generated `_models.py` (which checks calls against it) share. It needs neither torch nor hatch-aoti.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = [
    "Constant",
    "Dim",
    "Group",
    "Node",
    "Omitted",
    "Parameter",
    "SameAsInput",
    "Signature",
    "Size",
    "TensorInput",
    "TensorOutput",
]

Scalar: TypeAlias = "bool | int | float | complex | str | None"


@dataclasses.dataclass(frozen=True)
class Dim:
    """A dimension that may vary: its name and the sizes it may take, both ends included (`max` None: no limit)."""

    name: str
    min: int
    max: int | None

    def __str__(self) -> str:
        return f"{self.name} = {self.min}…" + ("" if self.max is None else str(self.max))


@dataclasses.dataclass(frozen=True)
class Size:
    """The size of one dimension: `plus` + the sum of factor * dim over `terms`. As an output: that number."""

    terms: tuple[tuple[int, str], ...] = ()
    plus: int = 0

    def __str__(self) -> str:
        parts = [name if factor == 1 else f"{factor}*{name}" for factor, name in self.terms]
        text = " + ".join([*parts, *([str(self.plus)] if self.plus or not parts else [])])
        return text.replace("+ -", "- ")

    def of(self, sizes: dict[str, int]) -> int:
        """Return this size for the given sizes of the named dims."""
        return self.plus + sum(factor * sizes[name] for factor, name in self.terms)


@dataclasses.dataclass(frozen=True)
class TensorInput:
    """A tensor that the compiled code is given.

    `path` is where it stands in the call (`batch['a']`, `xs[2]`); `dtype` is torch's name without the `torch.`;
    `order` lists the dimensions from the outermost to the innermost in memory, empty for row-major (contiguous):
    compiled code reads exactly this layout (pytorch/pytorch#153992). `changed`: forward writes into it.
    """

    path: str
    dtype: str
    shape: tuple[Size, ...]
    order: tuple[int, ...] = ()
    device: str = "cpu"
    changed: bool = False

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


@dataclasses.dataclass(frozen=True)
class Constant:
    """A value that is not a tensor: as an argument it was compiled in, as a result it is always this."""

    value: Scalar
    path: str = ""

    def __str__(self) -> str:
        return repr(self.value)


@dataclasses.dataclass(frozen=True)
class Omitted:
    """A parameter that the export left to its default, which is no plain value: calls must leave it out, too."""

    path: str

    def __str__(self) -> str:
        return "(default)"


@dataclasses.dataclass(frozen=True)
class TensorOutput:
    """A tensor that the compiled code answers with: number `index` of its results.

    `state` names the parameter or buffer whose memory the result would share: it is copied before it is handed out.
    """

    index: int
    dtype: str
    shape: tuple[int | str, ...]
    state: str = ""

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


@dataclasses.dataclass(frozen=True)
class SameAsInput:
    """A result that is one of the arguments, the very object: the input whose path is `path`."""

    path: str

    def __str__(self) -> str:
        return f"the argument {self.path}"


@dataclasses.dataclass(frozen=True)
class Group:
    """A container.

    `kind` is one of `tuple`, `list`, `dict`, `OrderedDict`, `namedtuple`, `dataclass`, `structseq`, and, for what
    a parameter of that kind collects, `*args` and `**kwargs`.

    `keys` are the keys or field names, one for each item (empty for tuple and list); `type` is `module:qualname` of
    the class for the last three kinds (`structseq` are the types in `torch.return_types`).
    """

    kind: str
    items: tuple[Node, ...]
    keys: tuple[Scalar, ...] = ()
    type: str = ""
    path: str = ""

    def __str__(self) -> str:
        name = self.type.rpartition(":")[2].rpartition(".")[2]
        match self.kind:
            case "tuple" | "*args":
                return f"({', '.join(map(str, self.items))}{',' if len(self.items) == 1 else ''})"
            case "list":
                return f"[{', '.join(map(str, self.items))}]"
            case "dict" | "OrderedDict" | "**kwargs":
                return f"{{{', '.join(f'{key!r}: {item}' for key, item in zip(self.keys, self.items, strict=True))}}}"
            case _:
                return f"{name}({', '.join(f'{key}={item}' for key, item in zip(self.keys, self.items, strict=True))})"


Node: TypeAlias = "TensorInput | Constant | Omitted | TensorOutput | SameAsInput | Size | Group"


@dataclasses.dataclass(frozen=True)
class Parameter:
    """A parameter of forward.

    `kind` is one of `positional`, `positional or keyword`, `*args`, `keyword`, `**kwargs`; `default` is None where
    there is none, a `Constant` for a plain value, `Omitted` for any other default.
    """

    name: str
    kind: str
    node: Node
    default: Constant | Omitted | None = None

    def __str__(self) -> str:
        prefix = {"*args": "*", "**kwargs": "**"}.get(self.kind, "")
        if isinstance(self.node, Constant) and self.default == self.node:
            return f"{self.name}={self.default}"
        default = f" = {self.default}" if isinstance(self.default, Constant) else " = …" if self.default else ""
        return f"{prefix}{self.name}: {self.node}{default}"


@dataclasses.dataclass(frozen=True)
class Signature:
    """What a model takes and gives, for people (`print(signature)`) and programs.

    `state` names the buffers that forward changes: each loaded model has its own copy of them, and it starts from
    the values at build time. `order` gives the place of each of `inputs` among the tensors that compiled code takes;
    empty means the same order.
    """

    parameters: tuple[Parameter, ...]
    output: Node
    dims: tuple[Dim, ...] = ()
    state: tuple[str, ...] = ()
    order: tuple[int, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the signature as values that JSON can hold; `from_json` reads them back."""
        encoded: dict[str, Any] = _to_json(self)
        return encoded

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Signature:
        """Read what `to_json` returned, possibly after a trip through JSON."""
        decoded = _from_json(value)
        if not isinstance(decoded, cls):
            raise TypeError(f"a signature is expected, got {value!r}")
        return decoded

    @property
    def inputs(self) -> tuple[TensorInput, ...]:
        """The tensors to pass, in the order of the parameters."""
        leaves = (leaf for parameter in self.parameters for leaf in _leaves(parameter.node))
        return tuple(leaf for leaf in leaves if isinstance(leaf, TensorInput))

    @property
    def constants(self) -> tuple[Constant, ...]:
        """The arguments whose value was compiled in."""
        leaves = (leaf for parameter in self.parameters for leaf in _leaves(parameter.node))
        return tuple(leaf for leaf in leaves if isinstance(leaf, Constant))

    @property
    def outputs(self) -> tuple[Node, ...]:
        """The leaves of what a call returns: `TensorOutput`, `SameAsInput`, `Size` or `Constant`."""
        return tuple(_leaves(self.output))

    def __str__(self) -> str:
        parts, before = [], ""
        for parameter in self.parameters:
            if before == "positional" != parameter.kind:
                parts.append("/")
            if parameter.kind == "keyword" and before not in {"keyword", "*args"}:
                parts.append("*")
            parts.append(str(parameter))
            before = parameter.kind
        lines = [f"({', '.join([*parts, *(['/'] if before == 'positional' else [])])}) -> {self.output}"]
        lines += [f"  where {', '.join(map(str, self.dims))}"] if self.dims else []
        if self.constants:
            fixed = ", ".join(f"{constant.path} = {constant}" for constant in self.constants)
            lines.append(f"  compiled for {fixed}")
        changed = [leaf.path for leaf in self.inputs if leaf.changed]
        lines += [f"  changes in place: {', '.join(changed)}"] if changed else []
        lines += [f"  keeps state between calls: {', '.join(self.state)}"] if self.state else []
        return "\n".join(lines)


def _leaves(node: Node) -> Iterator[Node]:
    if isinstance(node, Group):
        for item in node.items:
            yield from _leaves(item)
    else:
        yield node


def _to_json(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_to_json(item) for item in value]
    if isinstance(value, (float, complex)):  # JSON has neither nan nor complex numbers, and 2.0 may come back as 2
        return {"kind": type(value).__name__, "value": repr(value)}
    if not dataclasses.is_dataclass(value):
        return value
    fields = {field.name: _to_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return {"class": type(value).__name__, **fields}


def _from_json(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_from_json(item) for item in value)
    if not hasattr(value, "keys"):
        return value
    if "class" not in value:
        return {"float": float, "complex": complex}[value["kind"]](value["value"])
    classes = (Constant, Dim, Group, Omitted, Parameter, SameAsInput, Signature, Size, TensorInput, TensorOutput)
    cls = {cls.__name__: cls for cls in classes}[value["class"]]
    return cls(**{key: _from_json(item) for key, item in value.items() if key != "class"})
