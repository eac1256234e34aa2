"""An application that is slow to answer costs its layer's share of a short deadline, not the conversation.

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
from hostagent.state.journal import Journal
from hostagent.vm.host import Host, Slice
from tests.hostagent import random_parts as parts
from tests.hostagent.faked_loop import FakedLoop
from tests.hostagent.local_guest import Conversation, Reply
from tests.hostagent.local_hypervisor import Faults, Fence, LocalHypervisor
from tests.hostagent.local_world import LocalWorld
from tests.hostagent.random_parts import CAPACITY, HOST, OVERHEAD_MIB, Count

#: How long the guest waits for its application's hook, seconds: longer than this layer's share of the deadline.
ANSWERS_S, DEADLINE_S = 4.0, 6.0


class Slow(Conversation):
    """A guest whose threads wait for an application, while its agent answers everything else."""

    hellos = 0

    def _take(self, message: Reply) -> None:
        Slow.hellos += message["method"] == "hello"
        if message["method"] == "application.deflate":
            asyncio.get_running_loop().call_later(ANSWERS_S, super()._take, message)
        else:
            super()._take(message)


class SlowWorld(LocalWorld):
    async def connect(self, path: str, limit: int = 2**16) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await super().connect(path, limit)
        writer.__class__ = Slow  # type: ignore[assignment]
        return reader, writer


async def deflate(directory: Path) -> Operation:
    world = Count.world = SlowWorld(asyncio.get_running_loop(), Random(0))
    part = Slice(HOST, "http://127.0.0.1:1", CAPACITY, "qemu", OVERHEAD_MIB)
    hypervisor = LocalHypervisor(world, HOST, Fence(), Faults())
    agent = Agent(Host(part, hypervisor, Journal(directory), lambda: 1e6), usable_boot_mib)
    await agent.start()
    nominal, minimum = Vector(cpu_cores=2.0, memory_mib=1024.0), Vector(cpu_cores=0.5, memory_mib=320.0)
    spec = VMSpec(name="low-1", nominal=nominal, minimum=minimum)
    created = await agent.creations.create(CreateCommand(request_id="c", vm=spec))
    await agent.requests.operations.get(created.request_id, 300.0)
    await agent.host.vms["low-1"].wait_for_hello(60.0)
    (domain,) = world.domains.values()
    # What the application holds is not needed for it.
    domain.guest.cache_mib = 100.0
    need = ReclaimCommand(request_id="r", need=Vector(memory_mib=256.0), deadline_s=DEADLINE_S)
    await agent.sizes.reclaim(need)
    operation = await agent.requests.operations.get("r", 300.0)
    assert operation is not None
    await agent.close()
    await parts.ended(world.tasks)
    return operation


def test_memory_is_taken_although_an_application_answers_too_late_for_a_short_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asyncio, "open_unix_connection", parts.connect)
    monkeypatch.setattr(Slow, "hellos", 0)
    with asyncio.Runner(loop_factory=FakedLoop) as runner:
        operation = runner.run(deflate(tmp_path))
    (outcome,) = operation.vms
    assert operation.state == "done", operation.sentence
    assert outcome.after.memory_mib <= 1024 - 256
    assert "did not answer application.deflate" in str(outcome.ledger)
    assert Slow.hellos == 1
