"""`cascade`, part two: 64 VMs are to be deflated in hardly more time than one.

The real agent and its real libvirt pool over a fake (`benchmarks.host.slow_libvirt`) whose every call takes a
second, and which makes at least as many calls a VM as a real guest needed. Each pair of runs, one VM and 64, has a
process of its own; the pairs sleep most of the time, so they run at once.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import structlog

from benchmarks.figures import BenchmarkFailed, Figure, Figures
from benchmarks.host.fake_agent import HOST, agent_over, settled_intent
from benchmarks.host.slow_libvirt import SlowLibvirt, Slowness
from benchmarks.passes import Pass
from ebbtide.deflation.resources import ResourceVector
from ebbtide.messages.commands import ReclaimCommand
from ebbtide.messages.common import Vector
from ebbtide.messages.operations import OperationState
from hostagent.libvirt.hypervisor import domain_name
from hostagent.operations.agent import Agent
from hostagent.state.intents import to_qualified_element

VMS = 64
CALL_S = 1.0
#: What each VM has to give, as in the deflation of the real guest.
GIVES = ResourceVector(cpu_cores=1.75, memory_mib=640)
DEADLINE_S = 7200.0
MOST_LOOKS = 60


@dataclass(frozen=True)
class Pair:
    """One VM and then all of them, in seconds; the fewest calls that any of them took."""

    one_s: float
    many_s: float
    calls: int
    connections: int


def measure(how: Pass, real_calls: float) -> Figures:
    """:param real_calls: calls of libvirt and the guest that the deflation of a real guest took.

    Raises BenchmarkFailed.
    """
    call_s, vms = (0.05, 8) if how.quick else (CALL_S, VMS)
    looks = looks_for(real_calls)
    how.report(f"{vms} VMs over a libvirt whose every call takes {call_s:g} s; sizes move within {looks} looks")
    # Ended with its context, also by Ctrl-C or SIGTERM.
    with multiprocessing.get_context("spawn").Pool(how.runs) as pool:
        pairs = pool.starmap(_pair, [(vms, call_s, looks)] * how.runs, chunksize=1)
    conditions = f"every call of libvirt and of a guest takes {call_s:g} s"
    return {
        f"side_by_side_{vms}_vms": Figure.over(
            [pair.many_s / pair.one_s for pair in pairs], "ratio", f"the time of one VM; {conditions}"
        ),
        "side_by_side_one_vm_s": Figure.over([pair.one_s for pair in pairs], "s", conditions),
        "side_by_side_calls_per_vm": Figure.over(
            [pair.calls for pair in pairs], "calls", f"the fewest of any VM; the real guest took {real_calls:g}"
        ),
        "side_by_side_connections": Figure.over([pair.connections for pair in pairs], "connections", "libvirt's pool"),
    }


def looks_for(real_calls: float) -> int:
    """So many looks that the fake takes at least as many calls as the real guest; tried without waiting.

    Raises BenchmarkFailed if it never does.
    """
    looks, calls = 1, _calls(1)
    while calls < real_calls and looks < MOST_LOOKS:
        # Each look more costs about the same again, so what is missing tells how many more are needed.
        looks += max(round((real_calls - calls) * looks / calls), 1)
        calls = _calls(looks)
    if calls < real_calls:
        raise BenchmarkFailed(f"the fake takes {calls} calls only, the real guest took {real_calls:g}")
    return looks


def _calls(looks: int) -> int:
    return asyncio.run(_deflate(1, Slowness(0.0, looks))).calls


def _pair(vms: int, call_s: float, looks: int) -> Pair:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    one = asyncio.run(_deflate(1, Slowness(call_s, looks)))
    many = asyncio.run(_deflate(vms, Slowness(call_s, looks)))
    return Pair(one.one_s, many.one_s, min(one.calls, many.calls), many.connections)


async def _deflate(vms: int, how: Slowness) -> Pair:
    """Reclaim from that many VMs at once; the seconds stand in ``one_s``."""
    call_s, how.call_s = how.call_s, 0.0
    world = SlowLibvirt(how)
    # A short path: the name of a unix socket has room for 107 bytes only.
    with tempfile.TemporaryDirectory(prefix="ebb-bench-") as directory:
        try:
            for number in range(vms):
                name = domain_name(HOST, f"vm-{number}")
                await world.add(
                    name, Path(directory) / f"{number}.sock", to_qualified_element(settled_intent(f"vm-{number}"))
                )
            agent = agent_over(world, Path(directory), vms)
            await agent.start()
            try:
                await _all_greeted(agent)
                return await _reclaim(agent, world, vms, call_s)
            finally:
                how.call_s = 0.0
                await agent.close()
        finally:
            world.close()


async def _reclaim(agent: Agent, world: SlowLibvirt, vms: int, call_s: float) -> Pair:
    for domain in world.domains.values():
        domain.calls.clear()
    # The agent starts at full speed: what is measured is the deflation.
    world.how.call_s = call_s
    command = ReclaimCommand(request_id="bench-reclaim", need=Vector.of(GIVES * vms), deadline_s=DEADLINE_S)
    began_s = time.perf_counter()
    operation = await agent.sizes.reclaim(command)
    ended = await agent.requests.operations.get(operation.request_id, DEADLINE_S)
    seconds = time.perf_counter() - began_s
    if ended is None or ended.state is not OperationState.DONE:
        raise BenchmarkFailed(f"the fake VMs could not be deflated: {ended.sentence if ended else 'no answer'}")
    calls = min(sum(domain.calls.values()) for domain in world.domains.values())
    return Pair(seconds, 0.0, calls, world.opened)


async def _all_greeted(agent: Agent) -> None:
    await asyncio.gather(*(vm.wait_for_hello(60.0) for vm in agent.host.vms.values()))
    async with asyncio.timeout(60.0):
        # The first look at each of them, which follows its hello.
        for vm in agent.host.vms.values():
            async with vm.lock:
                pass
