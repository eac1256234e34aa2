"""Real guests that boot or reboot just when a fixed VM needs them shrunk live; one whose agent never comes is preempted
when its notice has to begin, and not before.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from benchmarks.host.bench_host import in_guest, lab_link
from ebbtide.client import ManagerClient
from ebbtide.deflation.allocations import Priority
from ebbtide.deflation.modes import HostMode
from ebbtide.messages.common import Vector
from ebbtide.messages.explanations import EventRow
from ebbtide.messages.operations import Operation, OperationState
from ebbtide.messages.vms import ClusterVM, VMSpec
from tests.guests.conftest import RunningLab
from tests.guests.placed import START_S
from tests.guests.test_demo import virsh
from tests.guests.test_modes import ended, set_mode

pytestmark = [pytest.mark.guest, pytest.mark.timeout(900), pytest.mark.asyncio(loop_scope="module")]

#: For an arrival, seconds: an emulated guest beside others boots in half a minute.
DEADLINE_S = 180.0
NOTICE_S = 15.0
#: Two of them, and the arrival beside both only where they are shrunk below what they boot with.
LOWS = tuple(
    VMSpec(
        name=f"boots-{number}",
        priority=Priority.DEFLATABLE,
        nominal=Vector(cpu_cores=2.5, memory_mib=1000.0),
        minimum=Vector(cpu_cores=0.5, memory_mib=400.0),
        boot_memory_mib=1000.0,
        preemption_notice_s=NOTICE_S,
    )
    for number in (1, 2)
)
HIGH = VMSpec(name="hurried", priority=Priority.FIXED, nominal=Vector(cpu_cores=2.0, memory_mib=1100.0))


class Scene:
    """The lab's large host; the other one takes no VMs."""

    def __init__(self, lab: RunningLab, client: ManagerClient) -> None:
        self.uri = lab.state.uri
        self.client = client
        self.host, self.away = (host.id for host in lab.state.hosts)
        self._last_event = 0

    def domain(self, name: str) -> str:
        return f"ebb-{self.host}.{name}"

    async def create(self, *specs: VMSpec) -> None:
        """Create VMs side by side, and wait for nothing but that."""
        operations = await asyncio.gather(*(self.client.create(spec, deadline_s=START_S) for spec in specs))
        for created in await asyncio.gather(*(ended(self.client, operation) for operation in operations)):
            assert (created.state, created.host) == (OperationState.DONE, self.host), created.sentence
        self._last_event = next((event.id for event in await self.client.events(1)), 0)

    async def arrive(self) -> tuple[Operation, float]:
        """Place the fixed VM; how that ended, and after how many seconds."""
        began = time.monotonic()
        arrived = await ended(self.client, await self.client.create(HIGH, deadline_s=DEADLINE_S))
        return arrived, time.monotonic() - began

    async def events(self, kind: str) -> list[EventRow]:
        return [row for row in await self.client.events(1000, since_id=self._last_event) if row.kind == kind]

    async def preempted(self) -> list[str]:
        return [
            row.sentence for row in await self.client.events(1000, since_id=self._last_event) if "preempt" in row.kind
        ]

    async def answers(self, name: str) -> ClusterVM:
        async with asyncio.timeout(300):
            while not (vm := await self.client.vm(name)).guest_connected:
                await asyncio.sleep(0.5)
        return vm

    async def lose_agent(self, name: str) -> None:
        """Have a guest come up without its agent from its next boot on."""
        guest = await lab_link(self.uri, self.domain(name))
        try:
            await in_guest(guest, "busybox mv /opt/ebbtide/guestagent /opt/ebbtide/gone; busybox sync")
        finally:
            await guest.close()

    async def remove_all(self) -> None:
        for vm in await self.client.vms():
            if vm.name in (HIGH.name, *(low.name for low in LOWS)):
                await ended(self.client, await self.client.delete(vm.name))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(lab: RunningLab) -> AsyncIterator[ManagerClient]:
    async with lab.client() as made:
        yield made


