"""What `torch.export` says of sizes, in the words of the settings."""

from __future__ import annotations

import contextlib
import itertools
import logging
import re
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from hatch_aoti.errors import ModelError
from hatch_aoti.export.failures import first_lines, users_frames

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

    from hatch_aoti.settings.model import ModelSettings

__all__ = ["size_error", "sizes_asked_for"]

_CONSTANT = re.compile(r"(\w+) was inferred to be a constant \((\d+)\)")
_SUGGESTED = re.compile(r"^\s*(\w+) = (.+)$", re.MULTILINE)
_VIOLATED = re.compile(
    r"Not all values of (\w+) = (L\[.+?\]\.size\(\)\[\d+\]) in the specified range .*? "
    r"satisfy the generated guard (.+)\."
)
_IS_NUMBER = re.compile(r"\beval Eq\(\w+, \d+\)")
_MOST = 4  # conditions in a message


def size_error(entry: ModelSettings, module: torch.nn.Module, text: str, where: Sequence[str]) -> ModelError | None:
    """Return the error for what torch says where a model does not export for all sizes; None if it is about others.

    `where` are the places in the project's code that asked for the value of a size.
    """
    text = text.partition("The error above occurred")[0]  # what follows is about torch's own tools
    suggested = dict(_SUGGESTED.findall(text.partition("Suggested fixes")[2]))
    constants = {name: value for name, value in suggested.items() if value.isdigit()} | dict(_CONSTANT.findall(text))
    if constants:
        reason = " and ".join(
            f"dim `{name}` is declared as a range, but the model only works for size {size}, the size of the example"
            for name, size in sorted(constants.items())
        )
        fixed = "; ".join(
            f'write {size} in place of "{name}" in the shapes and drop `{name}` from `dims`'
            for name, size in sorted(constants.items())
        )
        if recurrent := _recurrent(module):
            hint = (
                f"{fixed}, and pad inputs to that length, or export a single step: {' and '.join(recurrent)}, which "
                "torch.export unrolls over the sequence"
            )
        else:
            causes = "a reshape to a constant, an `if` on the size, a Python loop over it"
            if where:
                causes = f"{' and '.join(where)} asks for its value: a Python loop over it, an `if`, a reshape"
            hint = f"{fixed}, or find what in forward() fixes it ({causes})"
        return ModelError(entry.name, "export", reason, hint=hint, details=first_lines(text, 12))
    if suggested:
        advice = [_advice(name, value) for name, value in suggested.items() if name in entry.dims]
        return ModelError(
            entry.name,
            "export",
            "the model does not work for all of the declared ranges",
            hint="; ".join(advice) or "change `dims` or the model, as torch suggests",
            details=first_lines(text, 12),
        )
    return _violated(entry, text)


def _recurrent(module: torch.nn.Module) -> list[str]:
    import torch

    return [
        f"`{name or 'the model'}` is an nn.{type(part).__name__}"
        for name, part in module.named_modules()
        if isinstance(part, torch.nn.RNNBase)
    ]


def _violated(entry: ModelSettings, text: str) -> ModelError | None:
    """Return the error where torch names conditions that sizes of a range break, and suggests nothing."""
    found = _VIOLATED.findall(text)
    if not found:
        return None
    names = {size: dim for dim, size, _ in found}
    conditions = [_in_dims(condition, names) for _, _, condition in found]
    dims = sorted(set(names.values()))
    listed = ", ".join(f"`{name}`" for name in dims)
    more = f" and {len(conditions) - _MOST} more" if len(conditions) > _MOST else ""
    return ModelError(
        entry.name,
        "export",
        f"not every size in the range of {listed} works: it needs {' and '.join(conditions[:_MOST])}{more}",
        hint=f"narrow {', '.join(f'`dims.{name}`' for name in dims)}, use the same name for sizes that must be equal, "
        "or make forward() work for every size",
        details=first_lines(text, 12),
    )


def _in_dims(condition: str, names: dict[str, str]) -> str:
    for size, name in names.items():
        condition = condition.replace(size, name)
    return condition


def _advice(name: str, suggestion: str) -> str:
    """Turn torch's suggestion for a dim (`Dim('n', min=8)`, `m`, `2*_n`) into words about the settings."""
    bounds = re.fullmatch(r"Dim\('\w+'(?:, min=(\d+))?(?:, max=(\d+))?\)", suggestion)
    if bounds is not None:
        pairs = [f"{key} = {value}" for key, value in zip(("min", "max"), bounds.groups(), strict=True) if value]
        return f"write `dims.{name} = {{ {', '.join(pairs)} }}`, or make forward() work for the other sizes"
    if suggestion.isidentifier():
        return f'`{name}` and `{suggestion}` must always be equal: write "{suggestion}" for both in the shapes'
    return (
        f"forward() works for `{name}` = {suggestion} only, where the name with the underscore is any whole number; "
        "make it work for every size of the range (by padding, say)"
    )


@contextlib.contextmanager
def sizes_asked_for() -> Iterator[list[str]]:
    """Yield a list that gets the places in the project's code (`net.py:14`) where a dynamic size gets its one value.

    torch knows them and only logs them, at a level that nobody sees who has not asked for it.
    """
    logger = logging.getLogger("torch.fx.experimental.symbolic_shapes")
    level, handlers, places = logger.level, logger.handlers[:], _Places()
    if not logger.isEnabledFor(logging.INFO):
        logger.setLevel(logging.INFO)
        logger.handlers.clear()
    logger.addHandler(places)
    try:
        yield places.found
    finally:
        logger.setLevel(level)
        logger.handlers[:] = handlers


class _Places(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "[guard added]" not in record.getMessage() or not _IS_NUMBER.search(record.getMessage()):
            return
        logged = itertools.takewhile(lambda frame: frame.filename != logging.__file__, traceback.extract_stack())
        frames = users_frames(logged)
        if frames and (place := f"{Path(frames[-1].filename).name}:{frames[-1].lineno}") not in self.found:
            self.found.append(place)
