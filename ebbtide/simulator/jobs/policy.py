"""Interface between the engine and a policy: the hooks that the engine's kernels call, and what a policy declares.

Each hook calls the policy's kernel of that name, which it finds by the class of the policy's arrays: interpreted in a
table, compiled by numba's choice of an implementation by types (`simulator.jobs.engine.build`). A kernel is a function
that numba can compile. ``s`` is the engine's state, of which a policy changes only TIME.note, MACHINE.held and
SUM.wake; ``p`` is the policy's own state, a tuple of arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from ebbtide.simulator.errors import InvalidParameter
from ebbtide.simulator.jobs.columns import State

Kernel = Callable[..., Any]
#: (state, the policy's arrays so far or None, cores of the largest machine, seed) to the policy's arrays.
Resized = Callable[[State, Any, int, int], Any]

#: The kernels of each policy, by the class of its arrays and the name of the hook.
_KERNELS: Final[dict[tuple[type[Any], str], Kernel]] = {}


@dataclass(frozen=True, slots=True)
class Policy:
    """A policy for `Engine`.

    :param name: appears in what the engine saves.
    :param kernels: by the names of `HOOKS`; a hook without one does nothing. ``schedule`` replaces the whole look at
        the queue. Functions of modules, which numba can compile and which import no numba. They never count an index
        from the end of one of the engine's arrays.
    :param state: the class of the policy's arrays, a NamedTuple of a module; a checkpoint holds them. Policies with one
        class share one compiled loop, and so must their kernels.
    :param resized: makes the arrays at the start, and again (with the old ones) when machines are added or grow beyond
        all that were. `moved` is then called for every machine.
    :param by_demand: where it has no machine for one task, it has none for any other that wants as many cores and as
        much memory.
    :param allocates: whether its kernels make arrays; the loop counts references then, and is several times as slow.
    """

    name: str
    kernels: Mapping[str, Kernel]
    state: type[Any]
    resized: Resized
    by_demand: bool = True
    allocates: bool = False


def begin(s: State, p: Any, now_s: float) -> None:
    """A look at all that waits begins."""
    _KERNELS[type(p), "begin"](s, p, now_s)


def choose(s: State, p: Any, task: int, now_s: float) -> int:
    """The machine on which a waiting task shall start now; -1: on none.

    It must have room for it (`machines.fits`), and not be held.
    """
    machine: int = _KERNELS[type(p), "choose"](s, p, task, now_s)
    return machine


def moved(s: State, p: Any, machine: int) -> None:
    """What a machine has free has changed, or whether it is held."""
    _KERNELS[type(p), "moved"](s, p, machine)


def changed(s: State, p: Any, machine: int, now_s: float, cores_before: int) -> None:
    """A machine's cores have changed: its columns say to what, its MACHINE_TIME.changed still when it was before."""
    _KERNELS[type(p), "changed"](s, p, machine, now_s, cores_before)


def started(s: State, p: Any, task: int, machine: int, now_s: float) -> None:
    """A task runs."""
    _KERNELS[type(p), "started"](s, p, task, machine, now_s)


def ended(s: State, p: Any, task: int, machine: int, now_s: float, completed: bool) -> None:
    """A task has completed or was killed; it is no longer among those that run."""
    _KERNELS[type(p), "ended"](s, p, task, machine, now_s, completed)


def withdrawn(s: State, p: Any, task: int, machine: int, now_s: float) -> None:
    """A replica that ran is not needed any more: neither completed nor killed, and no longer among those that run."""
    _KERNELS[type(p), "withdrawn"](s, p, task, machine, now_s)


def schedule(s: State, p: Any, now_s: float) -> None:
    """Start what may start now: `passes.schedule`, where a policy has no look at the queue of its own."""
    _KERNELS[type(p), "schedule"](s, p, now_s)


HOOKS: Final[Mapping[str, Kernel]] = {
    hook.__name__: hook for hook in (begin, choose, moved, changed, started, ended, withdrawn, schedule)
}


def _nothing(s: State, p: Any, *rest: Any) -> None:
    """A hook that a policy has no kernel for."""


def _nowhere(s: State, p: Any, task: int, now_s: float) -> int:
    """The choice of a policy that starts nothing by itself."""
    return -1


def register(policy: Policy, schedule: Kernel) -> None:
    """Let the hooks call a policy's kernels.

    :param schedule: the look at the queue of a policy that has none of its own.
    :raises InvalidParameter: a kernel of no hook's name, or kernels that differ from those of another policy with the
        same class of arrays.
    """
    for hook in policy.kernels:
        if hook not in HOOKS:
            raise InvalidParameter("kernels", f"must be of {', '.join(HOOKS)}, not {hook!r}")
    others = {"choose": _nowhere, "schedule": schedule}
    for hook in HOOKS:
        kernel = policy.kernels.get(hook, others.get(hook, _nothing))
        if _KERNELS.setdefault((policy.state, hook), kernel) is not kernel:
            raise InvalidParameter("kernels", f"differ in {hook} from those of another policy of {policy.state}")


def kernel_of(arrays: type[Any], hook: str) -> Kernel:
    """The kernel that a registered policy has for a hook."""
    return _KERNELS[arrays, hook]
