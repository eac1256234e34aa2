"""The guest or what runs in it does not do as it should; real guests (docs/reference/faults.md)."""

from __future__ import annotations

import asyncio

import libvirt
import psutil
import pytest

from ebbtide.messages.operations import LedgerRow, Operation
from tests.faults.ward import LOW, Ward

pytestmark = [pytest.mark.guest, pytest.mark.timeout(600), pytest.mark.asyncio(loop_scope="session")]

#: VIR_DOMAIN_MEMORY_PARAM_UNLIMITED, which the bindings leave out.
UNLIMITED_KIB = 9007199254740991


def row(operation: Operation, layer: str, resource: str = "memory_mib") -> LedgerRow:
    (outcome,) = operation.vms
    (found,) = [row for row in outcome.ledger if (row.layer.value, row.resource) == (layer, resource)]
    return found


# --- applications ----------------------------------------------------------------------------------------------------


async def test_an_application_that_hangs_costs_its_share_of_the_deadline_only(ward: Ward) -> None:
    async with ward.hand().application("hang", 150):
        operation = await ward.target(3.0, 600, deadline_s=60.0)
        assert operation.state.value == "done", operation.sentence
        assert row(operation, "application").verified == 0
        assert "hook" in row(operation, "application").reason
        await ward.hold()


async def test_an_application_that_refuses_keeps_what_it_has_and_the_next_layers_give(ward: Ward) -> None:
    async with ward.hand().application("refuse", 150) as pid:
        operation = await ward.target(3.0, 600)
        assert operation.state.value == "done", operation.sentence
        assert "in the middle of a checkpoint" in row(operation, "application").reason
        assert await ward.hand().alive(pid)
        await ward.hold()


async def test_an_application_that_crashes_after_its_promise_is_not_waited_for(ward: Ward) -> None:
    async with ward.hand().application("crash", 150) as pid:
        operation = await ward.target(3.0, 600)
        assert operation.state.value == "done", operation.sentence
        assert not await ward.hand().alive(pid)
        assert row(operation, "application").promised > 0
        assert row(operation, "application").verified == 0
        await ward.hold()


async def test_an_application_that_lies_is_credited_with_no_more_than_the_guest_gave(ward: Ward) -> None:
    async with ward.hand().application("lie", 150):
        operation = await ward.target(3.0, 600)
        assert operation.state.value == "done", operation.sentence
        assert row(operation, "application").promised > 0
        guest = row(operation, "guest").verified
        assert row(operation, "application").verified <= guest
        assert guest + row(operation, "hypervisor").verified == pytest.approx(168, abs=2)
        await ward.hold()


# --- memory and CPUs -------------------------------------------------------------------------------------------------


async def test_memory_that_is_pinned_stops_the_unplug_half_way_and_nothing_stays_asked_for(ward: Ward) -> None:
    async with ward.hand().running("pin_memory", "140"):
        operation = await ward.target(3.0, 500)
        guest = row(operation, "guest")
        assert 0 < guest.verified < guest.promised, operation.sentence
        assert "virtio-mem" in guest.reason
        await ward.hold()
    again = await ward.target(3.0, 480)
    assert again.state.value == "done", again.sentence
    await ward.hold()


async def test_a_cpu_with_a_pinned_task_stays_on_line_and_quota_takes_the_rest(ward: Ward) -> None:
    hand = ward.hand()
    async with hand.running("pin_cpu", "2") as pid:
        operation = await ward.target(1.0, 768)
        assert operation.state.value == "done", operation.sentence
        assert await hand.online() == (0, 2)
        assert "Cpus_allowed_list:\t2\n" in await hand.read(f"/proc/{pid}/status")
        await ward.hold()


async def test_a_guest_at_its_minimum_gives_nothing_more(ward: Ward) -> None:
    operation = await ward.target(0.5, 330)
    assert operation.vms[0].after.cpu_cores == pytest.approx(0.5, abs=0.011)
    low = await ward.hold()
    body = {"request_id": ward.number("k"), "need": {"cpu_cores": 1.0, "memory_mib": 200.0}, "deadline_s": 10.0}
    more = await ward.command("POST", "/v1/reclaims", body)
    assert more.state.value == "partial"
    assert more.shortfall.cpu_cores == pytest.approx(1.0, abs=0.02)
    status, problem = await ward.send("PUT", f"/v1/vms/{LOW}/target", ward.target_body(0.5, 300))
    assert (status, problem["field"]) == (400, "target.memory_mib")
    after = await ward.hold()
    assert after.vms[LOW].held.cpu_cores == low.vms[LOW].held.cpu_cores
    # What was above the minimum, 10 MiB, may have gone.
    fell_mib = low.vms[LOW].held.memory_mib - after.vms[LOW].held.memory_mib
    assert -2.0 <= fell_mib <= 12.0
    assert more.shortfall.memory_mib == pytest.approx(200.0 - fell_mib, abs=4.0)


