"""Readings that are made beside an operation, without the VM's lock, do not break its conversation with the guest.

Hypervisor, guest and time are make-believe (`tests.hostagent.local_world`).
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from random import Random

import pytest

from ebbtide.messages.commands import CreateCommand, ReclaimCommand
from ebbtide.messages.common import Vector
from ebbtide.messages.operations import Operation
from ebbtide.messages.vms import VMSpec
from hostagent.libvirt.definitions import usable_boot_mib
from hostagent.operations.agent import Agent
from hostagent.operations.explain import explain
from hostagent.state.journal import Journal
from hostagent.vm.host import Host, Slice
from tests.hostagent import random_parts as parts
from tests.hostagent.faked_loop import FakedLoop
from tests.hostagent.local_guest import Conversation, Reply
from tests.hostagent.local_hypervisor import Faults, Fence, LocalHypervisor
from tests.hostagent.local_world import LocalWorld
from tests.hostagent.random_parts import CAPACITY, HOST, OVERHEAD_MIB, Count

#: How long the guest takes its CPUs off line, seconds: longer than its state is waited for.
OFFLINING_S = 7.0


class Busy(Conversation):
    """A guest that does one thing after the other."""

    busy_until = 0.0
    hellos = 0

    def _take(self, message: Reply) -> None:
        loop = asyncio.get_running_loop()
        Busy.hellos += message["method"] == "hello"
        if loop.time() < self.busy_until:
            loop.call_at(self.busy_until, self._take, message)
        elif message["method"] == "cpus.set":
            self.busy_until = loop.time() + OFFLINING_S
            loop.call_at(self.busy_until, super()._take, message)
        else:
            super()._take(message)


class BusyWorld(LocalWorld):
    async def connect(self, path: str, limit: int = 2**16) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await super().connect(path, limit)
        writer.__class__ = Busy  # type: ignore[assignment]
        return reader, writer


async def ended(agent: Agent, operation: Operation) -> Operation:
    found = await agent.requests.operations.get(operation.request_id, 300.0)
    assert found is not None
    return found


async def deflate_and_look(directory: Path) -> None:
    world = Count.world = BusyWorld(asyncio.get_running_loop(), Random(0))
    part = Slice(HOST, "http://127.0.0.1:1", CAPACITY, "qemu", OVERHEAD_MIB)
    hypervisor = LocalHypervisor(world, HOST, Fence(), Faults())
    agent = Agent(Host(part, hypervisor, Journal(directory), lambda: 1e6), usable_boot_mib)
    await agent.start()
    spec = VMSpec(
        name="low-1",
        nominal=Vector(cpu_cores=3.0, memory_mib=1024.0),
        minimum=Vector(cpu_cores=0.5, memory_mib=320.0),
    )
    await ended(agent, await agent.creations.create(CreateCommand(request_id="c", vm=spec)))
    vm = agent.host.vms["low-1"]
    await vm.wait_for_hello(60.0)
    need = ReclaimCommand(request_id="r", need=Vector(cpu_cores=2.0), deadline_s=60.0)
    deflation = await agent.sizes.reclaim(need)
    (domain,) = world.domains.values()
    (conversation,) = domain.conversations
    assert isinstance(conversation, Busy)
    async with asyncio.timeout(60.0):
        while not conversation.busy_until:
            await asyncio.sleep(0.01)
    await asyncio.gather(explain(agent.host, "low-1"), agent.steady._ask(vm))
    assert vm.link.connected
    operation = await ended(agent, deflation)
    assert operation.state == "done", operation.sentence
    assert (vm.link.connected, Busy.hellos, len(domain.guest.online)) == (True, 1, 1)
    await agent.close()
    await parts.ended(world.tasks)


def test_an_explanation_does_not_break_a_deflation_that_the_guest_is_busy_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asyncio, "open_unix_connection", parts.connect)
    monkeypatch.setattr(Busy, "hellos", 0)
    with asyncio.Runner(loop_factory=FakedLoop) as runner:
        runner.run(deflate_and_look(tmp_path))
