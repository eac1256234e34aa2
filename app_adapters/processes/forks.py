"""What a forked child must not hold on to.

Python's sockets and files are closed by exec, but not by a fork without one, as that of a process pool. A child that
lives longer than its parent would hold the place that the parent listened on or had locked: nobody answers there, and
nobody else can.
"""

from __future__ import annotations

import contextlib
import os
import socket
from typing import Any
from weakref import WeakSet

_holders: WeakSet[Any] = WeakSet()


def released_in_children(holder: Any) -> None:
    """Have `holder.release_in_child()` called in every child that this process forks from now on.

    It is called in the child alone, without its parent's other threads: it closes what it holds and takes no lock.
    """
    _holders.add(holder)


def close_here(held: socket.socket) -> None:
    """Close it in this process only, and also where a transport holds on to it."""
    number = held.detach()
    if number >= 0:
        os.close(number)


def _release() -> None:
    for holder in list(_holders):
        with contextlib.suppress(Exception):
            holder.release_in_child()


os.register_at_fork(after_in_child=_release)
