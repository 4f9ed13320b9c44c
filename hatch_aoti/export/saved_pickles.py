"""Pickles in a saved program: read only by loaders that run nothing."""

from __future__ import annotations

import io
import pickletools
import zipfile

from hatch_aoti.errors import SavedProgramError
from hatch_aoti.export.saved_expressions import UNTRUSTED

__all__ = ["checked_pickle", "custom_object", "imports"]


def checked_pickle(data: bytes, member: str) -> bytes:
    """Return the `torch.save` file `data` if torch would load it with `weights_only=True`, without custom classes."""
    import torch

    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            entries = archive.infolist()
            names = [entry.filename.lower() for entry in entries]
            if len(set(names)) < len(names) or any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
                raise SavedProgramError(f"has a `{member}` with members that torch never writes", UNTRUSTED)
            if sum(entry.file_size for entry in entries) > len(data):
                raise SavedProgramError(f"has a `{member}` with members larger than itself", UNTRUSTED)
            [pickled] = [archive.read(entry) for entry in entries if entry.filename.endswith("/data.pkl")]
    except (zipfile.BadZipFile, ValueError, NotImplementedError) as error:
        raise SavedProgramError(f"has a `{member}` that `torch.save` did not write", UNTRUSTED) from error
    try:
        unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(data))
    except Exception:  # noqa: BLE001 - a pickle in a form that weights_only does not read
        unsafe = sorted(imports(pickled)) or ["an unknown operation"]
    if unsafe:
        raise SavedProgramError(
            f"has a pickle in `{member}` that would run {', '.join(f'`{name}`' for name in sorted(unsafe)[:4])}",
            "if this is a class of the program's inputs or weights, export it with plain tensors in tuples, lists and "
            f"dicts, saved with the default pickle protocol. If not, {UNTRUSTED}",
        )
    return data


def imports(pickled: bytes) -> set[str]:
    """Return the dotted names that a pickle asks for, without executing it."""
    found: set[str] = set()
    strings: list[str] = []
    try:
        for opcode, argument, _ in pickletools.genops(pickled):
            if opcode.name in {"GLOBAL", "INST"}:
                found.add(str(argument).replace(" ", "."))
            elif opcode.name == "STACK_GLOBAL":
                found.add(".".join(strings[-2:]))
            elif isinstance(argument, str):
                strings.append(argument)
    except (ValueError, UnicodeError, OverflowError):
        found.add("an unreadable operation")
    return found


def custom_object(name: str) -> SavedProgramError:
    """Return the error for an object of the class `name`, which only running its pickle would restore."""
    return SavedProgramError(
        f"holds an object of a class (`{name}`), which only unpickling can restore",
        "export a model whose constants are tensors",
    )
