"""Layers of real guests: what the doctor says of them, DIMMs that go and come back, the ACPI probe."""

from __future__ import annotations

import asyncio
import os
import signal
import xml.etree.ElementTree as ElementTree
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from ebbtide.cli.doctor_vm import VMDiagnosis, examine_vm
from ebbtide.client import ManagerClient
from ebbtide.deflation.allocations import Priority
from ebbtide.deflation.cascade.mechanisms import Mechanism
from ebbtide.lab import paths
from ebbtide.lab.image import build_image
from ebbtide.lab.services import open_libvirt
from ebbtide.messages.common import Vector
from ebbtide.messages.operations import OperationState, VMOutcome
from ebbtide.messages.vms import VMSpec
from hostagent.mechanisms import acpi_probe
from hostagent.mechanisms.acpi_probe import try_unplug
from hostagent.mechanisms.layers import NO_UNPLUG_EMULATED
from tests.guests.conftest import RunningLab
from tests.guests.placed import placed
from tests.guests.test_demo import virsh

pytestmark = [pytest.mark.guest, pytest.mark.timeout(600)]


@asynccontextmanager
async def vm(lab: RunningLab, spec: VMSpec) -> AsyncIterator[tuple[ManagerClient, str]]:
    """A VM whose guest agent is connected, and its domain."""
    async with lab.client() as client, placed(client, spec) as host:
        async with asyncio.timeout(240):
            while not (await client.vm(spec.name)).guest_connected:
                await asyncio.sleep(0.5)
        yield client, f"ebb-{host}.{spec.name}"


async def bring(client: ManagerClient, name: str, target: Vector) -> VMOutcome:
    """With time enough for a guest and its applications on a busy machine."""
    generation = (await client.vm(name)).generation + 1
    operation = await client.set_target(name, target, generation=generation, deadline_s=180)
    ended = await client.wait(operation, limit_s=240)
    assert ended.state is OperationState.DONE, ended.sentence
    return ended.vms[0]


async def diagnosis(lab: RunningLab, name: str) -> VMDiagnosis:
    return await asyncio.to_thread(examine_vm, name, lab.state.uri)


def dimms(domain: str) -> int:
    return len(ElementTree.fromstring(virsh("dumpxml", domain) or "").findall("./devices/memory[@model='dimm']"))


def why(found: VMDiagnosis) -> dict[Mechanism, str]:
    """The reasons of what is blocked."""
    return {finding.mechanism: finding.reason for finding in found.findings if not finding.available}


async def has_all_layers_but_what_its_host_and_template_do_not_give(lab: RunningLab, name: str, domain: str) -> None:
    """What the doctor says of a healthy guest of the lab."""
    found = await diagnosis(lab, name)
    expected = {
        Mechanism.COLD: "off unless the host agent is told",
        Mechanism.CPU_UNPLUG: NO_UNPLUG_EMULATED,
        Mechanism.DIMM: "the domain has no DIMM; virtio-mem gives the same in smaller steps",
        Mechanism.NETWORK: "the domain has no network interface",
    }
    assert (found.domain, found.running) == (domain, True)
    blocked = why(found)
    # Whether the host has swap is its own affair, and may change while this runs.
    limit = blocked.pop(Mechanism.MEMORY_LIMIT, "")
    assert limit in ("", "the host has no swap, so the kernel would kill QEMU at the limit", "the host's swap is full")
    assert blocked == expected


async def test_a_guest_of_dimms_gives_whole_dimms_and_gets_them_back(lab: RunningLab) -> None:
    nominal, small = Vector(cpu_cores=2, memory_mib=768), Vector(cpu_cores=2, memory_mib=600)
    spec = VMSpec(
        name="dimms",
        priority=Priority.DEFLATABLE,
        nominal=nominal,
        minimum=Vector(memory_mib=320),
        template="lab-dimm",
        boot_memory_mib=512,
    )
    async with vm(lab, spec) as (client, domain):
        found = await diagnosis(lab, "dimms")
        assert next(f for f in found.findings if f.mechanism is Mechanism.DIMM).reason == (
            "2 of 128 MiB, each as a whole"
        )
        assert why(found)[Mechanism.VIRTIO_MEM] == "the domain has no virtio-mem device"
        assert dimms(domain) == 2

        down = await bring(client, "dimms", small)
        assert dimms(domain) == 1
        verified = {row.layer.value: row.verified for row in down.ledger if row.resource == "memory_mib"}
        assert verified["guest"] == pytest.approx(128), down.sentence
        # What no whole DIMM fits is left to the balloon.
        assert verified["hypervisor"] == pytest.approx(40, abs=1), down.sentence
        assert down.after.memory_mib == pytest.approx(600, abs=1)

        back = await bring(client, "dimms", nominal)
        assert dimms(domain) == 2
        assert back.after.memory_mib == pytest.approx(768, abs=1), back.sentence


def left_by_the_probe(uri: str) -> list[str]:
    """Its domains and directories."""
    connection = open_libvirt(uri)
    try:
        domains = [d.name() for d in connection.listAllDomains() if d.name().startswith(acpi_probe.NAME)]
    finally:
        connection.close()
    return domains + [path.name for path in Path("/var/tmp").glob(f"{acpi_probe.NAME}*")]


def probe(uri: str, report: Callable[[str], None]) -> tuple[bool, str]:
    connection = open_libvirt(uri)
    try:
        return try_unplug(connection, build_image(paths.image_cache()).kernel, "qemu", report)
    finally:
        connection.close()


def test_under_emulation_a_throw_away_guest_does_not_pass_acpi_unplug_and_leaves_nothing(lab: RunningLab) -> None:
    steps: list[str] = []
    passed, reason = probe(lab.state.uri, steps.append)
    assert not passed
    assert steps[:2] == ["the throw-away guest boots", "unplug to 2 vCPUs"], reason
    assert reason.startswith("a throw-away guest did not pass ACPI vCPU unplug: ")
    assert left_by_the_probe(lab.state.uri) == []


def test_a_qemu_that_crashes_under_the_acpi_probe_is_no_pass_and_leaves_nothing(lab: RunningLab) -> None:
    def crash(_step: str) -> None:
        (pid_file,) = Path("/run/libvirt/qemu").glob(f"{acpi_probe.NAME}*.pid")
        os.kill(int(pid_file.read_text()), signal.SIGKILL)

    passed, reason = probe(lab.state.uri, crash)
    assert not passed
    assert reason.endswith("boot number 1 did not come up within 120 s: QEMU ended")
    assert left_by_the_probe(lab.state.uri) == []
