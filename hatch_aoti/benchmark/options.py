"""What to measure, as it was asked for."""

from __future__ import annotations

import dataclasses
import importlib.util
from typing import TYPE_CHECKING

from hatch_aoti.benchmark.contenders import CONTENDERS
from hatch_aoti.benchmark.figures import OURS
from hatch_aoti.errors import AotiError, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["PACKAGE_NAMES", "Options", "available_contenders"]

PACKAGE_NAMES = {"aotinductor": "load()"}  # what a contender is called where it is part of the wheel


@dataclasses.dataclass(frozen=True)
class Options:
    """What to measure: contenders by key, how many threads each may use, how often each start and round is repeated.

    `models` are names, empty for all; `builds` says whether builds are compared.
    """

    contenders: tuple[str, ...]
    threads: int
    models: tuple[str, ...] = ()
    rounds: int = 10
    repeats: int = 3
    builds: bool = True


def available_contenders(asked: Sequence[str], *, package: bool) -> tuple[str, ...]:
    """Return the keys of the contenders to measure: those asked for, or else all that can run here.

    Raises `AotiError` for a key that does not exist, that a package cannot be measured with, or that needs something
    that is not installed.
    """
    possible = (OURS, *PACKAGE_NAMES) if package else tuple(CONTENDERS)
    for key in asked:
        if key not in CONTENDERS:
            raise AotiError(
                f"there is no contender `{key}`.{did_you_mean(key, possible)} There are: {', '.join(possible)}"
            )
        if key not in possible:
            raise AotiError(
                f"the contender `{key}` needs the model's source, which an installed package does not have; there are: "
                f"{', '.join(possible)}. Measure the project instead, without --package"
            )
        missing = [name for name in CONTENDERS[key].requires if importlib.util.find_spec(name) is None]
        if missing:
            raise AotiError(
                f"the contender `{key}` needs {', '.join(missing)}, not installed here; "
                'pip install "hatch-aoti[bench]" has it'
            )
    if asked:
        return tuple(key for key in CONTENDERS if key in asked)
    return tuple(key for key in possible if all(map(importlib.util.find_spec, CONTENDERS[key].requires)))
