"""Real Debian guests of libvirt, emulated: overlays of `debian_image`, reached by a root shell of systemd's.

    image = build_debian(["qemu-guest-agent"])
    with running_debian(connection, image, folder, "web", channels=["org.qemu.guest_agent.0"]) as guest:
        guest.run("systemctl is-system-running --wait")

The shell is systemd's own debug shell on the second serial port, asked for on the kernel's command line: no file of
ours, no agent and no network is needed in the guest.
"""

from __future__ import annotations

import base64
import contextlib
import re
import secrets
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hostagent.libvirt.disks import create_overlay
from tests.debian_image import DebianImage

BOOT_S = 300.0
#: How often a domain is told to go.
REMOVALS = 10
KERNEL_ARGUMENTS = "root=/dev/vda rw console=ttyS0 no_timer_check net.ifnames=0 systemd.debug_shell=ttyS1"
#: What fits into a guest's buffer while its shell still works on the line before.
MOST_BYTES = 32768


class ShellError(AssertionError):
    """A command in a guest failed or did not end; the text has what it said."""


class RootShell:
    """Root's shell in a guest, a command at a time."""

    def __init__(self, path: Path) -> None:
        """Connect to the port's Unix socket; the shell answers soon after the kernel, so it is awaited at first use."""
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(str(path))
        self._text = ""
        self._answers = False

    def await_answer(self, limit_s: float = BOOT_S) -> None:
        """:raises ShellError: there is no shell within limit_s."""
        deadline_s, nonce = time.monotonic() + limit_s, secrets.token_hex(6)
        while not self._answers:
            if time.monotonic() > deadline_s:
                raise ShellError(f"no shell within {limit_s:g} s; last was {self._text[-500:]!r}")
            # Without echo and prompts; a line that came while nobody read it is sent again. An answer that comes late,
            # on a busy machine, is one, too.
            self._socket.sendall(f"\nexport PS1= HOME=/root LC_ALL=C.UTF-8; stty raw -echo; echo {nonce}-$$\n".encode())
            with contextlib.suppress(TimeoutError):
                self._until(re.compile(nonce + r"-\d+"), 5)
                self._answers = True

    def run(self, script: str, code: int | None = 0, limit_s: float = 120) -> str:
        """What a script of bash says, on both outputs.

        :param code: how it is to end; None: in any way.
        :raises ShellError: it ended in another way, or not within limit_s.
        """
        found, said = self.status(script, limit_s)
        if code is not None and found != code:
            raise ShellError(f"{script}\nended with {found}, not {code}:\n{said[-4000:]}")
        return said

    def status(self, script: str, limit_s: float = 120) -> tuple[int, str]:
        """How a script ended, and what it said."""
        self.await_answer()
        nonce, lines = secrets.token_hex(6), base64.b64encode(script.encode()).decode()
        if len(lines) > MOST_BYTES:
            raise ValueError(f"a script of {len(script)} bytes is too long: put it on a disk")
        out = f"/run/said-{nonce}"
        self._socket.sendall(
            f"echo {lines} | base64 -d >{out}.sh; bash {out}.sh </dev/null >{out} 2>&1; echo {nonce}=$?="
            f"$(base64 -w0 {out})=; rm {out} {out}.sh\n".encode()
        )
        try:
            # Base64 fills itself up with the sign that ends it.
            found = self._until(re.compile(nonce + r"=(\d+)=([A-Za-z0-9+/]*=*)=\r?\n"), limit_s)
        except TimeoutError:
            raise ShellError(f"{script}\ndid not end within {limit_s:g} s") from None
        return int(found[1]), base64.b64decode(found[2]).decode(errors="replace")

    def close(self) -> None:
        self._socket.close()

    def _until(self, pattern: re.Pattern[str], limit_s: float) -> re.Match[str]:
        deadline_s = time.monotonic() + limit_s
        while (found := pattern.search(self._text)) is None:
            self._socket.settimeout(max(0.001, deadline_s - time.monotonic()))
            block = self._socket.recv(65536)
            if not block:
                raise ShellError("the guest is gone")
            self._text += block.decode("latin-1")
        self._text = self._text[found.end() :]
        return found


