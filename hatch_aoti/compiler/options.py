"""Options of `torch._inductor.config` against the torch that compiles: which there are, and what they take."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hatch_aoti.errors import CompileError, did_you_mean
from hatch_aoti.settings.inductor import split_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = ["check_options", "whole_tables"]

# The types that torch's options have and TOML knows, in TOML's words. torch itself takes anything for anything: the
# string "false" would be true.
_NOUNS = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}


def whole_tables(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return `options` with the tables that torch's options hold put together again.

    A project's `post_grad_fusion_options = { batch_linear = { min_fuse_set_size = 2 } }` arrives as
    `post_grad_fusion_options.batch_linear.min_fuse_set_size`. Names of no option are left as they are; groups of
    options in which nothing is set (`cpp = {}`) are left out.
    """
    known = _known()
    whole: dict[str, Any] = {}
    for name, value in options.items():
        parts = split_name(name)
        starts = [".".join(parts[:length]) for length in range(len(parts) - 1, 0, -1)]
        option = next((start for start in starts if start in known), None)
        if name in known or option is None:
            if name in known or value != {} or not any(other.startswith(f"{name}.") for other in known):
                whole[name] = value
            continue
        *tables, key = parts[option.count(".") + 1 :]
        place = whole.setdefault(option, {})
        for table in tables:
            place = place.setdefault(table, {})
        place[key] = value
    return whole


def check_options(options: Mapping[str, Any]) -> None:
    """Raise `CompileError` for the first of `options` that the installed torch does not have, or not as this type."""
    import torch

    known = _known()
    for name, value in options.items():
        if name not in known:
            raise CompileError(
                f"torch {torch.__version__} has no inductor option `{name}`.{_suggestion(name, known)}",
                hint="see torch/_inductor/config.py for the options of the installed torch",
            )
        expected = known[name]
        fits = type(value) is expected or (expected is float and type(value) is int)
        if expected in _NOUNS and not fits:
            raise CompileError(
                f"torch {torch.__version__} takes {_NOUNS[expected]} for the inductor option `{name}`, but it is "
                f"{value!r}",
                hint="see torch/_inductor/config.py for what the options of the installed torch mean",
            )


def _known() -> Mapping[str, Any]:
    """Return the names of torch's options, each with its type, or what its annotation is."""
    from torch._inductor import config as untyped

    config: Any = untyped
    return {name: config.get_type(name) for name in config.get_config_copy()}


def _suggestion(name: str, known: Iterable[str]) -> str:
    """Say which option was meant: one that is spelled alike, or one that lacks only its group's name (`cpp.`)."""
    word = name.replace("-", "_")
    same_ending = [option for option in known if option.endswith(f".{word}")]
    if word in known or not same_ending:
        return did_you_mean(word, known)
    return " Did you mean " + " or ".join(f'"{option}"' for option in same_ending) + "?"
