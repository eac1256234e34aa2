"""Pressure and requests of a real guest: its kernel stalls for memory, and the host hears of it at once."""

from __future__ import annotations

import asyncio
import tempfile
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from ebbtide.deflation.allocations import Allocation, Priority
from ebbtide.deflation.cascade.pressure import PressureWatch, Verdict
from ebbtide.deflation.resources import ResourceVector
from ebbtide.lab import paths
from ebbtide.lab.guest_link import LabLink, channel_path
from ebbtide.lab.image import build_image
from ebbtide.lab.services import ensure_services, open_libvirt, stop_services
from ebbtide.lab.state import LabState
from ebbtide.messages.guest import GuestStatus, Hello, Notice, PressureNotice, RequestNotice
from hostagent.domain_xml.templates import DomainParameters, DomainTemplate, render_domain
from hostagent.errors import GuestUnreachable
from hostagent.libvirt.disks import create_overlay
from hostagent.vm.guest_link import GuestLink

pytestmark = [pytest.mark.guest, pytest.mark.timeout(600)]
READY_S = 240.0
AGENT_CHANNEL = "io.ebbtide.guest.0"

#: Reads a mapped file around and around in a control group that may hold a fraction of it, which makes faults, and in
#: another one asks for more memory than it may have, which makes it wait. Such groups are slowed down and never killed
#: (Linux: cgroup-v2, memory.high), and the rest of the guest goes on: one that thrashes as a whole may take minutes to
#: say so.
HOG = """
import mmap, os, random, time
open("/sys/fs/cgroup/cgroup.subtree_control", "w").write("+memory")
def enter(name, high_mib):
    group = "/sys/fs/cgroup/" + name
    os.makedirs(group, exist_ok=True)
    open(group + "/memory.high", "w").write(str(high_mib << 20))
    open(group + "/cgroup.procs", "w").write(str(os.getpid()))
end = time.monotonic() + 20
if os.fork() == 0:
    enter("waits", 8)
    held = []
    while time.monotonic() < end and len(held) < 64:
        held.append(b"x" * (1 << 20))
    os._exit(0)
file = open("/var/hog", "wb+")
os.unlink("/var/hog")
for _ in range(112):
    file.write(bytes(1 << 20))
file.flush()
os.fsync(file.fileno())
os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
enter("reads", 24)
pages = mmap.mmap(file.fileno(), 0)
pages.madvise(mmap.MADV_RANDOM)
while time.monotonic() < end:
    pages[random.randrange(len(pages))]
"""


@pytest.fixture(scope="module")
def domain() -> Iterator[Any]:
    """A guest of 2 vCPUs and 512 MiB, which the tests share."""
    image = build_image(paths.image_cache())
    with tempfile.TemporaryDirectory(prefix="ebbtide-test-", dir="/var/tmp") as directory:
        home = Path(directory)
        home.chmod(0o755)  # QEMU's user is to enter
        state = LabState()
        ensure_services(state, home, lambda: None, lambda sentence: None)
        connection = open_libvirt(state.uri)
        parameters = DomainParameters(
            name=f"ebbtide-test-{uuid.uuid4().hex[:8]}",
            uuid=str(uuid.uuid4()),
            cpu_cores=2,
            memory_mib=512,
            accelerator="qemu",
            kernel=image.kernel,
            initrd=image.initrd,
            disk=create_overlay(image.base, home / "guest"),
            console=home / "console.log",
            metadata="<e:intent xmlns:e='urn:ebbtide:test'>none</e:intent>",
        )
        found = connection.defineXML(render_domain(DomainTemplate.load("lab"), parameters))
        try:
            found.create()
            yield found
        finally:
            if found.isActive():
                found.destroy()
            found.undefine()
            connection.close()
            stop_services(state, lambda sentence: None)


