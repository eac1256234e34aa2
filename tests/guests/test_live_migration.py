"""Live migration of a real guest between the lab's two libvirt daemons: its memcached answers throughout, whoever is
killed one copy runs, and what does not converge is called off.
"""

from __future__ import annotations

import asyncio
import os
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import libvirt
import pytest
import pytest_asyncio

from ebbtide.deflation.allocations import Priority
from ebbtide.deflation.modes import HostMode
from ebbtide.lab import processes
from ebbtide.lab.cluster import MANAGER, Lab
from ebbtide.lab.services import open_libvirt
from ebbtide.messages.common import Vector
from ebbtide.messages.operations import OperationState
from ebbtide.messages.vms import VMSpec
from hostagent.libvirt.hypervisor import domain_name
from hostagent.state.intents import NAMESPACE, Phase, from_element
from tests.guests.moving import CACHE, LIMIT_S, SLOW_MIB_S, Moving, lab_of_two, moving_in
from tests.guests.test_modes import ended, set_mode

pytestmark = [pytest.mark.guest, pytest.mark.timeout(1500), pytest.mark.asyncio(loop_scope="module")]

#: With it on the one host, and CACHE on the other, ARRIVAL fits on neither, unless CACHE goes to the first.
BLOCKER = VMSpec(name="blocker", priority=Priority.FIXED, nominal=Vector(cpu_cores=0.5, memory_mib=400.0))
ARRIVAL = VMSpec(name="arrival", priority=Priority.FIXED, nominal=Vector(cpu_cores=1.0, memory_mib=640.0))


@contextmanager
def definition_of(moving: Moving) -> Iterator[Any]:
    """The domain, at the libvirt of the host that it is on."""
    uri = next(host.uri for host in moving.state.hosts if host.id == moving.host)
    connection = open_libvirt(uri)
    try:
        yield connection.lookupByName(domain_name(moving.host, CACHE.name))
    finally:
        connection.close()


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
    await moving.at_rest()


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


async def test_its_own_definition_moves_with_it_and_is_what_it_starts_from_there(moving: Moving) -> None:
    """What no template brings: a device attached by hand for later starts, and another program's metadata."""
    element, stored = libvirt.VIR_DOMAIN_METADATA_ELEMENT, libvirt.VIR_DOMAIN_AFFECT_CONFIG
    with definition_of(moving) as here:
        here.attachDeviceFlags("<watchdog model='i6300esb' action='none'/>", stored)
        here.setMetadata(element, "<os>debian</os>", "theirs", "urn:ebbtide:test", stored)
        identity = here.UUIDString()
    there, before = moving.other, await moving.client.vm(CACHE.name)
    done = await ended(moving.client, await moving.begin())
    assert done.state is OperationState.DONE, done.sentence
    await moving.settled()
    assert moving.host == there
    with definition_of(moving) as moved:
        root = ElementTree.fromstring(moved.XMLDesc(libvirt.VIR_DOMAIN_XML_INACTIVE))
        assert (moved.isPersistent(), moved.UUIDString()) == (1, identity)
        assert root.find("./devices/watchdog[@model='i6300esb']") is not None
        assert moved.metadata(element, "urn:ebbtide:test", stored) == "<os>debian</os>"
        for flag in (stored, libvirt.VIR_DOMAIN_AFFECT_LIVE):
            intent = from_element(moved.metadata(element, NAMESPACE, flag))
            assert intent is not None
            assert (intent.owner, intent.phase) == (there, Phase.SETTLED)
            assert intent.generation == before.generation
        disks = [source.get("file", "") for source in root.iterfind("./devices/disk/source")]
        assert disks
        assert all(moved.name() in disk for disk in disks)
    stopped = await ended(moving.client, await moving.client.stop(CACHE.name, limit_s=20.0))
    assert stopped.state is OperationState.DONE, stopped.sentence
    started = await ended(moving.client, await moving.client.start(CACHE.name))
    assert started.state is OperationState.DONE, started.sentence
    await moving.settled()
    with definition_of(moving) as again:
        live = ElementTree.fromstring(again.XMLDesc())
        assert live.find("./devices/watchdog[@model='i6300esb']") is not None


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
