"""A real guest is preempted: a program in it records the notice. One that was stopped boots again from its disk, one
that was suspended goes on where it was, one that is deleted is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import AsyncIterator

import pytest

from benchmarks.host.bench_host import in_guest, lab_link
from ebbtide.client import ManagerClient
from ebbtide.deflation.allocations import Priority
from ebbtide.deflation.modes import HostMode
from ebbtide.messages.common import Vector
from ebbtide.messages.operations import Operation, OperationState
from ebbtide.messages.vms import ClusterVM, OnPreemption, VMSpec
from tests.guests.conftest import RunningLab
from tests.guests.placed import START_S
from tests.guests.test_demo import virsh
from tests.guests.test_modes import ended, set_mode

pytestmark = [pytest.mark.guest, pytest.mark.timeout(900)]

#: It can be shrunk by nothing worth while, and both do not fit on the smaller host.
LOW = VMSpec(
    name="kept-low",
    priority=Priority.DEFLATABLE,
    nominal=Vector(cpu_cores=1.0, memory_mib=640.0),
    minimum=Vector(cpu_cores=1.0, memory_mib=640.0),
    preemption_notice_s=90.0,
)
HIGH = VMSpec(name="arriving", priority=Priority.FIXED, nominal=Vector(cpu_cores=0.5, memory_mib=500.0))
#: What a program in the guest records of its notice; it stays for a while, so that it can be read before the VM goes.
PROGRAM = "#!/bin/busybox sh\\necho told $1 $2 $3 >> /var/notice\\nbusybox sync\\nbusybox sleep %d\\n"
#: Counts in memory: a guest that boots anew has nothing of it.
COUNTER = "i=0; while :; do i=$((i+1)); echo $i > /run/n; busybox mv /run/n /run/count; busybox sleep 1; done"


class Scene:
    """The low VM on the lab's small host; the other host takes none."""

    def __init__(self, lab: RunningLab, client: ManagerClient) -> None:
        self.client = client
        self.large, self.small = (host.id for host in lab.state.hosts)
        self.domain, self.uri = f"ebb-{self.small}.{LOW.name}", lab.state.uri
        # A line of `ebb vm list` is as wide as its table, not as a terminal.
        self.environment = lab.environment | {"COLUMNS": "400"}

    async def shell(self, script: str) -> str:
        guest = await lab_link(self.uri, self.domain)
        try:
            return await in_guest(guest, script)
        finally:
            await guest.close()

    async def low(self) -> ClusterVM:
        return await self.client.vm(LOW.name)

    async def answers(self) -> None:
        async with asyncio.timeout(300):
            while not (await self.low()).guest_connected:
                await asyncio.sleep(0.5)

    async def placed(self, on_preemption: OnPreemption, program_s: int = 0) -> None:
        """The low VM runs with a program that records its notice, and with a file."""
        low = LOW.model_copy(update={"on_preemption": on_preemption})
        created = await ended(self.client, await self.client.create(low, deadline_s=START_S))
        assert (created.state, created.host) == (OperationState.DONE, self.small), created.sentence
        await self.answers()
        await self.shell(
            "busybox mkdir -p /etc/ebbtide/preempt.d && "
            f"printf '{PROGRAM % program_s}' > /etc/ebbtide/preempt.d/record && "
            "busybox chmod 755 /etc/ebbtide/preempt.d /etc/ebbtide/preempt.d/record && "
            "echo precious > /var/work && busybox sync",
        )

    async def arrives(self, deadline_s: float = 120) -> Operation:
        return await self.client.create(HIGH, deadline_s=deadline_s)

    async def has_arrived(self, operation: Operation) -> None:
        arrived = await ended(self.client, operation)
        assert (arrived.state, arrived.host) == (OperationState.DONE, self.small), arrived.sentence

    async def event(self, kind: str) -> str:
        return (await self.client.events(10, kind=kind, vm=LOW.name))[0].sentence

    async def listed(self) -> str:
        """The low VM's line of `ebb vm list`."""
        argv = [sys.executable, "-m", "ebbtide.cli.main", "vm", "list"]
        done = await asyncio.to_thread(
            subprocess.run, argv, capture_output=True, text=True, timeout=60, check=True, env=self.environment
        )
        return next(line for line in str(done.stdout).splitlines() if line.startswith(LOW.name))

    async def back(self) -> None:
        """Room returns, and the low VM with it."""
        await ended(self.client, await self.client.delete(HIGH.name))
        async with asyncio.timeout(300):
            while (await self.low()).state != "running":
                await asyncio.sleep(0.5)
        await self.answers()


def check_notice(text: str, kind: str) -> None:
    """What the program was told."""
    told, found, seconds, reason = text.split(maxsplit=3)
    assert (told, found, reason.strip()) == ("told", kind, "minimum")
    assert 5 < float(seconds) <= 90


