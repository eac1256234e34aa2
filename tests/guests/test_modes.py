"""Doctor, dry run, explain, pause and off with a real guest: what is told comes true, and off undoes all."""

from __future__ import annotations

import asyncio
import re

import pytest

from ebbtide.client import ManagerClient, ManagerRefused
from ebbtide.deflation.allocations import Priority
from ebbtide.deflation.cascade.mechanisms import Mechanism
from ebbtide.deflation.ledger import Layer
from ebbtide.deflation.modes import HostMode
from ebbtide.messages.common import Vector
from ebbtide.messages.explanations import Explanation
from ebbtide.messages.operations import Operation, OperationState
from ebbtide.messages.vms import VMSpec
from tests.guests.conftest import RunningLab
from tests.guests.placed import placed
from tests.guests.test_demo import virsh
from tests.guests.test_layers import has_all_layers_but_what_its_host_and_template_do_not_give

pytestmark = [pytest.mark.guest, pytest.mark.timeout(900)]

NAME = "kept"
NOMINAL = Vector(cpu_cores=2.0, memory_mib=640.0)
TARGET = Vector(cpu_cores=0.5, memory_mib=500.0)


def quota_us(domain: str) -> int:
    """The quota of a vCPU as libvirt has it; negative: none."""
    found = re.search(r"vcpu_quota\s*:\s*(-?\d+)", virsh("schedinfo", domain) or "")
    assert found is not None
    number = int(found[1])
    # libvirt prints what means no limit as an unsigned number.
    return -1 if number > 10**15 else number


async def ended(client: ManagerClient, operation: Operation, host: str | None = None) -> Operation:
    return await client.wait(operation, limit_s=240, host=host)


async def set_mode(client: ManagerClient, host: str, mode: HostMode) -> Operation:
    return await ended(client, await client.set_mode(host, mode, reason="a test"), host)


async def answering(client: ManagerClient) -> Explanation:
    """Until the guest says its whole state in time: emulated beside others it takes a while to come to it."""
    async with asyncio.timeout(300):
        while True:
            found = (await client.explain(NAME)).explanation
            if (
                found is not None
                and any(r.available and r.mechanism is Mechanism.CPU_OFFLINE for r in found.findings)
                # It boots with less, and gets the rest once its agent has said hello.
                and found.bound is not None
                and found.bound.memory_mib >= NOMINAL.memory_mib
            ):
                return found
            await asyncio.sleep(1.0)


async def until_quota(domain: str, quota: int) -> None:
    async with asyncio.timeout(90):
        while await asyncio.to_thread(quota_us, domain) != quota:
            await asyncio.sleep(0.5)


async def test_what_is_told_comes_true_a_pause_leaves_a_foreign_hand_and_off_undoes_all(lab: RunningLab) -> None:
    async with lab.client() as client:
        spec = VMSpec(name=NAME, priority=Priority.DEFLATABLE, nominal=NOMINAL, minimum=Vector(memory_mib=320.0))
        async with placed(client, spec) as host:
            domain = f"ebb-{host}.{NAME}"
            try:
                whole = await answering(client)
                assert whole.sentence == f"{NAME} has its nominal size (2 cores, 640 MiB): nothing is taken from it"
                assert whole.bound == NOMINAL
                open_ones = {row.mechanism for row in whole.findings if row.available}
                assert open_ones >= {Mechanism.CPU_OFFLINE, Mechanism.QUOTA, Mechanism.VIRTIO_MEM, Mechanism.BALLOON}
                assert all(row.reason for row in whole.findings)
                await has_all_layers_but_what_its_host_and_template_do_not_give(lab, NAME, domain)

                generation = (await client.vm(NAME)).generation + 1
                told = await client.forecast(NAME, TARGET, generation=generation)
                assert (await client.vm(NAME)).current == NOMINAL
                await answering(client)
                done = await ended(client, await client.set_target(NAME, TARGET, generation=generation))
                assert done.state is OperationState.DONE, done.sentence
                (forecast,), (outcome,) = told.vms, done.vms
                assert forecast.expected.cpu_cores == pytest.approx(outcome.after.cpu_cores, abs=0.01)
                assert forecast.expected.memory_mib == pytest.approx(outcome.after.memory_mib, abs=2.0)
                could = {(row.layer, row.resource): row.could for row in forecast.rows}
                assert could[Layer.GUEST, "cpu_cores"] == 1.0
                deflated = await client.explain(NAME)
                assert deflated.explanation is not None
                assert deflated.explanation.sentence.endswith(outcome.sentence)
                limited = await asyncio.to_thread(quota_us, domain)
                assert limited == 50_000

                assert (await set_mode(client, host, HostMode.PAUSED)).state is OperationState.DONE
                await asyncio.to_thread(virsh, "schedinfo", domain, "--live", "vcpu_quota=40000")
                async with asyncio.timeout(60):
                    while not await left(client):
                        await asyncio.sleep(0.5)
                assert await asyncio.to_thread(quota_us, domain) == 40_000
                refused = await ended(client, await client.set_target(NAME, NOMINAL, generation=generation + 1))
                assert refused.state is OperationState.FAILED
                assert f"{host} is paused: no VM is created and no size is changed (a test)" in refused.sentence
                await set_mode(client, host, HostMode.ACTIVE)
                await until_quota(domain, limited)

                undone = await set_mode(client, host, HostMode.OFF)
                assert undone.state is OperationState.DONE, undone.sentence
                assert await asyncio.to_thread(quota_us, domain) == -1
                back = await client.explain(NAME)
                assert back.explanation is not None
                assert back.explanation.bound == NOMINAL
                assert back.explanation.mode is HostMode.OFF

                await set_mode(client, host, HostMode.ACTIVE)
                await answering(client)
                generation = (await client.vm(NAME)).generation + 1
                await ended(client, await client.set_target(NAME, TARGET, generation=generation))
                await asyncio.to_thread(virsh, "managedsave", domain)
                async with asyncio.timeout(120):
                    while (await client.vm(NAME)).saved_mib is None:
                        await asyncio.sleep(0.5)
                saved = await set_mode(client, host, HostMode.OFF)
                assert saved.state is OperationState.PARTIAL, saved.sentence
                assert "its memory is saved as it is: start it first, or remove what is saved" in saved.sentence
                await asyncio.to_thread(virsh, "start", domain)
                assert await asyncio.to_thread(quota_us, domain) > 0, "what was saved has its limits"
                await until_quota(domain, -1)
            finally:
                await set_mode(client, host, HostMode.ACTIVE)
        with pytest.raises(ManagerRefused, match="there is no VM named kept"):
            await client.explain(NAME)


async def left(client: ManagerClient) -> bool:
    """Whether the foreign change has been seen and left."""
    found = (await client.explain(NAME)).explanation
    return found is not None and any("left as it is" in row.sentence for row in found.decisions)
