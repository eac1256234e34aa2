"""Sees what the agent's code does on one thread that may block it: files, processes, look-ups of names.

Python tells of most of it by audit events (PEP 578); a hook cannot be taken away again, so there is one, which listens
only while somebody watches. What has no event is wrapped.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, Final

import pytest

import hostagent
from ebbtide import deflation

#: Where the code lives that is watched.
ROOMS: Final = tuple(str(Path(str(room.__file__)).parent) + os.sep for room in (hostagent, deflation))
BLOCKING: Final = frozenset(
    {
        *("open", "glob.glob", "pathlib.Path.glob", "subprocess.Popen", "socket.getaddrinfo", "socket.gethostbyname"),
        *(f"os.{name}" for name in ("listdir", "scandir", "mkdir", "rmdir", "remove", "rename", "truncate", "chmod")),
        *("os.system", "os.posix_spawn", "os.fork", "shutil.rmtree", "time.sleep"),
    }
)
#: Without an event of their own.
WRAPPED: Final = ("stat", "fsync", "access")


class Watched:
    """The thread that is watched now, and what was seen there."""

    thread: int | None = None
    offences: list[str] = []  # noqa: RUF012


def _note(what: str, frame: FrameType | None) -> None:
    """Note what was done on the watched thread if code of ours had it done; imports do not count."""
    places = []
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith("<frozen importlib"):
            return
        if name.startswith(ROOMS):
            places.append(f"{Path(name).name}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back
    if places:
        Watched.offences.append(f"{what} in {' < '.join(places)}")


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if Watched.thread == threading.get_ident() and event in BLOCKING:
        _note(f"{event} {arguments[0]!r}" if arguments else event, sys._getframe())


sys.addaudithook(_hook)


@contextlib.contextmanager
def watched_thread() -> Iterator[list[str]]:
    """Reconciler the thread that this runs in.

    :returns: what was done there and where, as it happens.
    """
    Watched.offences = []
    with pytest.MonkeyPatch.context() as patch:
        for name in WRAPPED:
            patch.setattr(os, name, _wrapped(name))
        Watched.thread = threading.get_ident()
        try:
            yield Watched.offences
        finally:
            Watched.thread = None


def _wrapped(name: str) -> Any:
    original = getattr(os, name)

    def noting(*arguments: Any, **named: Any) -> Any:
        if Watched.thread == threading.get_ident():
            _note(f"os.{name} {arguments[0]!r}", sys._getframe())
        return original(*arguments, **named)

    return noting
