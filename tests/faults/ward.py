"""A real host agent over real guests, inside the test's process: a deflatable VM, a fixed one, and a hand in each."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
import shutil
import tempfile
import time
import uuid
import warnings
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import libvirt
import psutil
import pytest
from aiohttp.test_utils import TestClient, TestServer

from ebbtide.deflation.bounds import EMULATOR_SHARE
from ebbtide.deflation.resources import ResourceVector
from ebbtide.lab import paths, readings
from ebbtide.lab.domains import remove_domains, remove_logs
from ebbtide.lab.guest_link import channel_path
from ebbtide.lab.image import Image, build_image
from ebbtide.lab.readings import DomainView, qemu_pid, vcpu_quotas
from ebbtide.lab.services import LIBVIRTD, ensure_services, open_libvirt
from ebbtide.lab.state import LabState
from ebbtide.messages.operations import Operation
from hostagent.api.app import make_app
from hostagent.control import reconciler
from hostagent.libvirt import settling
from hostagent.libvirt.definitions import usable_boot_mib
from hostagent.libvirt.hypervisor import domain_name
from hostagent.libvirt.libvirt_hypervisor import LibvirtHypervisor
from hostagent.libvirt.settings import LibvirtSettings
from hostagent.mechanisms.accelerator import probe_accelerator
from hostagent.operations.agent import Agent
from hostagent.state import intents
from hostagent.state.intents import Phase
from hostagent.state.journal import Journal
from hostagent.vm import executor, guest_link
from hostagent.vm.host import Host, Slice
from hostagent.vm.managed_vm import ManagedVM
from tests.faults.hand import GuestHand
from tests.faults.invariants import SLACK, Picture, Seen, broken, not_nominal

URI: Final = "qemu:///system"
TOKEN: Final = "token-of-the-test"
CAPACITY: Final = ResourceVector(cpu_cores=5, memory_mib=2600)
OVERHEAD_MIB: Final = 320.0
LOW, HIGH = "low", "high"
#: 384 MiB to boot with, as much to unplug.
LOW_VM: Final[dict[str, Any]] = {
    "name": LOW,
    "priority": "deflatable",
    "nominal": {"cpu_cores": 3.0, "memory_mib": 768.0},
    "minimum": {"cpu_cores": 0.5, "memory_mib": 320.0},
    "boot_memory_mib": 384.0,
}
HIGH_VM: Final[dict[str, Any]] = {
    "name": HIGH,
    "priority": "fixed",
    "nominal": {"cpu_cores": 1.0, "memory_mib": 384.0},
    "boot_memory_mib": 384.0,
}
LOOK_S: Final = 0.2
#: Of a CPU quota (libvirt's default).
PERIOD_S: Final = 0.1


class Ward:
    """The host, its agent, its REST API, and its guests. Readings in pictures do not go through the agent."""

    def __init__(self, directory: Path, image: Image, accelerator: Any) -> None:
        self.host_id = f"faults-{uuid.uuid4().hex[:8]}"
        self._directory = directory
        self._image = image
        self._accelerator = accelerator
        self._numbers = itertools.count(1)
        self._hands: dict[str, GuestHand] = {}
        self.agent: Agent = None  # type: ignore[assignment]
        self.client: TestClient[Any, Any] = None  # type: ignore[assignment]
        #: As it was when the present test began.
        self.before: Picture = None  # type: ignore[assignment]

    @property
    def host(self) -> Host:
        return self.agent.host

    @property
    def state_dir(self) -> Path:
        return self._directory / "agent"

    def domain(self, name: str = LOW) -> str:
        return domain_name(self.host_id, name)

    def number(self, what: str) -> str:
        """A request id that was not used yet."""
        return f"{what}-{next(self._numbers)}"

    # --- the agent -----------------------------------------------------------------------------------------------

    async def start_agent(self) -> None:
        settings = LibvirtSettings(
            host_id=self.host_id,
            uri=URI,
            accelerator=self._accelerator,
            image_dir=self._image.base.parent,
            disk_dir=self._directory / "disks",
        )
        part = Slice(self.host_id, "http://127.0.0.1:1", CAPACITY, self._accelerator, OVERHEAD_MIB)
        journal = await asyncio.to_thread(Journal, self.state_dir)
        self.agent = Agent(Host(part, LibvirtHypervisor(settings), journal), usable_boot_mib)
        await self.agent.start()
        self.client = TestClient(TestServer(make_app(self.agent, TOKEN)), headers={"Authorization": f"Bearer {TOKEN}"})
        await self.client.start_server()

    async def stop_agent(self) -> None:
        await self.client.close()
        await self.agent.close()

    async def send(self, method: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
        """One request; its status and its body."""
        response = await self.client.request(method, path, json=body)
        return response.status, await response.json()

    async def ended(self, request_id: str, limit_s: float = 240.0) -> Operation:
        """An operation, once it has ended."""
        async with asyncio.timeout(limit_s):
            while True:
                _, body = await self.send("GET", f"/v1/operations/{request_id}?wait_s=20")
                operation = Operation.model_validate(body)
                if operation.state.value != "running":
                    return operation

    async def command(self, method: str, path: str, body: dict[str, Any], limit_s: float = 240.0) -> Operation:
        """Send a command and wait until its operation has ended."""
        status, answer = await self.send(method, path, body)
        assert status == 202, answer
        return await self.ended(body["request_id"], limit_s)

    def target_body(self, cpu_cores: float, memory_mib: float, name: str = LOW, **fields: Any) -> dict[str, Any]:
        generation = self.host.vm(name).intent.generation + 1
        target = {"cpu_cores": cpu_cores, "memory_mib": memory_mib}
        return {
            "request_id": self.number("t"),
            "generation": generation,
            "target": target,
            "deadline_s": 120.0,
            **fields,
        }

    async def begin_target(self, cpu_cores: float, memory_mib: float, **fields: Any) -> str:
        """Ask for a size of the deflatable VM and do not wait; the request's id."""
        body = self.target_body(cpu_cores, memory_mib, **fields)
        status, answer = await self.send("PUT", f"/v1/vms/{LOW}/target", body)
        assert status == 202, answer
        return str(body["request_id"])

    async def target(self, cpu_cores: float, memory_mib: float, **fields: Any) -> Operation:
        """Ask for a size of the deflatable VM and wait."""
        return await self.ended(await self.begin_target(cpu_cores, memory_mib, **fields))

    async def reinflate(self) -> Operation:
        body = {"request_id": self.number("r"), "vms": [LOW], "deadline_s": 30.0}
        return await self.command("POST", "/v1/reinflations", body)

    async def create(self, spec: dict[str, Any]) -> None:
        operation = await self.command("POST", "/v1/vms", {"request_id": self.number("c"), "vm": spec})
        assert operation.state.value == "done", operation.sentence

    async def remove(self, name: str) -> None:
        await self.hand(name).close()
        self._hands.pop(name)
        request_id = self.number("d")
        status, answer = await self.send("DELETE", f"/v1/vms/{name}?request_id={request_id}")
        assert status == 202, answer
        assert (await self.ended(request_id)).state.value == "done"

    # --- waiting -------------------------------------------------------------------------------------------------

    async def until(self, what: str, condition: Any, limit_s: float = 60.0) -> None:
        """Look again and again until a condition (a function or a coroutine function) is true.

        :raises AssertionError: it did not become true in time.
        """
        try:
            async with asyncio.timeout(limit_s):
                while True:
                    answer = condition()
                    if await answer if asyncio.iscoroutine(answer) else answer:
                        return
                    await asyncio.sleep(LOOK_S)
        except TimeoutError:
            raise AssertionError(f"not within {limit_s:g} s: {what}") from None

    async def connected(self, *names: str) -> None:
        """Until the guests have their memory and answer: one whose agent was replaced is greeted only when asked."""
        for name in names or tuple(self.host.vms):
            vm = self.host.vm(name)

            async def answers(vm: ManagedVM = vm) -> bool:
                ready = vm.link.connected and not vm.boots_small
                return ready and await executor.guest_status(vm.link, brief=True) is not None

            await self.until(f"{name} answers", answers, 240.0)

    async def settled(self, limit_s: float = 60.0) -> None:
        """Until nothing is under way with any VM."""
        await self.until(
            "all VMs settled", lambda: all(vm.intent.phase is Phase.SETTLED for vm in self.host.vms.values()), limit_s
        )

    async def until_falling(self) -> None:
        """Until a deflation has reached the guest's memory."""
        full = self.before.vms[LOW].held.memory_mib

        async def falls() -> bool:
            return (await asyncio.to_thread(self._held_mib, LOW))[0] < full - 1

        await self.until("memory is on its way out", falls)

    # --- guests --------------------------------------------------------------------------------------------------

    def hand(self, name: str = LOW) -> GuestHand:
        if name not in self._hands:
            xml = self.with_domain(lambda domain: domain.XMLDesc(), name)
            self._hands[name] = GuestHand(channel_path(xml))
        return self._hands[name]

    def forget_hand(self, name: str) -> None:
        """The domain has been started anew: its channels are others."""
        self._hands.pop(name, None)

    async def rebooted(self, boot_id: str, name: str = LOW) -> None:
        """Until a guest runs again after this boot, agents and all."""
        hand = self.hand(name)

        async def another() -> bool:
            await hand.close()
            return await hand.boot_id() != boot_id

        await self.until(f"{name} boots again", another, 240.0)
        await self.connected(name)

    def with_domain(self, function: Any, name: str = LOW) -> Any:
        """Do something with a libvirt domain, past the agent. Blocks for as long as libvirt does."""
        connection = open_libvirt(URI)
        try:
            return function(connection.lookupByName(self.domain(name)))
        finally:
            connection.close()

    async def foreign(self, function: Any, name: str = LOW) -> Any:
        """Somebody else's hand on a domain."""
        return await asyncio.to_thread(self.with_domain, function, name)

    def _held_mib(self, name: str) -> tuple[float, float]:
        """Memory of the bound and what is still asked for, MiB."""

        def read(domain: Any) -> tuple[float, float]:
            xml = domain.XMLDesc()
            view, requested = DomainView.parse(xml), float(xml.partition("<requested unit='KiB'>")[2].partition("<")[0])
            held = domain.memoryStats()["actual"] + view.current_kib
            return held / 1024, abs(view.current_kib - requested) / 1024

        held_mib, pending_mib = self.with_domain(read, name)
        return held_mib, pending_mib

    async def seen(self, name: str) -> Seen:
        """One VM by readings of libvirt, cgroup files and the guest's own kernel."""
        hand = self.hand(name)
        online = await hand.online()
        held_mib, pending_mib = await asyncio.to_thread(self._held_mib, name)
        process = qemu_pid(self.domain(name))
        quotas = vcpu_quotas(process)
        limits = [1.0 if (quota := quotas[cpu]) is None else min(quota, 1.0) for cpu in online]
        if (cap := domain_cap(process)) is not None:
            limits = [min(sum(limits), cap / (1 + EMULATOR_SHARE))]
        cores = round(min(float(len(online)), sum(limits)), 4)
        return Seen(
            status=self.host.vm(name).status(),
            held=ResourceVector(cpu_cores=cores, memory_mib=held_mib),
            process=process,
            pending_mib=pending_mib,
            available_mib=await hand.available_mib(),
            oom_kills=await hand.oom_kills(),
            boot_id=await hand.boot_id(),
        )

    async def cores_used(self, window_s: float, name: str = LOW) -> float:
        """CPU time of a domain's process, its emulator's threads included, by the host's clock."""

        def used_s() -> float:
            times = psutil.Process(qemu_pid(self.domain(name))).cpu_times()
            return float(times.user + times.system)

        # What was used between both readings was used within this time, however long a busy machine takes to read.
        began = time.monotonic()
        before = await asyncio.to_thread(used_s)
        await asyncio.sleep(window_s)
        after = await asyncio.to_thread(used_s)
        return round((after - before) / (time.monotonic() - began), 3)

    async def picture(self) -> Picture:
        return Picture(CAPACITY, {name: await self.seen(name) for name in self.host.vms})

    async def hold(self, **allowed: Any) -> Picture:
        """Take a picture and hold all rules against it (see `tests.faults.invariants.broken`)."""
        await self.settled()
        for name in self.host.vms:
            await self.until(f"{name}'s metadata say what the agent thinks", lambda name=name: self._stored(name), 30.0)
            # What libvirt was not there to call off, the guest may still carry out; the reconciler follows.
            await self.until(f"{name} is asked for nothing more", lambda name=name: self._unasked(name), 30.0)
        picture = await self.picture()
        _none(broken(self.before, picture, **allowed))
        return picture

    async def _unasked(self, name: str) -> bool:
        return (await asyncio.to_thread(self._held_mib, name))[1] <= SLACK.memory_mib

    async def _stored(self, name: str) -> bool:
        """Whether a successor of the agent would find what this one thinks."""
        element = libvirt.VIR_DOMAIN_METADATA_ELEMENT
        text = await self.foreign(lambda domain: domain.metadata(element, intents.NAMESPACE), name)
        return intents.from_element(text) == self.host.vm(name).intent

    # --- before and after every test -----------------------------------------------------------------------------

    async def begin(self) -> None:
        for vm in self.host.vms.values():
            # An application that refused an earlier test would not be asked in this one.
            vm.resizer._refusal = None
        # Nor would one be deflated that still suffers from an earlier test.
        await self.until(
            "the guests are at rest", lambda: all(vm.status().pressure is None for vm in self.host.vms.values()), 120.0
        )
        # A guest of a busy machine is slow to take what it was given.
        await self.until("all VMs have what they were sold", self._is_nominal, 120.0)

    async def _is_nominal(self) -> bool:
        self.before = await self.picture()
        return not not_nominal(self.before)

    async def recover(self) -> None:
        """Everything is given back, and nothing has been broken on the way.

        :raises AssertionError: it is not; then the VM is replaced, so that the next test finds a sound one.
        """
        try:
            await self.connected()
            for _ in range(3):
                await self.settled()
                operation = await self.reinflate()
                picture = await self.picture()
                if not not_nominal(picture):
                    break
            _none(not_nominal(picture), operation.sentence)
            _none([f"{name} is asked for more" for name, seen in picture.vms.items() if seen.pending_mib > 2])
            assert picture.vms[HIGH].process == self.before.vms[HIGH].process
        except BaseException:
            await self.replace()
            raise

    async def replace(self) -> None:
        """A new deflatable VM instead of one that a fault has ruined."""
        for name, spec in ((LOW, LOW_VM), (HIGH, HIGH_VM)):
            if name in self.host.vms:
                if name == HIGH:
                    continue
                await self.remove(name)
            await self.create(spec)
        await self.connected()

    def clear_away(self, services: LabState) -> None:
        """Nothing is left of the domains, also where libvirtd has ended, which is told."""

        def told(sentence: str) -> None:
            warnings.warn(sentence, stacklevel=2)

        def revive() -> None:
            ensure_services(services, self._directory, lambda: None, told)

        try:
            if not LIBVIRTD.answers():
                told("libvirtd does not answer at the end of the tests")
                revive()
            remove_domains(URI, [self.host_id], print, revive)
        finally:
            remove_logs([self.host_id])


