"""Somebody else works on the domains; real guests (docs/reference/faults.md)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import AsyncIterator, Callable
from typing import Any

import libvirt
import pytest

from ebbtide.lab.guest_link import channel_path
from ebbtide.lab.readings import qemu_pid, vcpu_quotas
from ebbtide.lab.services import open_libvirt
from hostagent.limits import burst
from hostagent.limits.cgroups import vcpu_groups
from hostagent.state.intents import NAMESPACE
from tests.faults.invariants import SLACK
from tests.faults.ward import HIGH, LOW, PERIOD_S, URI, Ward

pytestmark = [pytest.mark.guest, pytest.mark.timeout(600), pytest.mark.asyncio(loop_scope="session")]

LIVE = libvirt.VIR_DOMAIN_AFFECT_LIVE
#: A domain of somebody else: nothing to boot from, and it never runs.
FOREIGN = """
<domain type='qemu'>
  <name>{name}</name>
  <memory unit='MiB'>64</memory>
  <vcpu>2</vcpu>
  <os><type arch='x86_64' machine='q35'>hvm</type></os>
  <devices><memballoon model='virtio'/></devices>
</domain>
"""
#: A program that lifts the quota of a domain's vCPUs ten times a second, and writes a line where there was one.
LIFT = """
import libvirt, sys, time
domain = libvirt.open(sys.argv[1]).lookupByName(sys.argv[2])
while True:
    if 0 < domain.schedulerParametersFlags(libvirt.VIR_DOMAIN_AFFECT_LIVE)["vcpu_quota"] < 10**9:
        domain.setSchedulerParametersFlags({"vcpu_quota": -1}, libvirt.VIR_DOMAIN_AFFECT_LIVE)
        print("lifted", flush=True)
    time.sleep(0.1)
