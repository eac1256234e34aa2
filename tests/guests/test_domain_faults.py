"""Faults of a real domain, and of libvirtd, in the middle of a deflation under a real manager: no VM is preempted or
deleted for them, and one sentence names each.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import libvirt
import pytest
import pytest_asyncio

from ebbtide.client import ManagerClient
from ebbtide.deflation.allocations import Priority
from ebbtide.deflation.modes import HostMode
from ebbtide.lab import processes
from ebbtide.lab.readings import DomainView, qemu_pid
from ebbtide.lab.services import LIBVIRTD, open_libvirt
from ebbtide.messages.common import Vector
from ebbtide.messages.operations import Operation, OperationState
from ebbtide.messages.vms import ClusterVM, VMSpec
from hostagent.state.intents import NAMESPACE, Phase, from_element
from tests.guests.conftest import RunningLab
from tests.guests.placed import START_S
from tests.guests.test_demo import virsh
from tests.guests.test_modes import ended, set_mode

pytestmark = [pytest.mark.guest, pytest.mark.timeout(900), pytest.mark.asyncio(loop_scope="module")]

LOW = VMSpec(
    name="struck",
    priority=Priority.DEFLATABLE,
    nominal=Vector(cpu_cores=1.5, memory_mib=960.0),
    minimum=Vector(cpu_cores=0.5, memory_mib=448.0),
)
NOMINAL_KIB = LOW.nominal.memory_mib * 1024
#: Has no room beside the low VM, and enough beside what that can give.
HIGH = VMSpec(name="comer", priority=Priority.FIXED, nominal=Vector(cpu_cores=1.0, memory_mib=384.0))
SMALLER = Vector(cpu_cores=1.0, memory_mib=600.0)
SPARE_MIB = LOW.nominal.memory_mib - LOW.minimum.memory_mib
#: A state is waited for so long at most; a busy machine is slow.
LIMIT_S = 240.0


class GaveNothing(AssertionError):
    """A deflation has ended in which the guest gave no memory."""


class Scene:
    """The low VM on the lab's small host; the other host takes none."""

    def __init__(self, lab: RunningLab, client: ManagerClient) -> None:
        self.lab = lab
        self.client = client
        self.away, self.host = (host.id for host in lab.state.hosts)
        self.domain = f"ebb-{self.host}.{LOW.name}"
        self._last_event = 0
        self._logged = 0

    # --- the VM --------------------------------------------------------------------------------------------------

    async def low(self) -> ClusterVM:
        return await self.client.vm(LOW.name)

    async def until(self, what: str, condition: Callable[[], Any]) -> None:
        """Look again and again until a coroutine function says yes.

        :raises AssertionError: it did not in time.
        """
        try:
            async with asyncio.timeout(LIMIT_S):
                while not await condition():
                    await asyncio.sleep(0.2)
        except TimeoutError:
            raise AssertionError(f"not within {LIMIT_S:g} s: {what}; {await self.low()}") from None

    async def until_state(self, state: str) -> None:
        async def is_in_it() -> bool:
            return (await self.low()).state == state

        await self.until(f"{LOW.name} is {state}", is_in_it)

    async def ready(self) -> None:
        """The VM has its nominal size, and its guest answers and is under no pressure."""

        async def is_ready() -> bool:
            vm = await self.low()
            if not vm.guest_connected or vm.current != LOW.nominal:
                return False
            # A guest that has just booted may have plugged nothing yet; one that goes on where it was saved has its
            # memory from then, until that is put right.
            if (await asyncio.to_thread(self._held))[1] < NOMINAL_KIB:
                return False
            # Of one under pressure, as a guest is that starts on a busy machine, nothing can be taken.
            return (await self.client.host(self.host)).deflatable.memory_mib >= SPARE_MIB - 1

        await self.until(f"{LOW.name} is at its nominal size and answers", is_ready)
        self._last_event = next((event.id for event in await self.client.events(1)), 0)
        self._logged = self._log().stat().st_size

    async def falling(self) -> None:
        """Until a deflation has reached the guest's memory.

        :raises AssertionError: it had ended before that was seen.
        :raises GaveNothing: a guest that is slow to answer may give nothing, and its host all.
        """

        def look() -> None:
            connection = open_libvirt(self.lab.state.uri)
            try:
                domain = connection.lookupByName(self.domain)
                began = False
                while True:
                    phase, held_kib = self._seen(domain)
                    falls = phase is Phase.DEFLATING
                    if held_kib < NOMINAL_KIB:
                        assert falls, "the deflation had ended before it was seen"
                        return
                    if began and not falls:
                        raise GaveNothing("the deflation has ended, and the guest gave no memory")
                    began = began or falls
            finally:
                connection.close()

        async with asyncio.timeout(LIMIT_S):
            await asyncio.to_thread(look)

    def _held(self) -> tuple[Phase | None, int]:
        connection = open_libvirt(self.lab.state.uri)
        try:
            return self._seen(connection.lookupByName(self.domain))
        finally:
            connection.close()

    @staticmethod
    def _seen(domain: Any) -> tuple[Phase | None, int]:
        """What the domain's metadata say, and the boot and plugged memory, KiB, both read past the agent."""
        # In this order: a call may wait for one of the agent's, and what the memory has come to is said last.
        view = DomainView.parse(domain.XMLDesc())
        intent = from_element(domain.metadata(libvirt.VIR_DOMAIN_METADATA_ELEMENT, NAMESPACE))
        return intent.phase if intent is not None else None, view.boot_kib + view.current_kib

    async def start(self) -> None:
        started = await ended(self.client, await self.client.start(LOW.name))
        assert started.state is OperationState.DONE, started.sentence

    async def target(self, size: Vector, deadline_s: float = 60.0) -> Operation:
        generation = (await self.low()).generation + 1
        return await self.client.set_target(LOW.name, size, generation=generation, deadline_s=deadline_s)

    async def reached(self, size: Vector) -> bool:
        """Ask for a size and wait; whether that is reached."""
        found = await ended(self.client, await self.target(size))
        assert found.state in (OperationState.DONE, OperationState.PARTIAL), found.sentence
        return found.state is OperationState.DONE

    # --- the fixed VM that wants room ----------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def arrival(self, deadline_s: float = 60.0) -> AsyncIterator[Operation]:
        """A fixed VM is placed, for which the low one has to give."""
        operation = await self.client.create(HIGH, deadline_s=deadline_s)
        try:
            yield operation
        finally:
            await ended(self.client, operation)
            if any(vm.name == HIGH.name for vm in await self.client.vms()):
                await ended(self.client, await self.client.delete(HIGH.name))

    # --- what must hold ------------------------------------------------------------------------------------------

    async def told(self, kind: str) -> list[str]:
        """What the manager has told of the low VM and its host since it was ready."""
        news = await self.client.events(1000, since_id=self._last_event)
        assert not [event for event in news if "preempt" in event.kind], news
        return [event.sentence for event in news if event.kind == kind]

    async def is_kept(self) -> None:
        """No VM was preempted; row, definition and disk of the low one are there."""
        await self.told("")
        assert (await self.low()).host == self.host
        defined = await asyncio.to_thread(virsh, "dumpxml", "--inactive", self.domain)
        assert defined is not None
        disk = next(host.disk_dir for host in self.lab.state.hosts if host.id == self.host) / self.domain / "disk.qcow2"
        assert disk.exists()
        assert str(disk) in defined

    def warnings(self) -> list[str]:
        """What its host agent has logged since the VM was ready that is no plain information."""
        with self._log().open() as log:
            log.seek(self._logged)
            return [line for line in log.read().splitlines() if "level=info" not in line and "level=debug" not in line]

    def _log(self) -> Any:
        return self.lab.state.daemon(self.host).log


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def vm_and_manager(lab: RunningLab) -> AsyncIterator[Scene]:
    async with lab.client() as client:
        scene = Scene(lab, client)
        await set_mode(client, scene.away, HostMode.PAUSED)
        try:
            created = await ended(client, await client.create(LOW, deadline_s=START_S))
            assert (created.state, created.host) == (OperationState.DONE, scene.host), created.sentence
            yield scene
        finally:
            await asyncio.to_thread(lab.lab.up)
            if any(vm.name == LOW.name for vm in await client.vms()):
                await ended(client, await client.delete(LOW.name))
            await set_mode(client, scene.away, HostMode.ACTIVE)


