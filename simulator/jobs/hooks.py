"""Where a policy is heard. These stand in for one that has no opinion; `building` puts a policy's own in their places.

Each is a kernel: numba must be able to compile it. ``s`` is the engine's state, which only `choose`, `begin` and the
columns F_NOTE, M_HELD and S_WAKE of it are the policy's to change; ``p`` is the policy's own state, a tuple of arrays.
"""

from __future__ import annotations

from typing import Any

from simulator.jobs.columns import State


def begin(s: State, p: Any, now_s: float) -> None:
    """Somebody is about to look at all that waits."""


def choose(s: State, p: Any, task: int, now_s: float) -> int:
    """The machine on which a waiting task shall start now; -1: on none.

    It must have room for it (`room.fits`), and not be held.
    """
    return -1


def moved(s: State, p: Any, machine: int) -> None:
    """What a machine has free has changed, or whether it is held."""


def changed(s: State, p: Any, machine: int, now_s: float, cores_before: int) -> None:
    """A machine's cores have changed: its columns say to what, its H_CHANGED still when it was before."""


def started(s: State, p: Any, task: int, machine: int, now_s: float) -> None:
    """A task runs."""


def ended(s: State, p: Any, task: int, machine: int, now_s: float, completed: bool) -> None:
    """A task has completed or was killed; it is no longer among those that run."""


def withdrawn(s: State, p: Any, task: int, machine: int, now_s: float) -> None:
    """A replica that ran is not needed any more: neither completed nor killed, and no longer among those that run."""
