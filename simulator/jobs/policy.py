"""What a policy is to the engine: kernels that take the places of `hooks`, and arrays of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from simulator.jobs.columns import State

#: (state, the policy's arrays so far or None, cores of the largest machine, seed) to the policy's arrays.
Resized = Callable[[State, Any, int, int], Any]


@dataclass(frozen=True, slots=True)
class Policy:
    """A policy for `Engine`.

    :param name: of the compiled loop: policies of one name share it, and so must their kernels and types.
    :param kernels: by the names of `simulator.jobs.hooks` (what is missing does nothing), or ``schedule`` in place of
        the whole look at the queue (`passes.schedule`). Functions of modules, which numba can compile and which import
        no numba.
    :param state: the class of the policy's arrays, a NamedTuple of a module; a checkpoint holds them.
    :param resized: makes the arrays at the start, and again (with the old ones) when machines are added or grow beyond
        all that were. `moved` is then called for every machine.
    :param by_demand: where it has no machine for one task, it has none for any other that wants as many cores and as
        much memory.
    :param allocates: whether its kernels make arrays; the loop counts references then, and is several times as slow.
    """

    name: str
    kernels: Mapping[str, Callable[..., Any]]
    state: type[Any]
    resized: Resized
    by_demand: bool = True
    allocates: bool = False