@pytest_asyncio.fixture(loop_scope="module")
async def scene(lab: RunningLab, client: ManagerClient) -> AsyncIterator[Scene]:
    made = Scene(lab, client)
    await set_mode(client, made.away, HostMode.PAUSED)
    try:
        yield made
    finally:
        with contextlib.suppress(TimeoutError):
            await made.remove_all()
        await set_mode(client, made.away, HostMode.ACTIVE)


async def test_two_vms_that_boot_live_and_the_fixed_one_is_placed_within_its_deadline(scene: Scene) -> None:
    await scene.create(*LOWS)
    arrived, seconds = await scene.arrive()
    assert (arrived.state, arrived.host) == (OperationState.DONE, scene.host), arrived.sentence
    assert seconds < DEADLINE_S
    assert await scene.preempted() == []
    (waited,) = await scene.events("waiting")
    assert (waited.vm, waited.host) == (HIGH.name, scene.host)
    assert "which are booting" in waited.sentence
    assert len([line for line in arrived.progress if "waits up to" in line]) == 1
    assert "having waited" in arrived.sentence
    for low in LOWS:
        vm = await scene.answers(low.name)
        assert (vm.state, vm.host) == ("running", scene.host)
    held = sum([(await scene.client.vm(low.name)).current.memory_mib for low in LOWS])
    # 3600 MiB less three overheads of 320 and the fixed VM.
    assert held <= 3600 - 3 * 320 - 1100 + 1


async def test_vms_that_have_just_started_are_kept_small_without_a_word_of_their_guests(scene: Scene) -> None:
    lows = [low.model_copy(update={"boot_memory_mib": None}) for low in LOWS]
    await scene.create(*lows)
    arrived, _ = await scene.arrive()
    assert (arrived.state, arrived.host) == (OperationState.DONE, scene.host), arrived.sentence
    assert await scene.preempted() == []
    assert await scene.events("waiting") == [], "what was not plugged yet is had at once"
    for low in lows:
        vm = await scene.answers(low.name)
        assert vm.state == "running"

        async def has_its_size(name: str = low.name) -> bool:
            found = (await scene.client.explain(name)).explanation
            assert found is not None
            return found.bound is not None and abs(found.bound.memory_mib - found.vm.current.memory_mib) <= 2

        async with asyncio.timeout(120):
            while not await has_its_size():
                await asyncio.sleep(0.5)


async def test_a_guest_that_reboots_just_then_lives(scene: Scene) -> None:
    await scene.create(*LOWS)
    for low in LOWS:
        await scene.answers(low.name)
    assert await asyncio.to_thread(virsh, "reset", scene.domain(LOWS[0].name)) is not None
    arrived, seconds = await scene.arrive()
    assert (arrived.state, arrived.host) == (OperationState.DONE, scene.host), arrived.sentence
    assert seconds < DEADLINE_S
    assert await scene.preempted() == []
    for low in LOWS:
        assert (await scene.answers(low.name)).state == "running"


async def test_one_whose_agent_never_comes_is_preempted_when_its_notice_begins_and_not_before(scene: Scene) -> None:
    low, other = LOWS
    await scene.create(low, other)
    for each in LOWS:
        await scene.answers(each.name)
        await scene.lose_agent(each.name)
        assert await asyncio.to_thread(virsh, "reset", scene.domain(each.name)) is not None
    deadline_s = 60.0
    began = time.time()
    arrived = await ended(scene.client, await scene.client.create(HIGH, deadline_s=deadline_s))
    assert (arrived.state, arrived.host) == (OperationState.DONE, scene.host), arrived.sentence
    (waited,) = await scene.events("waiting")
    assert "which are rebooting" in waited.sentence
    (preempting,) = await scene.events("preempting")
    assert "(reason shortfall)" in preempting.sentence
    assert "no answer of" in preempting.sentence
    assert deadline_s - NOTICE_S - 1 <= preempting.at - began
    preempted = [vm for vm in await scene.client.vms() if vm.state == "preempted"]
    assert [vm.preempted.reason for vm in preempted if vm.preempted is not None] == ["shortfall"]
