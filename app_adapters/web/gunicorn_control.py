"""The control socket of gunicorn 25.1 and later (gunicorn.org, control interface): length in 4 bytes, then JSON.

gunicorn takes the socket away and makes a new one at every fork, so a call may find none although there will be one.
"""

from __future__ import annotations

import json
import os
import re
import socket
import struct
from dataclasses import dataclass
from typing import Any

from app_adapters.errors import ApplicationError

CALL_LIMIT_S = 1.0
ANSWER_BYTES = 4 << 20
LISTENING_FLAG = 0x10000  # __SO_ACCEPTCON, in the fourth column of /proc/net/unix


@dataclass(frozen=True)
class Stats:
    """The master that answers, how many workers it keeps, and its process for other work, which is no worker."""

    pid: int
    target: int
    dirty_pid: int | None


class GunicornControl:
    """A client of the socket at this path; each call is a connection of its own."""

    def __init__(self, path: str) -> None:
        self.path = path

    def stats(self) -> Stats:
        """Raises: ApplicationError where gunicorn does not answer."""
        data = self._call("show stats")
        pid, target, dirty_pid = data.get("pid"), data.get("workers_target"), data.get("dirty_arbiter_pid")
        if not isinstance(pid, int) or not isinstance(target, int):
            raise ApplicationError(f"{self.path} does not tell the number of workers")
        return Stats(pid, target, dirty_pid if isinstance(dirty_pid, int) else None)

    def configured_workers(self) -> int | None:
        """What a reload sets. Raises: ApplicationError where gunicorn does not answer."""
        workers = self._call("show config").get("workers")
        return workers if isinstance(workers, int) and workers > 0 else None

    def change(self, workers: int) -> None:
        """So many more, or fewer where negative. It may have been done although the call fails: look, then repeat.

        Raises: ApplicationError where gunicorn does not answer or refuses.
        """
        self._call(f"worker {'add' if workers > 0 else 'remove'} {abs(workers)}")

    def _call(self, command: str) -> dict[str, Any]:
        body = json.dumps({"id": 1, "command": command, "args": []}).encode("ascii")
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                connection.settimeout(CALL_LIMIT_S)
                connection.connect(self.path)
                connection.sendall(struct.pack(">I", len(body)) + body)
                (length,) = struct.unpack(">I", _read(connection, 4))
                if length > ANSWER_BYTES:
                    raise ValueError("an answer that is too long")
                answer = json.loads(_read(connection, length).decode("utf-8"))
        except (OSError, ValueError) as error:
            raise ApplicationError(f"gunicorn's control socket {self.path}: {error}") from None
        if not isinstance(answer, dict) or answer.get("status") != "ok" or not isinstance(answer.get("data"), dict):
            problem = answer.get("error") if isinstance(answer, dict) else "no answer of gunicorn's"
            raise ApplicationError(f"gunicorn's control socket {self.path}: {command}: {problem}")
        data: dict[str, Any] = answer["data"]
        return data


def _read(connection: socket.socket, length: int) -> bytes:
    data = b""
    while len(data) < length:
        part = connection.recv(length - len(data))
        if not part:
            raise ValueError("the connection was closed")
        data += part
    return data


def find_control(master: int, procfs: str = "/proc") -> GunicornControl | None:
    """The control socket on which this master listens, None where there is none (or one that has another ending).

    One whose path is gone cannot be called, though the master still listens on it.
    """
    inodes = set()
    try:
        for name in os.listdir(f"{procfs}/{master}/fd"):
            match = re.fullmatch(r"socket:\[(\d+)\]", _link(f"{procfs}/{master}/fd/{name}"))
            if match:
                inodes.add(match.group(1))
        with open(f"{procfs}/{master}/net/unix", errors="replace") as file:
            lines = [line.split(None, 7) for line in file][1:]
    except OSError:
        return None
    for fields in lines:
        if len(fields) < 8 or fields[6] not in inodes or not int(fields[3], 16) & LISTENING_FLAG:
            continue
        # A server's own unix socket takes requests of HTTP; it is not to be sent anything else.
        path = os.path.join(_link(f"{procfs}/{master}/cwd") or "/", fields[7].strip())
        if path.endswith(".ctl") and os.path.exists(path):
            return GunicornControl(path)
    return None


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""