@pytest_asyncio.fixture(loop_scope="module")
async def scene(vm_and_manager: Scene) -> AsyncIterator[Scene]:
    """The VM runs at its nominal size, whatever an earlier test has left."""
    if (await vm_and_manager.low()).state == "stopped":
        await vm_and_manager.start()
    await vm_and_manager.ready()
    yield vm_and_manager


async def test_a_paused_vm_gives_nothing_until_it_is_resumed(scene: Scene) -> None:
    free = (await scene.client.host(scene.host)).free
    await asyncio.to_thread(virsh, "suspend", scene.domain)
    try:
        await scene.until_state("paused")
        asked = await ended(scene.client, await scene.target(SMALLER))
        assert asked.state is OperationState.FAILED
        assert "it is paused" in asked.sentence
        async with scene.arrival(15) as operation:
            refused = await ended(scene.client, operation)
            assert refused.state is OperationState.FAILED
            assert f"{LOW.name} could not be deflated (it is paused)" in refused.sentence
        assert (await scene.low()).current == LOW.nominal
        assert (await scene.client.host(scene.host)).free == free
        await scene.is_kept()
    finally:
        await asyncio.to_thread(virsh, "resume", scene.domain)
    await scene.ready()
    # Of an emulated guest that does not answer in time not all is taken at once.
    await scene.until("it is deflated as asked", partial(scene.reached, SMALLER))
    assert (await scene.low()).current == SMALLER
    await scene.until("it has its nominal size again", partial(scene.reached, LOW.nominal))


