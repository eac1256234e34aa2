"""A VM that moves between the two hosts of a lab, each with a libvirt of its own, and whose memcached is asked
meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from ebbtide.client import ManagerClient
from ebbtide.demo.cache import VALUE_BYTES
from ebbtide.lab.cluster import HostSlice, Lab
from ebbtide.lab.errors import LabError
from ebbtide.lab.guest_link import LabLink, value_digest
from ebbtide.lab.readings import Gauge
from ebbtide.lab.services import LIBVIRTD, active_domains
from ebbtide.lab.state import LabHost, LabState
from ebbtide.messages.common import Vector
from ebbtide.messages.operations import Operation, OperationState
from ebbtide.messages.vms import VMSpec
from hostagent.libvirt.hypervisor import domain_name
from tests.guests.test_modes import ended

CACHE = VMSpec(name="cache", nominal=Vector(cpu_cores=1.0, memory_mib=640.0), minimum=Vector(memory_mib=400.0))
KEYS = [f"live-{number}" for number in range(400)]
#: A state is waited for so long at most; a busy machine is slow.
LIMIT_S = 600.0
#: In the last words of a kernel.
CRASHES = ("Oops:", "BUG: ", "Kernel panic")
#: Slow enough that a move can be met in the middle.
SLOW_MIB_S = 24.0


@contextlib.contextmanager
def lab_of_two() -> Iterator[Lab]:
    """Two hosts that are alike, each with a libvirt of its own."""
    directory = Path(tempfile.mkdtemp(prefix="ebbtide-", dir="/var/tmp"))
    directory.chmod(0o711)
    tag = directory.name.removeprefix("ebbtide-").replace("_", "x").lower()
    made = Lab(directory / "lab", report=print)
    try:
        before = LIBVIRTD.answers()
        size = "cpu_cores=2,memory_mib=1600"
        # Until the end: daemons that are killed are started again with it.
        with pytest.MonkeyPatch.context() as patch:
            # The lab's guests have disks of their own.
            patch.setenv("EBB_MANAGER_MOVE_FIRST", "copied")
            # Guests here are emulated.
            patch.setenv("EBB_HOSTAGENT_MIGRATION_EMULATED", "true")
            made.up([HostSlice.parse(f"live-{tag}-{name}={size}") for name in ("a", "b")], own_libvirt=True)
            assert LIBVIRTD.answers() == before, "the machine's libvirtd is not touched"
            yield made
    finally:
        made.down()
        shutil.rmtree(directory)


class Moving:
    """The VM, on one of the lab's hosts."""

    def __init__(self, lab: Lab, client: ManagerClient, host: str) -> None:
        self.lab = lab
        self.client = client
        self.host = host
        #: When memcached answered.
        self.answers: list[float] = []
        #: While its memory is taken memcached may evict keys: it answers then that it does not have them.
        self.may_evict = False
        #: Why it was not reached when it was last tried.
        self.silence = ""
        #: By host: how much of the guest's console, in bytes, is of boots before this one.
        self._console_before: dict[str, int] = {}

    @property
    def state(self) -> LabState:
        return self.lab.state()

    @property
    def other(self) -> str:
        return next(host.id for host in self.state.hosts if host.id != self.host)

    def runs_on(self) -> list[str]:
        """The hosts whose libvirt has it running."""
        return [host.id for host in self.state.hosts if domain_name(host.id, CACHE.name) in active_domains(host.uri)]

    async def link(self) -> LabLink:
        """The guest, wherever it is: of a host to which it is still moving nothing answers."""
        while True:
            for host in self.state.hosts:
                gauge = Gauge(domain_name(host.id, CACHE.name), host.uri)
                try:
                    async with asyncio.timeout(30.0):
                        return await gauge.link()
                except (LabError, TimeoutError) as error:
                    self.silence = f"{host.id}: {error or type(error).__name__}"
            self.fail_if_crashed()
            await asyncio.sleep(0.05)

    async def ask(self, link: LabLink, number: int) -> None:
        """:raises LabError: the guest does not answer there any more."""
        key = KEYS[number % len(KEYS)]
        found = await link.call("memcached.get", keys=[key], reply_timeout_s=10.0)
        assert found["found"] == {key: value_digest(key, VALUE_BYTES)} or (self.may_evict and not found["found"])
        self.answers.append(time.monotonic())

    async def fill(self) -> None:
        link = await self.link()
        try:
            filled = await link.call("memcached.fill", prefix="live-", count=len(KEYS), value_bytes=VALUE_BYTES)
            assert filled["stored"] == len(KEYS)
        finally:
            await link.close()

    async def watch(self) -> None:
        """Ask for one key after the other, until cancelled."""
        link, number = await self.link(), 0
        try:
            while True:
                number += 1
                try:
                    await self.ask(link, number)
                except LabError:
                    await link.close()
                    link = await self.link()
        finally:
            await link.close()

    @contextlib.asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        self.answers.clear()
        task = asyncio.create_task(self.watch())

        async def until(answers: int) -> None:
            try:
                async with asyncio.timeout(LIMIT_S):
                    while len(self.answers) < answers:
                        if task.done():
                            await task
                        await asyncio.sleep(0.05)
            except TimeoutError:
                pytest.fail(f"{answers} answers were waited for, {len(self.answers)} came; {self.silence}")

        try:
            await until(1)
            yield
            await until(len(self.answers) + 5)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def longest_gap(self) -> float:
        return max(later - earlier for earlier, later in zip(self.answers, self.answers[1:], strict=False))

    async def begin(self, **options: Any) -> Operation:
        return await self.client.migrate(CACHE.name, live=True, copy_storage=True, **options)

    async def under_way(self, operation: Operation) -> None:
        """Until some of it has moved."""
        async with asyncio.timeout(LIMIT_S):
            while True:
                found = await self.client.operation(operation.request_id)
                assert found.state is OperationState.RUNNING, found.sentence
                if any("% of" in said for said in found.progress):
                    return
                await asyncio.sleep(0.2)

    async def at_rest(self) -> None:
        """Wherever an earlier test, or try, has left it, with all its keys; one whose kernel has crashed boots anew."""
        if crash := self.crash():
            print(f"booting {CACHE.name} anew: {crash}")
            await ended(self.client, await self.client.stop(CACHE.name, limit_s=1.0))
            self._console_before = {host.id: len(self._console(host)) for host in self.state.hosts}
            started = await ended(self.client, await self.client.start(CACHE.name))
            assert started.state is OperationState.DONE, started.sentence
        await self.settled()
        await self.fill()
        self.may_evict = False

    def crash(self) -> str:
        """What the guest's kernel says of its end since it booted, and on which host; empty if it lives.

        QEMU before 9.0 loses writes of emulated guests that move: docs/reference/lifecycle.md.
        """
        for host in self.state.hosts:
            text = self._console(host)[self._console_before.get(host.id, 0) :].decode(errors="replace")
            for line in text.splitlines():
                if any(word in line for word in CRASHES):
                    return f"{host.id}: {line.strip()}"
        return ""

    def fail_if_crashed(self) -> None:
        if crash := self.crash():
            pytest.fail(f"the guest's kernel has crashed on {crash}")

    def _console(self, host: LabHost) -> bytes:
        console = host.disk_dir / domain_name(host.id, CACHE.name) / "console.log"
        return console.read_bytes() if console.exists() else b""

    async def settled(self) -> None:
        """One copy runs, where the manager says, and its guest agent answers there."""
        async with asyncio.timeout(LIMIT_S):
            while True:
                vm = await self.client.vm(CACHE.name)
                self.fail_if_crashed()
                if vm.state == "running" and vm.guest_connected and vm.current == CACHE.nominal:
                    break
                await asyncio.sleep(0.5)
        assert vm.host is not None
        assert self.runs_on() == [vm.host]
        self.host = vm.host


@contextlib.asynccontextmanager
async def moving_in(lab: Lab) -> AsyncIterator[Moving]:
    state = lab.state()
    async with ManagerClient(state.manager_url, state.manager_token_file.read_text().strip()) as client:
        created = await ended(client, await client.create(CACHE, deadline_s=LIMIT_S))
        assert created.host is not None, created.sentence
        yield Moving(lab, client, created.host)
