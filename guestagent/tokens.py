"""The VM's token in files: root's, and a copy for each user that a hook runs as."""

from __future__ import annotations

import contextlib
import os
import threading
from typing import Callable

from guestagent.errors import GuestFailure
from guestagent.notices import make_run_dir

FILE_NAME = "token"
COPIES = "tokens"


class Tokens:
    """Files in `run_dir`, which nobody else may write. `log` is given a sentence for a copy that cannot be made."""

    def __init__(self, run_dir: str, log: Callable[[str], None]) -> None:
        self._run_dir = run_dir
        self._log = log
        self._lock = threading.Lock()
        self._copied: dict[str, tuple[int, str]] = {}
        self._complaint = ""
        #: What the host gave last, empty before its first hello.
        self.token = ""

    def take(self, token: str) -> None:
        """Write root's. Raises: GuestFailure."""
        if token == self.token:
            return
        try:
            make_run_dir(self._run_dir)
            _write(os.path.join(self._run_dir, FILE_NAME), token, 0o640)
        except OSError as error:
            raise GuestFailure(f"cannot write the token: {error}") from None
        self.token = token

    def copy_for(self, users: dict[str, int]) -> None:
        """Have the token in `tokens/USER` for each of these, by name with their ids, and for nobody else."""
        with self._lock:
            wanted = {user: (uid, self.token) for user, uid in users.items()}
            if not self.token or wanted == self._copied:
                return
            directory = os.path.join(self._run_dir, COPIES)
            try:
                make_run_dir(directory)
                for name in set(os.listdir(directory)) - set(wanted):
                    os.unlink(os.path.join(directory, name))
                for user, (uid, token) in wanted.items():
                    _write(os.path.join(directory, user), token, 0o400, uid)
            except OSError as error:
                if str(error) != self._complaint:
                    self._complaint = str(error)
                    self._log(f"the token cannot be written for the users of hooks: {error}")
                return
            self._copied, self._complaint = wanted, ""


def _write(path: str, token: str, mode: int, uid: int = -1) -> None:
    """Replace a file, so that no part of one is read. Raises: OSError."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path + ".new")
    fd = os.open(path + ".new", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(fd, "w") as file:
        file.write(token)
        os.fchown(fd, uid, -1)
        os.fchmod(fd, mode)
    os.rename(path + ".new", path)
