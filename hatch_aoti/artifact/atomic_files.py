"""Files that appear whole or not at all, whoever reads the directory meanwhile."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from pathlib import Path
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


__all__ = ["appearing_file", "replace_file"]


def replace_file(path: Path, content: str | bytes | Path) -> None:
    """Put content, or that of another file, in place by a rename, readable by everyone. Raises `OSError`."""
    with appearing_file(path) as file:
        if isinstance(content, str):
            file.write(content.encode())
        elif isinstance(content, bytes):
            file.write(content)
        else:
            with content.open("rb") as source:
                shutil.copyfileobj(source, file)


@contextlib.contextmanager
def appearing_file(path: Path) -> Iterator[IO[bytes]]:
    """Yield a file that becomes `path`, readable by everyone, when the block succeeds; a failure changes nothing."""
    handle, partial = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
        Path(partial).chmod(0o644)
        Path(partial).replace(path)
    except BaseException:
        Path(partial).unlink(missing_ok=True)
        raise
