"""Files that are replaced whole: what fails leaves what was there, and nothing beside it."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def replacing(path: Path, mode: int = 0o600, *, durable: bool = True) -> Iterator[BinaryIO]:
    """A new file beside a path, to be written and read; it takes the path's place at the end of the block.

    :param mode: less what the umask takes.
    :param durable: a loss of power after the block leaves the whole file or the one before.
    :raises OSError: it cannot be written; what is raised in the block is raised too.
    """
    # Ours, by a name that nobody can guess: in a directory of others one may be there, or lead elsewhere.
    fresh = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    file = open(fresh, "x+b", opener=lambda name, flags: os.open(name, flags, mode))  # noqa: SIM115 - closed below
    try:
        with file:
            yield file
            file.flush()
            if durable:
                os.fsync(file.fileno())
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)
