"""A process's settings from before the first deflation, in a file: they outlive the adapter, but not the process."""

from __future__ import annotations

import contextlib
import json
import os
from typing import Mapping

from app_adapters.errors import ApplicationError
from app_adapters.processes.process import started
from app_adapters.processes.state_file import StateFile


class Originals:
    """One file for each process, PID-STARTED.json in a directory; those of processes that are gone are removed."""

    def __init__(self, directory: str) -> None:
        self._directory = directory

    def load(self, pid: int, start: int) -> dict[str, str]:
        """By name, empty where nothing was changed. Raises: ApplicationError where the file cannot be understood."""
        try:
            with open(self._path(pid, start), encoding="utf-8") as file:
                body = json.load(file)
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            raise ApplicationError(f"{self._path(pid, start)} cannot be read: {error}") from None
        if not isinstance(body, dict) or not all(isinstance(value, str) for value in body.values()):
            raise ApplicationError(f"{self._path(pid, start)} does not hold settings")
        return body

    def remember(self, pid: int, start: int, values: Mapping[str, str]) -> dict[str, str]:
        """Keep these values but for those whose original is known already; returns all that is kept.

        Raises: ApplicationError where it cannot be written: then nothing must be changed.
        """
        known = self.load(pid, start)
        kept = {**values, **known}
        if kept != known:
            self._forget_the_dead()
            StateFile(self._path(pid, start)).save(kept)
        return kept

    def replace(self, pid: int, start: int, name: str, value: str) -> None:
        """Keep this value of one name in place of an earlier one; empty: keep none. Raises: ApplicationError."""
        known = self.load(pid, start)
        kept = {key: found for key, found in {**known, name: value}.items() if found or key != name}
        if not kept:
            self.forget(pid, start)
        elif kept != known:
            self._forget_the_dead()
            StateFile(self._path(pid, start)).save(kept)

    def forget(self, pid: int, start: int) -> None:
        """All is as it was. Raises: ApplicationError where its file cannot be removed: it is kept then."""
        StateFile(self._path(pid, start)).remove()

    def _path(self, pid: int, start: int) -> str:
        return os.path.join(self._directory, f"{pid}-{start}.json")

    def _forget_the_dead(self) -> None:
        with contextlib.suppress(OSError):
            for name in os.listdir(self._directory):
                pid, _, rest = name.partition("-")
                start = rest.partition(".")[0]
                if pid.isdigit() and start.isdigit() and started(int(pid)) != int(start):
                    os.unlink(os.path.join(self._directory, name))
