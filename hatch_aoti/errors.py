"""The errors that users see: sentences for the person who must act, without a traceback of ours."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence


import difflib
import errno
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = [
    "MAKE_ROOM",
    "SAVE_AGAIN",
    "AotiError",
    "CompileError",
    "ModelError",
    "Problem",
    "SavedProgramError",
    "SettingsError",
    "UnsupportedModelError",
    "did_you_mean",
    "full_disk",
]


class AotiError(Exception):
    """An expected failure. Its text is complete: what was wrong, where, and what to do."""


@dataclasses.dataclass(frozen=True, order=True)
class Problem:
    """One mistake in the configuration.

    `key` is where it is, as a dotted TOML path (`tool.aoti.models.digits.dims.batch.min`) or the name of an
    environment variable; `message` says what was expected, what is there and, for a near miss, "did you mean".
    """

    key: str
    message: str

    def __str__(self) -> str:
        return f"`{self.key}`: {self.message}"


class SettingsError(AotiError):
    """Everything that is wrong with the configuration, at once."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        count = len(self.problems)
        head = "1 mistake in the configuration" if count == 1 else f"{count} mistakes in the configuration"
        super().__init__("\n".join([f"{head}:", *(f"  - {problem}" for problem in self.problems)]))


class ModelError(AotiError):
    """A model that did not make it, with the stage it failed in.

    `stage` is one of `load`, `import`, `build`, `weights`, `inputs`, `export`, `compile`, `verify`; `reason` is one or
    more sentences; `hint` says what to do; `details` is text that helps to find the place: the user's own traceback, or
    the telling end of the compiler's output; `log` is the file with everything, and `folder`, if what is needed to
    compile the model again could be kept, the one with that, and `script` a script in it that does.
    """

    def __init__(
        self,
        model: str,
        stage: str,
        reason: str,
        *,
        hint: str = "",
        details: str = "",
        log: str = "",
        folder: str = "",
        script: str = "",
    ) -> None:
        self.model, self.stage, self.reason = model, stage, reason
        self.hint, self.details, self.log = hint, details, log
        lines = [f"model `{model}` failed at stage `{stage}`: {reason}"]
        lines += [f"    {line}" for line in details.splitlines()]
        lines += [f"  What to do: {hint}"] if hint else []
        lines += [f"  Full log: {log}"] if log else []
        lines += [f"  To reproduce it: {folder} has the exported program and what was made of it;"] if folder else []
        lines += [f"    `python {script}` compiles it in plain PyTorch"] if folder else []
        super().__init__("\n".join(lines))


class CompileError(AotiError):
    """AOTInductor or the C++ compiler failed; `details` is the telling end of what they said.

    `killed`: the system killed it, for want of memory.
    """

    def __init__(self, reason: str, *, hint: str = "", details: str = "", killed: bool = False) -> None:
        self.reason, self.hint, self.details, self.killed = reason, hint, details, killed
        super().__init__(reason)


MAKE_ROOM = (
    "make room there, or name other places: the environment variable TMPDIR for temporary files, "
    "HATCH_AOTI_CACHE_DIR for the cache, in which models are compiled"
)
"""What to do when a disk is full."""


def full_disk(error: BaseException) -> str:
    """Say which disk, or quota, is full if that is what `error` comes from; otherwise return an empty string."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in {errno.ENOSPC, errno.EDQUOT}:
            where = f" for {os.fsdecode(cause.filename)}" if isinstance(cause.filename, (str, bytes)) else ""
            return f"there is no space left on the disk{where} ({cause.strerror})"
        cause = cause.__cause__ or cause.__context__
    return "there is no space left on the disk" if "No space left on device" in str(error) else ""


def did_you_mean(word: str, choices: Sequence[str] | Iterable[str]) -> str:
    """Return ` Did you mean "x"?` for the choice nearest to `word`, or an empty string when none is near."""
    near = difflib.get_close_matches(word, list(choices), n=1, cutoff=0.6)
    return f' Did you mean "{near[0]}"?' if near else ""


class UnsupportedModelError(AotiError):
    """The program does something for which a compiled call cannot keep eager's behaviour; the text names it."""


SAVE_AGAIN: Final = "save it again with `torch.export.save(program, path)`"


class SavedProgramError(AotiError):
    """A file that is no exported program, or none that may be loaded; `hint` says what to do."""

    def __init__(self, reason: str, hint: str = SAVE_AGAIN) -> None:
        self.reason, self.hint = reason, hint
        super().__init__(f"{reason}. What to do: {hint}")
