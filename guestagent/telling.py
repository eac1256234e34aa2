"""The log on standard error, in the form of the other daemons, and what systemd is told (sd_notify(3))."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from typing import Mapping

#: As syslog counts them.
PRIORITIES = {"error": 3, "warning": 4, "info": 6}
#: How often the status is told where nobody watches, seconds.
PERIOD_S = 30.0
_as_json = False
_least = "info"


def configure(level: str = "info", as_json: bool = False) -> None:
    """From now on: the least that is logged (error, warning or info), and whether as JSON."""
    global _as_json, _least
    _as_json, _least = as_json, level


def log(sentence: str, level: str = "info") -> None:
    """A line on standard error; one that cannot be written is no reason to stop."""
    if PRIORITIES[level] > PRIORITIES[_least]:
        return
    journal = _to_journal()
    words = {} if journal else {"timestamp": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
    words["level"], words["event"] = level, sentence
    if _as_json:
        import json

        line = json.dumps(words)
    else:
        line = " ".join(f"{key}={_quoted(value)}" for key, value in words.items())
    with contextlib.suppress(OSError):
        print(f"<{PRIORITIES[level]}>{line}" if journal else line, file=sys.stderr, flush=True)


def _quoted(value: str) -> str:
    if not any(character in value for character in ' ="\n'):
        return value
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'


def _to_journal() -> bool:
    """Whether standard error is the journal's, and not just the environment of one whose was."""
    try:
        found = os.fstat(2)
    except OSError:
        return False
    return os.environ.get("JOURNAL_STREAM") == f"{found.st_dev}:{found.st_ino}"


class Supervision:
    """Tells systemd that the agent is ready, what it does, that its loop turns; nothing elsewhere.

    Call `alive` at least every `period_s` seconds, in the loop that is watched.
    """

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self._address = environ.get("NOTIFY_SOCKET", "")
        self.period_s: float | None = None
        self._next = 0.0
        if self._address:
            usec, meant = environ.get("WATCHDOG_USEC", ""), environ.get("WATCHDOG_PID", "")
            watched = usec.isdigit() and int(usec) > 0 and meant in ("", str(os.getpid()))
            # Two signs may be late.
            self.period_s = min(int(usec) / 3e6, PERIOD_S) if watched else PERIOD_S

    def ready(self, status: str) -> None:
        """It serves."""
        self._tell("READY=1", "STATUS=" + status)

    def alive(self, status: str) -> None:
        """The loop turns."""
        now = time.monotonic()
        if self.period_s is not None and now >= self._next:
            self._next = now + self.period_s / 2
            self._tell("WATCHDOG=1", "STATUS=" + status)

    def stopping(self) -> None:
        """It ends."""
        self._tell("STOPPING=1")

    def _tell(self, *words: str) -> None:
        if not self._address:
            return
        import socket

        address = "\0" + self._address[1:] if self._address[0] == "@" else self._address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as channel:
                channel.setblocking(False)
                channel.sendto("\n".join(words).encode(), address)
        except OSError:
            pass  # a full queue, or a systemd that restarts: the next sign comes soon