async def test_an_application_that_grows_in_the_middle_of_a_deflation_is_not_killed(ward: Ward) -> None:
    hand = ward.hand()
    async with hand.running("hog", "200", "1.2") as pid:
        operation = await ward.target(3.0, 330)
        async with asyncio.timeout(60):
            while (await hand.read("/run/faults/hog.log")).count("ready") < 2:
                assert await hand.alive(pid), "the guest's kernel killed the application"
                await asyncio.sleep(0.2)
        assert await hand.alive(pid)
        assert operation.state.value in ("done", "partial"), operation.sentence
        await ward.hold()


async def test_without_swap_no_limit_is_set_and_memory_falls_short(ward: Ward) -> None:
    if psutil.swap_memory().total > 0:
        pytest.fail("this test needs a host without swap: swapoff -a")
    async with ward.hand().running("hog", "400"):
        await ward.until("the guest is at rest", lambda: ward.host.vm(LOW).status().pressure is None)
        operation = await ward.target(3.0, 330)
        assert operation.state.value == "partial"
        assert "no swap" in row(operation, "hypervisor").reason
        limits = await ward.foreign(lambda domain: domain.memoryParameters(libvirt.VIR_DOMAIN_AFFECT_LIVE))
        assert limits["hard_limit"] == UNLIMITED_KIB
        await ward.hold()


async def test_without_a_balloon_driver_memory_falls_short_and_is_not_asked_for_for_ever(ward: Ward) -> None:
    hand = ward.hand()
    driver = "/sys/bus/virtio/drivers/virtio_balloon"
    device = (await hand.shell('cd "$1" && echo virtio*', driver)).strip()
    await hand.shell('echo "$1" > "$2/unbind"', device, driver)
    try:
        operation = await ward.target(3.0, 330)
        assert operation.state.value == "partial"
        assert row(operation, "guest").verified > 300
        assert "balloon" in row(operation, "hypervisor").reason
        await ward.hold()
    finally:
        await hand.shell('echo "$1" > "$2/bind"', device, driver)
    # The driver has come back: what was given up before is not taken now.
    await asyncio.sleep(2)
    await ward.hold()


# --- the kernel ------------------------------------------------------------------------------------------------------


async def test_of_a_guest_that_panicked_only_cpu_is_taken_and_a_reset_brings_it_back(ward: Ward) -> None:
    boot_id = ward.before.vms[LOW].boot_id
    await ward.hand().leave("busybox sysctl -q -w kernel.panic=0; echo c > /proc/sysrq-trigger")
    operation = await ward.target(1.5, 480)
    assert operation.state.value == "partial"
    assert operation.vms[0].after.memory_mib == 768
    assert operation.vms[0].after.cpu_cores == pytest.approx(1.5, abs=0.011)
    await ward.foreign(lambda domain: domain.reset())
    await ward.rebooted(boot_id)
    after = await ward.hold(restarted=[LOW])
    assert after.vms[LOW].process == ward.before.vms[LOW].process


async def test_a_guest_that_reboots_in_the_middle_holds_no_more_than_is_committed(ward: Ward) -> None:
    boot_id = ward.before.vms[LOW].boot_id
    request_id = await ward.begin_target(1.5, 480)
    await ward.until_falling()
    await ward.hand().leave("busybox reboot -f")
    operation = await ward.ended(request_id)
    assert operation.state.value in ("done", "partial"), operation.sentence
    await ward.rebooted(boot_id)
    await ward.settled()

    async def within() -> bool:
        seen = await ward.seen(LOW)
        return seen.held.memory_mib <= seen.status.current.memory_mib + 2 and seen.pending_mib <= 2

    await ward.until("the size is that which was committed", within)
    after = await ward.hold(restarted=[LOW])
    assert after.vms[LOW].process == ward.before.vms[LOW].process