def domain_cap(pid: int) -> float | None:
    """Cores of the group that the groups of a domain's vCPUs are in; None: it has no cap."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    vcpu = next(thread for thread in threads if readings._VCPU_THREAD.match((thread / "comm").read_text()))
    around = re.sub(r"/[^/\n]*$", "", (vcpu / "cgroup").read_text(), flags=re.MULTILINE)
    return readings._quota(around, readings._cpu_mounts(Path("/proc/self/mountinfo").read_text()))


def _none(problems: list[str], why: str = "") -> None:
    """:raises AssertionError: there are problems; it names them."""
    if problems:
        raise AssertionError("; ".join(problems) + (f" ({why})" if why else ""))


def _directory() -> Path:
    """Not pytest's: the user under which libvirt runs QEMU must be able to pass through."""
    directory = Path(tempfile.mkdtemp(prefix="ebbtide-faults-", dir="/var/tmp"))
    directory.chmod(0o711)
    return directory


@contextlib.asynccontextmanager
async def open_ward(services: LabState) -> AsyncIterator[Ward]:
    """A ward with both guests up.

    :param services: what was started for libvirt to answer; what has to be started again is added to it.
    """
    image = await asyncio.to_thread(build_image, paths.image_cache())
    found = await asyncio.to_thread(probe_accelerator, image.kernel, None, paths.accelerator_cache())
    directory = await asyncio.to_thread(_directory)
    ward = Ward(directory, image, found.kind)
    try:
        with pytest.MonkeyPatch.context() as patch:
            # Looks and retries come more often: the tests wait for them.
            patch.setattr(reconciler, "SURVEY_S", 0.5)
            patch.setattr(reconciler, "CHECK_S", 1.5)
            patch.setattr(reconciler, "OWNERS_S", 2.0)
            patch.setattr(guest_link, "RETRY_S", 0.5)
            # Emulated guests on a busy machine are slow to give memory: that is none of the faults.
            patch.setattr(settling, "STALLED_S", 12.0)
            await ward.start_agent()
            try:
                await asyncio.gather(ward.create(LOW_VM), ward.create(HIGH_VM))
                await ward.connected()
                yield ward
            finally:
                async with contextlib.AsyncExitStack() as stack:
                    stack.push_async_callback(ward.stop_agent)
                    for hand in ward._hands.values():
                        stack.push_async_callback(hand.close)
    finally:
        try:
            await asyncio.to_thread(ward.clear_away, services)
        finally:
            shutil.rmtree(directory, ignore_errors=True)