@dataclass(frozen=True)
class DebianGuest:
    """A running guest: its domain in libvirt, and a shell in it."""

    domain: Any
    shell: RootShell
    #: What its kernel and systemd said.
    console: Path

    def run(self, script: str, code: int | None = 0, limit_s: float = 120) -> str:
        return self.shell.run(script, code, limit_s)

    def eventually(self, script: str, pattern: str, limit_s: float = 120) -> str:
        """What a script says, once that matches.

        :raises ShellError: it does not within limit_s.
        """
        deadline_s = time.monotonic() + limit_s
        while True:
            said = self.run(script, code=None, limit_s=limit_s)
            if re.search(pattern, said):
                return said
            if time.monotonic() > deadline_s:
                raise ShellError(f"{script}\ndoes not say {pattern!r} within {limit_s:g} s, but\n{said[-4000:]}")
            time.sleep(1)


#: An off-line CPU that waits in MWAIT is a busy loop; with five levels of page tables Linux 6.1 says `xxx` for any path
#: under emulation, and systemd mounts nothing.
CPU = "<cpu mode='maximum'>{}</cpu>".format(
    "".join(f"<feature policy='disable' name='{name}'/>" for name in ("monitor", "svm", "la57"))
)


def debian_xml(
    image: DebianImage,
    folder: Path,
    name: str,
    vcpus: int = 2,
    memory_mib: int = 1024,
    channels: Sequence[str] = (),
    disks: Sequence[Path] = (),
    devices: str = "",
    kernel_arguments: str = "",
    cache_mib: int = 64,
) -> str:
    """The domain's definition; its files lie in a folder that QEMU's user may enter.

    :param channels: names of virtio-serial channels.
    :param disks: raw images for more disks, read-only, /dev/vdb and so on: cloud-init's seed, packages.
    :param devices: more elements of libvirt, for example an interface.
    :param cache_mib: for translated code; it grows up to that (docs/internals/host-memory.md).
    """
    more = "".join(
        f"<disk type='file' device='disk'><driver name='qemu' type='raw'/><source file='{path}'/>"
        f"<target dev='vd{chr(ord('b') + i)}' bus='virtio'/><readonly/></disk>"
        for i, path in enumerate(disks)
    ) + "".join(f"<channel type='unix'><target type='virtio' name='{channel}'/></channel>" for channel in channels)
    return f"""<domain type='qemu'>
  <name>{name}</name>
  <memory unit='MiB'>{memory_mib}</memory>
  <vcpu>{vcpus}</vcpu>
  <os>
    <type arch='x86_64' machine='q35'>hvm</type>
    <kernel>{image.kernel}</kernel>
    <initrd>{image.initrd}</initrd>
    <cmdline>{KERNEL_ARGUMENTS} {kernel_arguments}</cmdline>
  </os>
  <features><acpi/><apic/><tcg><tb-cache unit='MiB'>{cache_mib}</tb-cache></tcg></features>
  {CPU}
  <clock offset='utc'/>
  <on_poweroff>destroy</on_poweroff>
  <on_crash>destroy</on_crash>
  <devices>
    <disk type='file' device='disk'>
      <driver name='qemu' type='qcow2' discard='unmap'/>
      <source file='{create_overlay(image.base, folder / name)}'/>
      <target dev='vda' bus='virtio'/>
    </disk>
    <controller type='usb' model='none'/>
    <serial type='file'><source path='{folder / name / "console.log"}'/><target port='0'/></serial>
    <serial type='unix'><source mode='bind' path='{folder / name / "shell"}'/><target port='1'/></serial>
    <memballoon model='virtio' freePageReporting='on'/>
    <rng model='virtio'><backend model='random'>/dev/urandom</backend></rng>
    {more}{devices}
  </devices>
</domain>"""


@contextmanager
def running_debian(
    connection: Any, image: DebianImage, folder: Path, name: str, **options: Any
) -> Iterator[DebianGuest]:
    """A guest that is booting; gone afterwards, its disk is left in the folder.

    :param connection: of libvirt-python; the guest is persistent there, as a user's.
    :param options: of `debian_xml`.
    """
    domain = connection.defineXML(debian_xml(image, folder, name, **options))
    try:
        domain.create()
        shell = RootShell(folder / name / "shell")
        try:
            yield DebianGuest(domain, shell, folder / name / "console.log")
        finally:
            shell.close()
    finally:
        _remove(domain)


def _remove(domain: Any) -> None:
    """Until it is gone: on a busy machine libvirt gives up on a process that takes long to end."""
    import libvirt

    for left in range(REMOVALS - 1, -1, -1):
        try:
            if domain.isActive():
                domain.destroy()
            domain.undefine()
            return
        except libvirt.libvirtError as error:
            if error.get_error_code() == libvirt.VIR_ERR_NO_DOMAIN:
                return
            if not left:
                raise
            time.sleep(1)
