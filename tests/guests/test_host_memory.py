"""The memory limit that swap backs, on a real guest: refused without swap, kept with it, lifted when swap goes.

The guest's application holds its memory, so that nothing can be unplugged or ballooned. The swap is the tests' own; the
machine must have none besides.
"""

from __future__ import annotations

import asyncio
import errno
import subprocess
import warnings
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager

import libvirt
import pytest
import pytest_asyncio

from ebbtide.deflation.cascade.cascade import Cascade
from ebbtide.deflation.cascade.instructions import Finish, Outcome
from ebbtide.deflation.cascade.reinflation import Reinflation
from ebbtide.deflation.ledger import Layer
from ebbtide.deflation.resources import ResourceVector
from hostagent.limits.cgroups import MIB, MemoryGroup, vcpu_groups
from hostagent.vm.executor import Executor
from hostagent.vm.guest_link import GuestLink
from tests.guests.solo import SoloGuest, eventually, meminfo_mib, solo_guest, zram_swap
from tests.unit.deflation.blocked import without
from tests.waiting import until

pytestmark = [pytest.mark.guest, pytest.mark.timeout(1200), pytest.mark.asyncio(loop_scope="module")]

GUEST_MIB = 640
HELD_MIB = 320
LIMIT_MIB = 224.0
#: What a limit leaves the emulator in software emulation.
EMULATOR_MIB = 192.0
LIMIT_S = 60.0
#: How long the application may take to get through its memory by way of swap.
TOUCHED_S = 360.0

#: Holds memory that compresses well, and touches all of it whenever it is told to.
HOLDER = """
import mmap, os, sys, time
size = int(sys.argv[1]) << 20
held = mmap.mmap(-1, size)
for page in range(0, size, 4096):
    held[page:page + 8] = page.to_bytes(8, "little")
open("/run/held", "w").close()
while True:
    time.sleep(0.1)
    if os.path.exists("/run/touch"):
        wrong = 0
        for page in range(0, size, 4096):
            wrong += held[page:page + 8] != page.to_bytes(8, "little")
            held[page + 8] = (held[page + 8] + 1) % 256
        with open("/run/touched.new", "w") as file:
            file.write(str(wrong))
        os.rename("/run/touched.new", "/run/touched")
        os.unlink("/run/touch")
"""


async def hold(guest: SoloGuest, mib: int) -> None:
    """Have an application in the guest hold so much memory, which it will not give."""
    await guest.put("/run/holder.py", HOLDER)
    await guest.run("sh", "-c", f"python3 -S /run/holder.py {mib} </dev/null >/dev/console 2>&1 &")

    async def held() -> bool:
        return "held" in await guest.run("ls", "/run")

    await eventually(held, "the application never held its memory")


async def touch(guest: SoloGuest) -> int:
    """Have the application read and write all its memory; returns how many pages were not as it left them.

    By way of swap this takes a while, in which limits are looked after as the host agent does.
    """
    looking = asyncio.create_task(look_after_limits(guest), name="limits are looked after")
    try:
        script = "rm -f /run/touched; : >/run/touch; until test -e /run/touched; do sleep 1; done; cat /run/touched"
        return int(await guest.run("sh", "-c", script, timeout_s=TOUCHED_S))
    finally:
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)