@contextlib.asynccontextmanager
async def scene_in(lab: RunningLab) -> AsyncIterator[Scene]:
    async with lab.client() as client:
        scene = Scene(lab, client)
        await set_mode(client, scene.large, HostMode.PAUSED)
        try:
            yield scene
        finally:
            for name in (HIGH.name, LOW.name):
                if any(vm.name == name for vm in await client.vms()):
                    await ended(client, await client.delete(name))
            await set_mode(client, scene.large, HostMode.ACTIVE)


def state_of(domain: str) -> str:
    return (virsh("domstate", "--reason", domain) or "").strip()


async def test_a_preempted_guest_has_its_notice_keeps_its_disk_and_boots_again_from_it(lab: RunningLab) -> None:
    async with scene_in(lab) as scene:
        await scene.placed(OnPreemption.STOP)
        await scene.has_arrived(await scene.arrives())
        found = await scene.low()
        assert (found.state, found.host) == ("preempted", scene.small)
        assert found.preempted is not None
        assert found.preempted.position == 1
        assert found.preempted.waits_for.memory_mib > 0
        assert f"preempted, 1st in line on {scene.small}, waits for " in await scene.listed()
        sentence = await scene.event("preempted")
        assert "its guest was told" in sentence
        assert "1 of 1 programs ended in time" in sentence
        assert "its guest powered off" in sentence
        assert (await asyncio.to_thread(state_of, scene.domain)).startswith("shut off")

        await scene.back()
        work, notice = (await scene.shell("busybox cat /var/work /var/notice")).split("\n", 1)
        assert work == "precious"
        check_notice(notice, "stop")


async def test_a_suspended_guest_goes_on_with_its_counter(lab: RunningLab) -> None:
    async with scene_in(lab) as scene:
        await scene.placed(OnPreemption.SUSPEND)
        await scene.shell(f"({COUNTER}) </dev/null >/dev/null 2>&1 &")
        boot_id = await scene.shell("busybox cat /proc/sys/kernel/random/boot_id")
        async with asyncio.timeout(60):
            while (await scene.shell("busybox cat /run/count 2>/dev/null; true")).strip() in ("", "1", "2"):
                await asyncio.sleep(0.5)
        before = int(await scene.shell("busybox cat /run/count"))

        await scene.has_arrived(await scene.arrives())
        found = await scene.low()
        assert (found.state, found.host) == ("preempted", scene.small)
        assert found.saved_mib is not None
        assert found.saved_mib > 32
        assert found.preempted is not None
        assert found.preempted.position == 1
        assert f"preempted (suspended), 1st in line on {scene.small}, waits for " in await scene.listed()
        sentence = await scene.event("preempted")
        assert "its guest was told" in sentence
        assert "its memory, " in sentence
        assert await asyncio.to_thread(state_of, scene.domain) == "shut off (saved)"

        await scene.back()
        assert await scene.shell("busybox cat /proc/sys/kernel/random/boot_id") == boot_id, "it has not booted again"
        count = int(await scene.shell("busybox cat /run/count"))
        assert count >= before
        async with asyncio.timeout(60):
            while int(await scene.shell("busybox cat /run/count")) <= count:
                await asyncio.sleep(0.5)
        async with asyncio.timeout(60):
            while len(told := (await scene.shell("busybox cat /var/notice")).splitlines()) < 2:
                await asyncio.sleep(0.5)
        check_notice(told[0], "suspend")
        assert told[1] == "told withdrawn 30 it runs on"
        assert "preemption.json" not in await scene.shell("busybox ls /run/ebbtide")
        assert (await scene.low()).saved_mib is None
        # What was not plugged yet when it was suspended is plugged now.
        async with asyncio.timeout(180):
            while (await scene.low()).current != LOW.nominal:
                await asyncio.sleep(0.5)


async def test_a_guest_that_is_deleted_is_told_before(lab: RunningLab) -> None:
    async with scene_in(lab) as scene:
        await scene.placed(OnPreemption.DELETE, program_s=25)
        arriving = await scene.arrives()
        async with asyncio.timeout(120):
            while not (notice := await scene.shell("busybox cat /var/notice 2>/dev/null; true")):
                await asyncio.sleep(0.2)
        check_notice(notice, "delete")
        told = await scene.shell("cd /opt/ebbtide && python3 -m guestagent status --json; echo $?")
        status, exit_status = told.strip().rsplit("\n", 1)
        assert exit_status == "3"
        preemption = json.loads(status)["preemption"]
        assert (preemption["kind"], preemption["reason"]) == ("delete", "minimum")
        assert 0 < preemption["seconds_left"] < 90

        await scene.has_arrived(arriving)
        assert [vm.name for vm in await scene.client.vms()] == [HIGH.name]
        assert await asyncio.to_thread(virsh, "dominfo", scene.domain) is None
        assert "1 of 1 programs ended in time" in await scene.event("preempted")
