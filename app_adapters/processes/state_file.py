"""State file of an adapter: what it needs after a restart to undo what it did, as JSON."""

from __future__ import annotations

import contextlib
import json
import os
from typing import Any

from app_adapters.errors import ApplicationError

STATE_BYTES = 65536


class StateFile:
    """A JSON object in a file. It is replaced as a whole, so that no crash leaves a part of one.

    `earlier_path` is where an earlier version has it: from there it goes to `path` when it is saved.
    """

    def __init__(self, path: str, earlier_path: str = "") -> None:
        self.path = path
        self._earlier = StateFile(earlier_path) if earlier_path else None

    def load(self) -> dict[str, Any] | None:
        """What was saved, None where there is nothing.

        Raises: ApplicationError where it cannot be read: what was there before a deflation is then not known.
        """
        try:
            with open(self.path, "rb") as file:
                body = json.loads(file.read(STATE_BYTES).decode("utf-8"))
        except FileNotFoundError:
            return self._earlier.load() if self._earlier is not None else None
        except OSError as error:
            raise ApplicationError(f"the state file {self.path} cannot be read: {error.strerror}") from None
        except ValueError as error:
            raise ApplicationError(f"the state file {self.path} is damaged: {error}") from None
        if not isinstance(body, dict):
            raise ApplicationError(f"the state file {self.path} is damaged: it holds no object")
        return body

    def save(self, body: dict[str, Any]) -> None:
        """Replace what was saved; it is on the disk when this returns.

        Raises: ApplicationError, and what was there before stays.
        """
        directory = os.path.dirname(os.path.abspath(self.path))
        new = f"{self.path}.new"
        try:
            os.makedirs(directory, mode=0o755, exist_ok=True)
            # O_EXCL and O_NOFOLLOW: no file or link of another user is written through.
            with contextlib.suppress(FileNotFoundError):
                os.unlink(new)
            fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
            with os.fdopen(fd, "wb") as file:
                file.write(json.dumps(body).encode("ascii"))
                file.flush()
                os.fsync(file.fileno())
            os.replace(new, self.path)
            _sync_directory(directory)
        except OSError as error:
            raise ApplicationError(f"the state file {self.path} cannot be written: {error.strerror}") from None
        self._remove_earlier()

    def remove(self) -> None:
        """Forget what was saved. Raises: ApplicationError."""
        self._remove_earlier()  # first: it would be found again where this one is gone
        try:
            # Looked for: on a read-only file system a removal fails though nothing is there.
            os.lstat(self.path)
            os.unlink(self.path)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise ApplicationError(f"the state file {self.path} cannot be removed: {error.strerror}") from None

    def _remove_earlier(self) -> None:
        if self._earlier is not None:
            self._earlier.remove()


def _sync_directory(directory: str) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