class Guests:
    """One guest for all tests, and another once its emulator has crashed: what failed by that is tried again."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack
        self._last: SoloGuest | None = None

    async def running(self) -> SoloGuest:
        if self._last is None or not self._last.alive():
            if meminfo_mib("SwapTotal") > 0:
                pytest.fail("these tests bring their own swap, but the machine has some: swapoff -a")
            self._last = await self._stack.enter_async_context(solo_guest(GUEST_MIB))
            await hold(self._last, HELD_MIB)
        return self._last


async def look_after_limits(guest: SoloGuest) -> None:
    """Swap that goes away is for the tests to see, so nothing is looked at once there is no limit."""
    while await limit_of(guest) is not None:
        for why in (await guest.hypervisor.sizes.check_limits()).values():
            warnings.warn(f"the limit of the guest was lifted: {why}", stacklevel=1)
        await asyncio.sleep(1)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def guests() -> AsyncIterator[Guests]:
    async with AsyncExitStack() as stack:
        yield Guests(stack)


@pytest_asyncio.fixture(loop_scope="module")
async def guest(guests: Guests) -> SoloGuest:
    return await guests.running()


@pytest_asyncio.fixture(loop_scope="module", autouse=True)
async def no_limit_left(guest: SoloGuest) -> AsyncIterator[None]:
    yield
    assert guest.alive(), f"the guest's process is gone:\n{guest.how_ended()}"
    assert await touch(guest) == 0


@asynccontextmanager
async def swap_for(guest: SoloGuest, *mib: int) -> AsyncIterator[list[str]]:
    """Swap devices of these sizes; the limit is lifted before they go."""
    with ExitStack() as stack:
        devices = [stack.enter_context(zram_swap(size)) for size in mib]
        try:
            yield devices
        finally:
            await guest.hypervisor.sizes.set_limit(guest.domain, None, LIMIT_S)


async def limit_of(guest: SoloGuest) -> float | None:
    return (await guest.hypervisor.sizes.read(guest.domain)).limit_mib


async def test_without_swap_the_limit_is_refused_and_nothing_is_taken(guest: SoloGuest) -> None:
    before_mib = guest.resident_mib()
    reason = await guest.hypervisor.sizes.set_limit(guest.domain, LIMIT_MIB, LIMIT_S)
    assert reason == (
        "the host has no swap, so no memory limit can be backed: the guest may touch 640 MiB, the limit is 224 MiB"
    )
    assert await limit_of(guest) is None
    assert MemoryGroup(guest.pid).limit() is None
    assert guest.resident_mib() >= before_mib - 8


async def test_a_limit_that_the_kernel_refuses_is_busy_to_libvirt_and_kills_nothing(guest: SoloGuest) -> None:
    """What the stepwise limit of cgroup v1 relies on."""

    def set_too_low() -> tuple[int, int]:
        connection = libvirt.open("qemu:///system")
        try:
            with pytest.raises(libvirt.libvirtError) as caught:
                connection.lookupByName(guest.domain).setMemoryParameters({"hard_limit": 100 * 1024}, 1)
            return caught.value.get_error_code(), caught.value.get_int1()
        finally:
            connection.close()

    assert await asyncio.to_thread(set_too_low) == (libvirt.VIR_ERR_SYSTEM_ERROR, errno.EBUSY)
    assert await limit_of(guest) is None


async def test_with_swap_the_limit_is_reached_and_the_guest_survives_touching_all_its_memory(guest: SoloGuest) -> None:
    before_mib = guest.resident_mib()
    async with swap_for(guest, 576):
        assert await guest.hypervisor.sizes.set_limit(guest.domain, LIMIT_MIB, LIMIT_S) == ""
        reading = await guest.hypervisor.sizes.read(guest.domain)
        assert reading.limit_mib == pytest.approx(LIMIT_MIB, abs=1)
        assert reading.bound(1).memory_mib == pytest.approx(LIMIT_MIB, abs=1)
        group = MemoryGroup(guest.pid)
        assert group.usage() <= (LIMIT_MIB + EMULATOR_MIB + 1) * MIB
        assert guest.resident_mib() <= min(before_mib - 48, LIMIT_MIB + EMULATOR_MIB)
        assert group.swap() > 48 * MIB

        refaults = group.refaults()
        assert await touch(guest) == 0
        assert guest.alive()
        assert group.refaults() > refaults
        assert group.usage() <= (LIMIT_MIB + EMULATOR_MIB + 1) * MIB
        assert await guest.hypervisor.sizes.check_limits() == {}

        assert await guest.hypervisor.sizes.set_limit(guest.domain, 300.0, LIMIT_S) == ""
        assert await limit_of(guest) == pytest.approx(300, abs=1)
        assert await guest.hypervisor.sizes.set_limit(guest.domain, None, LIMIT_S) == ""
        assert await limit_of(guest) is None
        assert not group.holds_at_limit()
        assert await touch(guest) == 0
        assert guest.resident_mib() >= HELD_MIB


async def test_the_limit_does_not_outlive_the_running_domain(guest: SoloGuest) -> None:
    async with swap_for(guest, 576):
        assert await guest.hypervisor.sizes.set_limit(guest.domain, LIMIT_MIB, LIMIT_S) == ""
        assert "hard_limit" in virsh("dumpxml", guest.domain)
        assert "hard_limit" not in virsh("dumpxml", "--inactive", guest.domain)


async def test_swap_that_is_too_small_is_a_refusal_with_its_figures(guest: SoloGuest) -> None:
    async with swap_for(guest, 300):
        reason = await guest.hypervisor.sizes.set_limit(guest.domain, LIMIT_MIB, LIMIT_S)
    assert "it may need 416 MiB more (the guest may touch 640 MiB, the limit is 224 MiB)" in reason
    assert "but of 300 MiB free 0 MiB back other limits and 64 MiB are kept" in reason
    assert await limit_of(guest) is None


async def test_a_time_limit_that_is_up_leaves_no_limit_that_was_not_reached(guest: SoloGuest) -> None:
    async with swap_for(guest, 576):
        reason = await guest.hypervisor.sizes.set_limit(guest.domain, LIMIT_MIB, 0.0)
        assert reason == "no memory limit of 224 MiB: its time was up"
        assert await limit_of(guest) is None


async def test_swap_cannot_be_taken_from_under_a_limit_without_the_guest_living_on(guest: SoloGuest) -> None:
    """The kernel would kill QEMU when swapoff brings its pages back; held at its limit, it fails the swapoff."""
    async with swap_for(guest, 576) as (device,):
        assert await guest.hypervisor.sizes.set_limit(guest.domain, LIMIT_MIB, LIMIT_S) == ""
        assert MemoryGroup(guest.pid).holds_at_limit()
        done = await asyncio.to_thread(subprocess.run, ["swapoff", device], capture_output=True, text=True)
        assert "Cannot allocate memory" in done.stderr
        assert guest.alive()
        assert await touch(guest) == 0


async def test_when_swap_goes_away_the_limit_is_lifted_and_the_guest_lives(guest: SoloGuest) -> None:
    async with swap_for(guest, 384, 320) as (first, _):
        assert await guest.hypervisor.sizes.set_limit(guest.domain, LIMIT_MIB, LIMIT_S) == ""
        assert await guest.hypervisor.sizes.check_limits() == {}
        await asyncio.to_thread(subprocess.run, ["swapoff", first], check=True)
        lifted = await guest.hypervisor.sizes.check_limits()
        assert list(lifted) == [guest.domain]
        assert "swap cannot back the memory limit" in lifted[guest.domain]
        assert await limit_of(guest) is None
        assert await guest.hypervisor.sizes.check_limits() == {}
        assert await touch(guest) == 0
        assert guest.alive()


async def test_the_quota_of_each_vcpu_is_found(guest: SoloGuest) -> None:
    assert sorted(vcpu_groups(guest.pid)) == [0]
    virsh("schedinfo", guest.domain, "--live", "vcpu_quota=40000", "vcpu_period=100000")
    group = vcpu_groups(guest.pid)[0]
    assert group.quota() == pytest.approx(0.4)
    assert group.times().periods >= 0
    virsh("schedinfo", guest.domain, "--live", "vcpu_quota=-1")
    assert group.quota() is None


async def test_the_cascade_limits_what_the_guest_cannot_give_and_reinflation_lifts_it(guest: SoloGuest) -> None:
    link = GuestLink("solo", lambda: guest.hypervisor.guest_channel(guest.domain), lambda hello: None)
    talking = asyncio.create_task(link.run(), name="guest link")
    quiet = without(Layer.APPLICATION)
    try:
        await until(lambda: link.connected, limit_s=60)
        executor = Executor(guest.domain, guest.hypervisor.sizes, link, "test")
        before, _ = await executor.measure()
        async with swap_for(guest, 576):
            down = await drive(Cascade(before, ResourceVector(1, 300), 120.0, quiet), executor)
            assert down.reached, down.sentence
            assert down.after.limit_mib == pytest.approx(300, abs=1)
            assert down.after.held_mib > 320, "the guest keeps what its application holds"
            given = {row.layer: row.verified for row in down.ledger if row.resource == "memory_mib"}
            assert given[Layer.GUEST] + given[Layer.HYPERVISOR] == pytest.approx(GUEST_MIB - 300, abs=1)
            assert given[Layer.HYPERVISOR] > 0
            assert await touch(guest) == 0
            assert guest.alive()

            boot_mib = before.balloon_mib
            up = await drive(Reinflation(down.after, before.size, boot_mib, 1, 120.0, quiet), executor)
            assert up.reached, up.sentence
            assert up.after.limit_mib is None
            assert up.after.memory_mib == pytest.approx(GUEST_MIB, abs=1)
    finally:
        talking.cancel()
        await asyncio.gather(talking, return_exceptions=True)


async def drive(machine: Cascade | Reinflation, executor: Executor) -> Outcome:
    """Carry out what the machine says, to its end."""
    pending = machine.start(asyncio.get_running_loop().time())
    while True:
        (instruction,) = pending
        if isinstance(instruction, Finish):
            return instruction.outcome
        pending = machine.handle(await executor.carry_out(instruction))


def virsh(*words: str) -> str:
    return subprocess.run(["virsh", *words], check=True, capture_output=True, text=True).stdout
