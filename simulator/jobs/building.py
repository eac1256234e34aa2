"""One loop a policy: the engine's kernels bound to the policy's, interpreted or compiled."""

from __future__ import annotations

import functools
import hashlib
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FunctionType
from typing import Any, Final

from simulator.compiling import compiled, share_calls, shared
from simulator.errors import InvalidParameter
from simulator.jobs import hooks, loop, passes, running
from simulator.jobs.columns import State
from simulator.jobs.policy import Policy

Advance = Callable[[State, Any, int], int]
Kernel = Callable[..., Any]

#: Kernels that call a hook, or one of these: each before those that call it.
_CHAIN: Final[tuple[Kernel, ...]] = (
    running.start,
    running.kill,
    running.withdraw,
    running.finish,
    running.resize,
    passes.schedule,
    loop.advance,
)
_HOOKS: Final = ("begin", "choose", "moved", "changed", "started", "ended", "withdrawn")


@functools.cache
def _built(
    name: str, kernels: tuple[tuple[str, Kernel], ...], by_demand: bool, allocates: bool, compile: bool
) -> Advance:
    given = dict(kernels)
    hooked = {hook: given.get(hook, getattr(hooks, hook)) for hook in _HOOKS}
    # A policy's own look at the queue starts tasks itself, and so belongs to what is bound.
    chain = [(k.__name__, given.get(k.__name__, k)) for k in _CHAIN]
    names = bind(chain, {"BY_DEMAND": by_demand, **hooked})
    advance: FunctionType = names["advance"]
    if not compile:
        return advance
    # What numba keeps on disk is found by this name.
    advance.__qualname__ = f"advance_{name.replace('-', '_')}_{_stamp(given, by_demand, allocates)}"
    for kernel in hooked.values():
        shared(kernel)
    share_calls(advance)
    # Thirty arrays go from function to function: counting who holds them would cost ten times the work.
    return compiled(advance, _nrt=allocates, error_model="numpy", forceinline=True)


def build(policy: Policy, compile: bool = True) -> Advance:
    """The loop for a policy: `loop.advance` with the policy's kernels in it.

    :param compile: with numba; else the very same functions, interpreted: slow, for tests.
    :raises InvalidParameter: a kernel of no hook's name.
    :raises MissingExtra: numba is not installed.
    """
    for hook in policy.kernels:
        if hook not in _HOOKS and hook != "schedule":
            raise InvalidParameter("kernels", f"must be of {', '.join(_HOOKS)} or schedule, not {hook!r}")
    return _built(policy.name, tuple(sorted(policy.kernels.items())), policy.by_demand, policy.allocates, compile)


def bind(functions: Sequence[tuple[str, Kernel]], replaced: Mapping[str, Any]) -> dict[str, Any]:
    """Copies of functions, by these names, that see other globals: what is ``replaced``, and those before them."""
    names = dict(replaced)
    for name, function in functions:
        assert isinstance(function, FunctionType)
        names[name] = FunctionType(function.__code__, {**function.__globals__, **names}, name, function.__defaults__)
    return names


def _stamp(kernels: Mapping[str, Kernel], *options: bool) -> str:
    """Changes with a policy's kernels and with their modules: also those that are not of this project."""
    digest = hashlib.blake2b(f"{options}".encode(), digest_size=6)
    for hook, kernel in sorted(kernels.items()):
        file = getattr(sys.modules.get(kernel.__module__), "__file__", None)
        digest.update(f"{hook} {kernel.__module__} {kernel.__qualname__}\n".encode())
        digest.update(Path(file).read_bytes() if file else b"")
    return digest.hexdigest()