async def test_a_vm_that_is_paused_in_a_deflation_is_not_taken_for_one_that_gave_too_little(scene: Scene) -> None:
    for tries_left in (2, 1, 0):
        await scene.ready()
        async with scene.arrival(30) as operation:
            try:
                await scene.falling()
            except GaveNothing:
                if tries_left:
                    continue
                raise
            await asyncio.to_thread(virsh, "suspend", scene.domain)
            try:
                refused = await ended(scene.client, operation)
                assert refused.state is OperationState.FAILED, refused.sentence
                assert "it is paused" in refused.sentence
                await scene.until_state("paused")
                await scene.is_kept()
            finally:
                await asyncio.to_thread(virsh, "resume", scene.domain)
            return


async def test_a_managed_save_in_the_middle_of_a_target_is_one_sentence(scene: Scene) -> None:
    operation = await scene.target(SMALLER)
    await scene.falling()
    saved = await asyncio.to_thread(virsh, "managedsave", scene.domain)
    assert saved is not None
    failed = await ended(scene.client, operation)
    assert failed.state is OperationState.FAILED, failed.sentence
    assert failed.sentence == (
        f"{LOW.name} is off (its domain ended while it was being resized): it holds nothing and keeps its disk"
    )
    await scene.until_state("stopped")
    assert len(await scene.told("stopped")) == 1
    await scene.is_kept()
    assert scene.warnings() == []
    process = await asyncio.to_thread(virsh, "domstate", "--reason", scene.domain)
    assert "(saved)" in (process or "")
    await scene.start()
    await scene.until_state("running")


async def test_a_libvirtd_that_is_killed_in_a_deflation_is_a_state_of_its_hosts(scene: Scene) -> None:
    state = scene.lab.lab.state()
    own = next((process for process in state.services if process.name == LIBVIRTD.name), None)
    if own is None:
        pytest.fail("this test kills the libvirtd of the tests' own lab, but the machine runs one: stop it before")
    pid = qemu_pid(scene.domain)

    async def are(wanted: str) -> bool:
        return {host.state for host in await scene.client.hosts()} == {wanted}

    async with scene.arrival() as operation:
        await scene.falling()
        found = processes.running(own)
        assert found is not None
        found.kill()
        await scene.until("both hosts are unavailable", lambda: are("unavailable"))
        await asyncio.to_thread(scene.lab.lab.up)
        await scene.until("both hosts are ready", lambda: are("ready"))
        arrived = await ended(scene.client, operation)
        assert qemu_pid(scene.domain) == pid
        await scene.is_kept()
    if arrived.state is not OperationState.DONE:
        await scene.ready()
        async with scene.arrival() as operation:
            arrived = await ended(scene.client, operation)
            await scene.is_kept()
    assert (arrived.state, arrived.host) == (OperationState.DONE, scene.host), arrived.sentence
    assert qemu_pid(scene.domain) == pid


def kill(domain: str) -> None:
    os.kill(qemu_pid(domain), signal.SIGKILL)


def destroy(domain: str) -> None:
    assert virsh("destroy", domain) is not None


@pytest.mark.parametrize("end", [kill, destroy])
async def test_a_vm_that_ends_in_a_deflation_is_kept_and_frees_what_it_held(
    scene: Scene, end: Callable[[str], None]
) -> None:
    async with scene.arrival() as operation:
        await scene.falling()
        await asyncio.to_thread(end, scene.domain)
        arrived = await ended(scene.client, operation)
        assert (arrived.state, arrived.host) == (OperationState.DONE, scene.host), arrived.sentence
        await scene.until_state("stopped")
        assert (await scene.low()).current == Vector()
        assert await scene.told("stopped") == [
            f"{LOW.name} is off on {scene.host}: its domain has ended, and not by a command; it holds no room and "
            f"keeps its disk; `ebb vm start {LOW.name}` starts it"
        ]
        await scene.is_kept()
    assert scene.warnings() == []
    await scene.start()