"""


async def test_a_quota_that_somebody_lifts_is_set_again(ward: Ward) -> None:
    assert (await ward.target(1.5, 768)).state.value == "done"
    drift = Drift(ward)
    await ward.foreign(lambda domain: domain.setSchedulerParametersFlags({"vcpu_quota": -1}, LIVE))
    await drift.put_right()
    await ward.hold()


async def test_a_quota_that_is_lifted_ten_times_a_second_is_told_of_and_the_cap_holds(ward: Ward) -> None:
    committed, window_s = 0.5, 10.0  # so little that a busy host can give more
    assert (await ward.target(committed, 768)).state.value == "done"
    vm = ward.host.vm(LOW)
    async with ward.hand().running("pin_cpu", "0", "busy"), fighter(ward.domain()) as lifted:
        used, _ = await asyncio.gather(
            ward.cores_used(window_s),
            ward.until("the contention is told", lambda: vm.status().contention is not None),
        )
        # It is told before the third repair is made, where an earlier test's repair counts too.
        await ward.until("the quota has been lifted three times", lambda: lifted() >= 3)
    print(f"{used:g} cores used of {committed:g} committed, over {window_s:g} s; lifted {lifted()} times")
    # A window may begin and end within a period of the quota. The cap is 3 % more, and 4 % over that were seen on a
    # slow machine (.535 of .5); without a cap it would be twice as much.
    assert used <= committed * (1.08 + PERIOD_S / window_s)
    # However little a busy host leaves it: an idle guest uses a tenth of that.
    assert used >= committed * 0.2
    assert vm.status().drift_total >= 3
    told = [row.sentence for row in ward.host.history.decisions(LOW) if "another program" in row.sentence]
    assert re.fullmatch(r"another program undoes what is put right: 3 times in \d+ s", told[-1])
    vm.request_check()  # as any word of the guest does
    await ward.until("there is a quota again", lambda: None not in vcpu_quotas(qemu_pid(ward.domain())))
    await ward.hold()


async def test_a_quota_that_somebody_lowers_is_given_back(ward: Ward) -> None:
    drift = Drift(ward)
    await ward.foreign(
        lambda domain: domain.setSchedulerParametersFlags({"vcpu_period": 100_000, "vcpu_quota": 20_000}, LIVE)
    )
    await drift.put_right()
    await ward.hold()


async def test_vcpus_under_a_quota_burst_and_a_quota_below_the_burst_is_refused_to_others(ward: Ward) -> None:
    # The agent asks the same: a skip by its answer would hide that it is wrong.
    assert not burst.kernel_lacks_it()

    def bursts() -> dict[int, tuple[float | None, int | None]]:
        groups = vcpu_groups(qemu_pid(ward.domain())).items()
        return {number: (group.quota(), group.burst_us()) for number, group in groups}

    assert {has[1] for has in bursts().values()} == {0}
    assert (await ward.target(1.5, 768)).state.value == "done"
    limited = bursts()
    assert set(limited.values()) == {(0.75, 37_500)}
    least = {"vcpu_period": 100_000, "vcpu_quota": 1_000}
    with pytest.raises(libvirt.libvirtError, match="Invalid argument"):
        await ward.foreign(lambda domain: domain.setSchedulerParametersFlags(least, LIVE))
    assert (await ward.target(3.0, 768)).state.value == "done"
    assert {has[1] for has in bursts().values()} == {0}
    await ward.hold()


async def test_a_balloon_that_somebody_raises_is_brought_back(ward: Ward) -> None:
    await ward.target(3.0, 340)
    assert (await ward.foreign(lambda domain: domain.memoryStats()))["actual"] < 380 * 1024
    drift = Drift(ward)
    await ward.foreign(lambda domain: domain.setMemoryFlags(384 * 1024, LIVE))
    await drift.put_right()
    await ward.hold()


async def test_a_balloon_that_somebody_lowers_is_given_back(ward: Ward) -> None:
    drift = Drift(ward)
    await ward.foreign(lambda domain: domain.setMemoryFlags(300 * 1024, LIVE))
    await drift.put_right()
    await ward.hold()


async def test_memory_that_somebody_plugs_is_brought_back(ward: Ward) -> None:
    assert (await ward.target(3.0, 576)).state.value == "done"
    drift = Drift(ward)
    await ward.foreign(lambda domain: _request(domain, 384))
    await drift.put_right()
    await ward.hold()


async def test_a_cpu_that_the_guests_root_puts_on_line_gets_no_more_than_is_committed(ward: Ward) -> None:
    assert (await ward.target(1.5, 768)).state.value == "done"
    assert len(await ward.hand().online()) == 2
    drift = Drift(ward)
    await ward.hand().shell("for c in 1 2; do echo 1 > /sys/devices/system/cpu/cpu$c/online; done")
    await drift.put_right()
    await ward.hold()


async def test_cpus_that_somebody_takes_off_line_are_put_back(ward: Ward) -> None:
    drift = Drift(ward)
    await ward.foreign(lambda domain: domain.setGuestVcpus("2", 0))
    await drift.put_right()
    await ward.hold()


async def test_a_stopped_vm_that_somebody_starts_gets_what_is_committed(ward: Ward) -> None:
    assert (await ward.target(2.0, 600)).state.value == "done"
    boot_id = ward.before.vms[LOW].boot_id
    await ward.hand().close()
    await ward.foreign(lambda domain: domain.destroy())
    await ward.until("the agent sees it", lambda: ward.host.vm(LOW).status().state.value == "stopped")
    await ward.foreign(lambda domain: domain.create())
    ward.forget_hand(LOW)
    await ward.rebooted(boot_id)
    await ward.until("it is settled", lambda: ward.host.vm(LOW).status().state.value == "running")
    await ward.until("the VM holds what is committed", lambda: holds_what_is_committed(ward), 120.0)
    after = await ward.hold(restarted=[LOW])
    assert after.vms[LOW].held.memory_mib == pytest.approx(600, abs=2)


async def test_a_vm_that_somebody_undefines_is_no_longer_charged(ward: Ward) -> None:
    free = ward.host.free()
    nominal = {"cpu_cores": 1.0, "memory_mib": 384.0}
    await ward.create({"name": "extra", "priority": "deflatable", "nominal": nominal, "boot_memory_mib": 384.0})
    assert ward.host.free() != free

    def remove(domain: Any) -> None:
        domain.destroy()
        domain.undefine()

    await ward.foreign(remove, "extra")
    await ward.until("the agent sees it", lambda: "extra" not in ward.host.vms)
    assert ward.host.free().cpu_cores == free.cpu_cores
    assert ward.host.journal.changes[-1].cause == "removed from outside"
    await ward.hold()


async def test_a_running_vm_that_somebody_defines_without_our_metadata_stays_charged_and_ours(ward: Ward) -> None:
    await ward.target(2.0, 768)
    vm = ward.host.vm(LOW)

    def defined(domain: Any) -> str:
        return str(domain.XMLDesc(libvirt.VIR_DOMAIN_XML_INACTIVE | libvirt.VIR_DOMAIN_XML_SECURE))

    def define(domain: Any) -> None:
        root = ElementTree.fromstring(defined(domain))
        root.remove(next(root.iter("metadata")))
        domain.connect().defineXML(ElementTree.tostring(root, encoding="unicode"))
        assert NAMESPACE not in defined(domain)

    await ward.foreign(define)

    async def seen() -> bool:
        return NAMESPACE in await ward.foreign(defined)

    await ward.until("the definition says whose it is", seen, 30.0)
    assert ward.host.vm(LOW) is vm
    await ward.hold()


async def test_a_domain_that_is_not_ours_is_not_touched(ward: Ward) -> None:
    connection = open_libvirt(URI)
    # The one is called like a VM of this very host, but nothing says that it belongs to it.
    names = (f"faults-foreign-{ward.host_id}", ward.domain("stranger"))
    found = []
    try:
        for name in names:
            found.append(connection.defineXML(FOREIGN.format(name=name)))
            found[-1].createWithFlags(libvirt.VIR_DOMAIN_START_PAUSED)
        before = [(domain.XMLDesc(), domain.schedulerParameters(), domain.info()[:4]) for domain in found]
        body = {"request_id": ward.number("k"), "need": {"cpu_cores": 9.0, "memory_mib": 300.0}, "deadline_s": 15.0}
        operation = await ward.command("POST", "/v1/reclaims", body)
        assert operation.state.value == "partial"
        assert [outcome.name for outcome in operation.vms] == [LOW]
        assert [(domain.XMLDesc(), domain.schedulerParameters(), domain.info()[:4]) for domain in found] == before
        await ward.hold()
    finally:
        for domain in found:
            domain.destroy()
            domain.undefine()
        connection.close()


async def test_a_channel_that_somebody_else_is_connected_to_costs_the_guests_layers_only(ward: Ward) -> None:
    hand = ward.hand()
    pid = await hand.pid("-m guestagent")
    path = channel_path(await ward.foreign(lambda domain: domain.XMLDesc()), "io.ebbtide.guest.0")
    # QEMU serves one client of a port and lets others wait: this one comes in as soon as the agent lets go.
    _, writer = await asyncio.open_unix_connection(str(path))
    try:
        await hand.signal("STOP", pid)
        await ward.until("the agent lets go", lambda: not ward.host.vm(LOW).link.connected)
        await hand.signal("CONT", pid)
        operation = await ward.target(2.0, 600)
        assert operation.state.value == "partial"
        assert operation.vms[0].after.memory_mib == 768
        assert operation.vms[0].after.cpu_cores == pytest.approx(2.0, abs=0.011)
        await ward.hold()
    finally:
        await hand.signal("CONT", pid)
        writer.close()
    await ward.connected()


async def test_a_vm_whose_process_stands_still_holds_nobody_up(ward: Ward) -> None:
    """Calls of libvirt about it hang; the other VM, the API and the loop do not."""
    process = qemu_pid(ward.domain())
    longest_s = 0.0

    async def look() -> None:
        nonlocal longest_s
        while True:
            began_s = time.monotonic()
            status, _ = await ward.send("GET", "/v1/host")
            assert status == 200
            longest_s = max(longest_s, time.monotonic() - began_s)
            await asyncio.sleep(0.2)

    looking = asyncio.create_task(look())
    os.kill(process, signal.SIGSTOP)
    try:
        operation = await ward.target(1.5, 600, deadline_s=5.0)
        assert operation.state.value in ("partial", "failed"), operation.sentence
        assert "libvirt" in operation.sentence
        assert ward.host.vm(LOW).status().current.cpu_cores == 3.0
        # Somebody else's VM can still be read: not all places of the connection are taken.
        await ward.host.hypervisor.sizes.read(ward.domain(HIGH))
    finally:
        os.kill(process, signal.SIGCONT)
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)
    assert longest_s < 5.0
    await ward.connected()
    await ward.settled(120)
    await ward.hold()


@contextlib.asynccontextmanager
async def fighter(domain: str) -> AsyncIterator[Callable[[], int]]:
    """Another process lifts a domain's quota for a while; how often there was one to lift."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", LIFT, URI, domain, stdout=asyncio.subprocess.PIPE
    )
    lines: list[bytes] = []

    async def read() -> None:
        assert process.stdout is not None
        async for line in process.stdout:
            lines.append(line)

    reading = asyncio.create_task(read())
    try:
        yield lambda: len(lines)
    finally:
        process.kill()
        await process.wait()
        await reading


def _request(domain: Any, mib: int) -> None:
    device = ElementTree.fromstring(domain.XMLDesc()).find("./devices/memory[@model='virtio-mem']")
    assert device is not None
    requested = device.find("target/requested")
    assert requested is not None
    requested.text = str(mib * 1024)
    domain.updateDeviceFlags(ElementTree.tostring(device, encoding="unicode"), LIVE)


class Drift:
    """What the agent has put right, counted from a change of somebody else's on."""

    def __init__(self, ward: Ward) -> None:
        self._ward = ward
        self._before = self._count()

    def _count(self) -> int:
        return self._ward.host.vm(LOW).status().drift_total

    async def put_right(self) -> None:
        """Until the agent has seen the change and the VM holds what is committed again."""
        await self._ward.until("the change is seen", lambda: self._count() > self._before)
        await self._ward.until("the VM holds what is committed", lambda: holds_what_is_committed(self._ward))


async def holds_what_is_committed(ward: Ward) -> bool:
    seen = await ward.seen(LOW)
    committed = seen.status.current.vector()
    near = seen.held.fits_in(committed + SLACK) and committed.fits_in(seen.held + SLACK)
    return near and seen.pending_mib <= SLACK.memory_mib