class Watched:
    """A guest with the link of a host agent, and the watch that is fed from it."""

    def __init__(self, channel: Path, lab: LabLink) -> None:
        self._channel = channel
        self._lab = lab
        self.hellos: list[Hello] = []
        self.stalls: list[PressureNotice] = []
        self.requests: list[RequestNotice] = []
        self.watch = PressureWatch()
        self.link = GuestLink("low-1", self._find, self.hellos.append, on_notice=self._noted)
        #: Deflated by half.
        self.allocation = Allocation(
            "low-1",
            Priority.DEFLATABLE,
            nominal=ResourceVector(2, 1024),
            minimum=ResourceVector(1, 256),
            current=ResourceVector(2, 512),
        )

    async def _find(self) -> Path:
        return self._channel

    def _noted(self, notice: Notice) -> None:
        if isinstance(notice, PressureNotice):
            self.stalls.append(notice)
            self.watch.observe(asyncio.get_running_loop().time(), notice.pressure_reading())
        else:
            self.requests.append(notice)

    def verdict(self) -> Verdict:
        return self.watch.verdict(asyncio.get_running_loop().time(), self.allocation)

    def is_calm(self) -> bool:
        verdict = self.verdict()
        return verdict.known and not verdict.under_pressure

    async def look(self) -> None:
        """A regular look, as the host agent takes it; a guest in trouble may be late."""
        try:
            status = await self.link.call("status", {"brief": True}, GuestStatus, 15.0)
        except GuestUnreachable:
            return
        self.watch.observe(asyncio.get_running_loop().time(), status.pressure_reading())

    async def until(self, holds: Callable[[], bool], what: str) -> None:
        """Look every second until it holds."""
        deadline_s = asyncio.get_running_loop().time() + READY_S
        while True:
            await self.look()
            if holds():
                return
            if asyncio.get_running_loop().time() > deadline_s:
                said = await self.shell("cat /var/hog.log")
                pytest.fail(f"{what}: {self.verdict().sentence}; the hog said {said!r}")
            await asyncio.sleep(1.0)

    async def shell(self, command: str) -> str:
        done = await self._lab.call("exec", argv=["sh", "-c", command], timeout_s=60)
        return str(done["stdout"] + done["stderr"]).strip()


@asynccontextmanager
async def watched(domain: Any) -> AsyncIterator[Watched]:
    xml = domain.XMLDesc()
    async with await LabLink.connect(channel_path(xml), READY_S) as lab:
        made = Watched(channel_path(xml, AGENT_CHANNEL), lab)
        task = asyncio.create_task(made.link.run())
        try:
            await made.until(lambda: made.link.connected and made.is_calm(), "the guest is not calm")
            yield made
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def test_a_guest_that_stalls_for_memory_is_heard_and_calms_down(domain: Any) -> None:
    async with watched(domain) as guest:
        await guest.shell(f"cat >/var/hog.py <<'END'\n{HOG}\nEND")
        await guest.shell("python3 /var/hog.py </dev/null >/var/hog.log 2>&1 &")
        await guest.until(lambda: guest.verdict().under_pressure, "no pressure was seen")
        verdict = guest.verdict()
        assert verdict.wants == ResourceVector(memory_mib=512)
        assert verdict.sentence.startswith("under memory pressure: ")
        await guest.until(lambda: bool(guest.stalls), "the guest said nothing by itself")
        told = guest.stalls[-1]
        assert told.pressure is not None
        assert told.pressure.memory_some_total_us
        await guest.until(lambda: not guest.verdict().under_pressure, "the pressure did not end")
        assert guest.is_calm()


async def test_a_request_made_in_the_guest_arrives(domain: Any) -> None:
    async with watched(domain) as guest:
        said = await guest.shell("python3 -m guestagent request --memory-mib 64 --reason 'a batch job starts'")
        assert said == "the host was asked; it decides"
        await guest.until(lambda: bool(guest.requests), "the request did not arrive")
        assert guest.requests == [RequestNotice(memory_mib=64, reason="a batch job starts")]
        said = await guest.shell("python3 -m guestagent request --memory-mib 0")
        assert said == "ebb-guestagent: memory_mib: or cpu_cores must be more than 0"
        assert await guest.shell("stat -c '%a %U %G %F' /run/ebbtide/request.sock") == "660 root root socket"


async def test_a_brief_look_leaves_out_what_is_dear(domain: Any) -> None:
    async with watched(domain) as guest:
        brief = await guest.link.call("status", {"brief": True}, GuestStatus, 20.0)
        assert (brief.cpus.unpluggable, brief.applications) == ([], [])
        full = await guest.link.call("status", {}, GuestStatus, 20.0)
        while not full.applications:  # the adapter is busy, or still starts
            full = await guest.link.call("status", {}, GuestStatus, 20.0)
        assert full.cpus.unpluggable == [1]
        assert [application.name for application in full.applications] == ["memcached"]
        assert (brief.cpus.online, brief.boot_id) == (full.cpus.online, full.boot_id)
        assert brief.major_faults
        assert full.major_faults is not None
        assert full.major_faults >= brief.major_faults
