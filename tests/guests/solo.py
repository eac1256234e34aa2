"""One guest under the real hypervisor port, without an agent, and swap of a test's own."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
import tempfile
import time
import uuid
import warnings
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ebbtide.deflation.allocations import Priority
from ebbtide.lab import paths
from ebbtide.lab.domains import LOGS, remove_domains, remove_logs
from ebbtide.lab.errors import ReadingError
from ebbtide.lab.guest_link import LabLink
from ebbtide.lab.image import build_image
from ebbtide.lab.readings import DomainView, qemu_pid, resident_kib
from ebbtide.lab.services import LIBVIRTD, ensure_services, stop_services
from ebbtide.lab.state import LabState
from ebbtide.messages.common import Vector
from ebbtide.messages.vms import VMSpec
from hostagent.libvirt.definitions import usable_boot_mib
from hostagent.libvirt.hypervisor import domain_name
from hostagent.libvirt.libvirt_hypervisor import LibvirtHypervisor
from hostagent.libvirt.settings import LibvirtSettings
from hostagent.state.intents import Intent, Phase

READY_S = 240.0
#: How long swap may take to go, seconds.
OFF_S = 30.0


@dataclass(frozen=True)
class SoloGuest:
    """A running guest: the port, the domain's name, the lab channel into it, and its process."""

    hypervisor: LibvirtHypervisor
    domain: str
    link: LabLink
    pid: int

    def alive(self) -> bool:
        """Whether the very same QEMU process runs."""
        try:
            return qemu_pid(self.domain) == self.pid
        except ReadingError:
            return False

    def how_ended(self) -> str:
        """What is left to tell of a QEMU process that is gone: the end of its log, and whom the kernel killed."""
        log = LOGS / f"{self.domain}.log"
        last = log.read_text(errors="replace").splitlines()[-3:] if log.exists() else ["it has no log"]
        kernel = subprocess.run(["dmesg"], capture_output=True, text=True, check=False).stdout.splitlines()
        killed = [line for line in kernel if "oom-kill:" in line or "Killed process" in line or "segfault" in line]
        return "\n".join([*last, *killed[-4:], f"MemAvailable {meminfo_mib('MemAvailable'):.0f} MiB"])

    def resident_mib(self) -> float:
        """Resident part of the guest's memory, by QEMU's smaps."""
        xml = subprocess.run(["virsh", "dumpxml", self.domain], capture_output=True, text=True, check=True).stdout
        return resident_kib(Path(f"/proc/{self.pid}/smaps").read_text(), DomainView.parse(xml)) / 1024

    async def run(self, *argv: str, timeout_s: float = 60) -> str:
        """Run a command in the guest.

        :raises AssertionError: it failed.
        """
        done = await self.link.call("exec", argv=list(argv), timeout_s=timeout_s, reply_timeout_s=timeout_s + 60)
        assert done["returncode"] == 0, f"{argv[0]}: {done['stderr']}"
        return str(done["stdout"])

    async def put(self, path: str, text: str) -> None:
        """Write a file in the guest."""
        code = "import sys; open(sys.argv[1], 'w').write(sys.argv[2])"
        await self.run("python3", "-S", "-c", code, path, text)


@asynccontextmanager
async def solo_guest(memory_mib: int, cpu_cores: float = 1) -> AsyncIterator[SoloGuest]:
    """Start one guest of this size; it is gone afterwards, whatever happened."""
    state, home = LabState(), Path(tempfile.mkdtemp(prefix="ebbtide-test-", dir="/var/tmp"))
    os.chmod(home, 0o711)
    host, name = f"solo-{uuid.uuid4().hex[:8]}", "guest"
    domain = domain_name(host, name)
    ensure_services(state, home, lambda: None, lambda sentence: None)
    image = await asyncio.to_thread(build_image, paths.image_cache())
    hypervisor = LibvirtHypervisor(LibvirtSettings(host, state.uri, "qemu", image.base.parent, home / "disks"))
    try:
        size = Vector(cpu_cores=cpu_cores, memory_mib=memory_mib)
        spec = VMSpec(name=name, priority=Priority.DEFLATABLE, nominal=size)
        intent = Intent(
            owner=host,
            spec=spec,
            boot_mib=usable_boot_mib(memory_mib, None),
            phase=Phase.SETTLED,
            target=size,
            committed=size,
        )
        await hypervisor.create(domain, intent)
        await hypervisor.resume(domain)
        path = await hypervisor.guest_channel(domain)
        assert path is not None
        async with await LabLink.connect(path.with_name("io.ebbtide.lab.0"), READY_S) as link:
            yield SoloGuest(hypervisor, domain, link, qemu_pid(domain))
    finally:
        async with AsyncExitStack() as stack:
            # Backwards, and each of them whatever becomes of the others.
            stack.callback(shutil.rmtree, home, ignore_errors=True)
            stack.callback(remove_logs, [host])
            stack.callback(stop_services, state, lambda sentence: None)
            stack.push_async_callback(asyncio.to_thread, _remove, state, home, host)
            stack.push_async_callback(hypervisor.close)


def _remove(state: LabState, home: Path, host: str) -> None:
    """The guest is gone, also where libvirtd has ended meanwhile, which is told."""

    def told(sentence: str) -> None:
        warnings.warn(sentence, stacklevel=2)

    def revive() -> None:
        ensure_services(state, home, lambda: None, told)

    if not LIBVIRTD.answers():
        told("libvirtd does not answer at the end of the tests")
        revive()
    remove_domains(state.uri, [host], lambda sentence: None, revive)


@contextmanager
def zram_swap(mib: int) -> Iterator[str]:
    """Swap of this size on the machine that the tests run on, in compressed memory; off and gone afterwards."""
    control = Path("/sys/class/zram-control")
    if not control.exists():
        subprocess.run(["modprobe", "zram", "num_devices=0"], check=True)
    number = (control / "hot_add").read_text().strip()
    device = f"/dev/zram{number}"
    try:
        Path(f"/sys/block/zram{number}/disksize").write_text(f"{mib}M")
        for command in ("mkswap", "swapon"):
            subprocess.run([command, device], check=True, capture_output=True)
        yield device
    finally:
        try:
            _off(device)
        finally:
            if device not in Path("/proc/swaps").read_text():
                (control / "hot_remove").write_text(number)


def _off(device: str) -> None:
    """Take swap away. While a process is held at a limit that it backs, it cannot go: its end is waited for."""
    deadline_s = time.monotonic() + OFF_S
    while device in Path("/proc/swaps").read_text():
        done = subprocess.run(["swapoff", device], capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return
        assert time.monotonic() < deadline_s, f"{device} is left behind: {done.stderr.strip()}"
        time.sleep(0.5)


def meminfo_mib(name: str) -> float:
    """One figure of the machine's /proc/meminfo."""
    match = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    assert match is not None
    return int(match[1]) / 1024


async def eventually(condition: Any, what: str, limit_s: float = 60.0) -> None:
    """Wait until an asynchronous condition holds."""
    try:
        async with asyncio.timeout(limit_s):
            while not await condition():
                await asyncio.sleep(0.2)
    except TimeoutError:
        raise AssertionError(what) from None
