"""Small files that belong to an adapter and are read by a server."""

from __future__ import annotations

import contextlib
import os
import tempfile

from app_adapters.errors import ApplicationError


def read_text(path: str) -> str | None:
    """What the file holds, None where there is none. Raises: ApplicationError where it cannot be read."""
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ApplicationError(f"{path}: {error}") from None


def write_atomically(path: str, text: str) -> None:
    """Replace the file as a whole, readable by all. Raises: ApplicationError."""
    directory, base = os.path.split(os.path.abspath(path))
    temporary = ""
    try:
        # Hidden and with another ending, so that no include pattern of a server takes it.
        handle, temporary = tempfile.mkstemp(prefix=f".{base}.", suffix=".tmp", dir=directory)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fchmod(handle, 0o644)
            os.fsync(handle)
        os.replace(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise ApplicationError(f"{path} cannot be written: {error.strerror}") from None


def put_back(path: str, text: str | None) -> None:
    """The file as it was; None: it was not there. Raises: ApplicationError."""
    if text is not None:
        write_atomically(path, text)
        return
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise ApplicationError(f"{path} cannot be removed: {error.strerror}") from None
