"""Live migration of a real guest between the lab's two libvirt daemons: its memcached answers throughout, whoever is
killed one copy runs, and what does not converge is called off.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from ebbtide.deflation.allocations import Priority
from ebbtide.deflation.modes import HostMode
from ebbtide.lab import processes
from ebbtide.lab.cluster import MANAGER, Lab
from ebbtide.messages.common import Vector
from ebbtide.messages.operations import OperationState
from ebbtide.messages.vms import VMSpec
from tests.guests.moving import CACHE, LIMIT_S, SLOW_MIB_S, Moving, lab_of_two, moving_in
from tests.guests.test_modes import ended, set_mode

pytestmark = [pytest.mark.guest, pytest.mark.timeout(1500), pytest.mark.asyncio(loop_scope="module")]

#: With it on the one host, and CACHE on the other, ARRIVAL fits on neither, unless CACHE goes to the first.
BLOCKER = VMSpec(name="blocker", priority=Priority.FIXED, nominal=Vector(cpu_cores=0.5, memory_mib=400.0))
ARRIVAL = VMSpec(name="arrival", priority=Priority.FIXED, nominal=Vector(cpu_cores=1.0, memory_mib=640.0))


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with lab_of_two() as made:
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def moving(lab: Lab) -> AsyncIterator[Moving]:
    async with moving_in(lab) as made:
        yield made


@pytest_asyncio.fixture(autouse=True, loop_scope="module")
async def at_rest(moving: Moving) -> None:
    """Wherever an earlier test, or try, has left it, with all its keys."""
    await moving.settled()
    await moving.fill()
    moving.may_evict = False


async def test_memcached_answers_while_its_guest_moves_to_and_fro(moving: Moving) -> None:
    for _ in range(2):
        there = moving.other
        async with moving.watched():
            began = time.monotonic()
            done = await ended(moving.client, await moving.begin())
            took_s = time.monotonic() - began
        assert done.state is OperationState.DONE, done.sentence
        await moving.settled()
        assert moving.host == there
        during = [at for at in moving.answers if at < began + took_s]
        print(f"moved in {took_s:.1f} s, {len(during)} answers, longest gap {moving.longest_gap():.2f} s")
        assert len(during) > 5, "it answers while it moves"
        assert [said for said in done.progress if said.startswith(f"{CACHE.name} runs on {there}")]


async def test_what_does_not_converge_is_called_off_and_goes_on_where_it_is(moving: Moving) -> None:
    here = moving.host
    async with moving.watched():
        failed = await ended(moving.client, await moving.begin(bandwidth_mib_s=1.0, deadline_s=4.0))
    assert failed.state is OperationState.FAILED
    assert "it had not converged after 4 s" in failed.sentence
    await moving.settled()
    assert moving.host == here
    assert "cache" not in {vm.name for vm in await moving.client.vms() if vm.host == moving.other}


@pytest.mark.parametrize("who", ["source", "target", MANAGER])
async def test_whoever_is_killed_in_the_middle_one_copy_runs_and_answers(moving: Moving, who: str) -> None:
    name = {"source": moving.host, "target": moving.other}.get(who, who)
    there = moving.other
    async with moving.watched():
        operation = await moving.begin(bandwidth_mib_s=SLOW_MIB_S, deadline_s=120.0)
        await moving.under_way(operation)
        process = moving.state.daemon(name).process
        assert process is not None
        os.kill(process.pid, 9)
        async with asyncio.timeout(30):
            while processes.running(process):
                await asyncio.sleep(0.05)
        await asyncio.to_thread(moving.lab.start_daemon, name)
        await asyncio.to_thread(moving.lab.wait_ready)
        done = await ended(moving.client, operation)
    assert done.state is OperationState.DONE, done.sentence
    await moving.settled()
    assert moving.host == there
    print(f"{who} killed: longest gap {moving.longest_gap():.2f} s")


async def test_before_it_is_preempted_it_moves_and_memcached_answers_throughout(moving: Moving) -> None:
    client, here, there = moving.client, moving.host, moving.other
    seen = {event.id for event in await client.events()}
    await set_mode(client, here, HostMode.DRAINING)
    blocker = await ended(client, await client.create(BLOCKER, deadline_s=60.0))
    await set_mode(client, here, HostMode.ACTIVE)
    moving.may_evict = True
    try:
        assert blocker.host == there, blocker.sentence
        async with moving.watched():
            began = time.monotonic()
            arrival = await ended(client, await client.create(ARRIVAL, deadline_s=LIMIT_S))
        assert (arrival.state, arrival.host) == (OperationState.DONE, here), arrival.sentence
        assert f"and moving cache to {there}" in arrival.sentence
        assert moving.runs_on() == [there]
        kinds = [event.kind for event in await client.events() if event.id not in seen]
        assert "migrated" in kinds
        assert not {"preempting", "preempted"} & set(kinds)
        print(f"placed after {time.monotonic() - began:.1f} s, longest gap {moving.longest_gap():.2f} s:")
        print("\n".join(arrival.progress))
    finally:
        for vm in await client.vms():
            if vm.name != CACHE.name:
                await ended(client, await client.delete(vm.name))
    await moving.settled()
