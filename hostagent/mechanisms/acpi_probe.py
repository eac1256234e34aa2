"""Probe of ACPI unplug: whether vCPUs can really be unplugged on this host, found by `ebb doctor` with a guest.

libvirt and QEMU offer it everywhere. Where it does not work, a guest is left with a vCPU that neither side has, and its
next reset can crash QEMU (docs/internals/contracts.md, safety of the guest). So a guest of its own has to pass unplug,
plug and reset first. Under emulation it is never used, whatever a guest shows.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Literal
from xml.sax.saxutils import escape

import libvirt

from ebbtide.files import replacing
from hostagent.mechanisms.accelerator import MARKER, probe_initrd

NAME: Final = "ebb-probe-"
VCPUS: Final = 3
BOOT_LIMIT_S: Final = 120.0
#: For the count to follow a request; libvirt itself gives up after 5 s.
COUNT_LIMIT_S: Final = 8.0
UNTRIED: Final = "no throw-away guest has passed ACPI vCPU unplug, plug and reset on this host yet"
_LOGS: Final = Path("/var/log/libvirt/qemu")


class ProbeFailed(Exception):
    """A step that the guest did not pass, in words."""


def why_not(verdict: Path, key: dict[str, str]) -> str:
    """Why vCPUs may not be unplugged here; empty where a guest has passed on a host with this key."""
    try:
        stored = json.loads(verdict.read_text(encoding="utf-8"))
        if stored["key"] != key:
            return UNTRIED
        return "" if stored["passed"] is True else str(stored["reason"])
    except (OSError, ValueError, KeyError, TypeError):
        return UNTRIED


def remember(verdict: Path, key: dict[str, str], passed: bool, reason: str) -> None:
    """Store a verdict for this key, in one step.

    :raises OSError: it cannot be written.
    """
    stored = {"key": key, "passed": passed, "reason": reason, "probed_at": datetime.now(UTC).isoformat()}
    verdict.parent.mkdir(parents=True, exist_ok=True)
    with replacing(verdict, 0o644) as file:
        file.write(json.dumps(stored, indent=2).encode() + b"\n")


def try_unplug(
    connection: Any,
    kernel: Path,
    accelerator: Literal["kvm", "qemu"],
    report: Callable[[str], None] = lambda step: None,
) -> tuple[bool, str]:
    """Whether a throw-away guest passes unplug, plug and reset; (passed, what was seen, in one sentence).

    Blocks for some minutes at most. The domain is gone afterwards, also when this process is killed: libvirt destroys
    it with the connection. Needs root, and a libvirt on this machine.
    """
    try:
        with _guest(connection, kernel, accelerator) as guest:
            report("the throw-away guest boots")
            guest.booted(1)
            for what, count in (("unplug", VCPUS - 1), ("plug", VCPUS)):
                report(f"{what} to {count} vCPUs")
                guest.step(what, count)
            report("reset")
            guest.reset(2)
            guest.step("unplug after a reset", VCPUS - 1)
            report("reset with a vCPU unplugged")
            guest.reset(3)
            guest.step("plug after a reset", VCPUS)
    except ProbeFailed as failure:
        return False, f"a throw-away guest did not pass ACPI vCPU unplug: {failure}"
    except libvirt.libvirtError as error:
        return False, f"a throw-away guest could not be tried: {error}"
    return True, "a throw-away guest passed ACPI vCPU unplug, plug and reset"


class _Guest:
    def __init__(self, domain: Any, console: Path) -> None:
        self._domain = domain
        self._console = console

    def booted(self, times: int) -> None:
        """Wait until the guest's only program has spoken for the nth time."""

        def spoke() -> bool:
            return self._console.read_bytes().count(MARKER.encode()) >= times

        self._until(spoke, BOOT_LIMIT_S, f"boot number {times} did not come up within {BOOT_LIMIT_S:g} s")

    def reset(self, boots: int) -> None:
        self._call("reset", lambda: self._domain.reset())
        self.booted(boots)

    def step(self, what: str, count: int) -> None:
        """Go to this many vCPUs, which is one step away; the count that is read again decides, not the answer."""
        refused = ""
        try:
            self._domain.setVcpusFlags(count, libvirt.VIR_DOMAIN_AFFECT_LIVE)
        except libvirt.libvirtError as error:
            refused = f" ({error})"
        self._until(
            lambda: self._count(what) == count,
            COUNT_LIMIT_S,
            f"{what}: the count did not become {count} within {COUNT_LIMIT_S:g} s{refused}",
        )

    def _count(self, what: str) -> int:
        return int(self._call(what, lambda: self._domain.vcpusFlags(libvirt.VIR_DOMAIN_AFFECT_LIVE)))

    def _until(self, holds: Callable[[], bool], limit_s: float, otherwise: str) -> None:
        deadline_s = time.monotonic() + limit_s
        while not holds():
            if not self._alive():
                raise ProbeFailed(f"{otherwise}: QEMU ended")
            if time.monotonic() > deadline_s:
                raise ProbeFailed(otherwise)
            time.sleep(0.2)

    def _call(self, what: str, function: Callable[[], Any]) -> Any:
        try:
            return function()
        except libvirt.libvirtError as error:
            raise ProbeFailed(f"{what}: {error if self._alive() else 'QEMU ended'}") from error

    def _alive(self) -> bool:
        try:
            return bool(self._domain.isActive())
        except libvirt.libvirtError as error:
            if error.get_error_code() == libvirt.VIR_ERR_NO_DOMAIN:
                return False
            raise ProbeFailed(str(error)) from error


@contextmanager
def _guest(connection: Any, kernel: Path, accelerator: str) -> Iterator[_Guest]:
    name = NAME + secrets.token_hex(4)
    # Not below /tmp: the user under which libvirt runs QEMU has to read it.
    with tempfile.TemporaryDirectory(prefix=NAME, dir="/var/tmp") as place:
        directory = Path(place)
        directory.chmod(0o711)
        for file, data in (("initrd", probe_initrd(stays=True)), ("console.log", b"")):
            (directory / file).write_bytes(data)
        shutil.copyfile(kernel, directory / "vmlinuz")
        domain = connection.createXML(_domain_xml(name, directory, accelerator), libvirt.VIR_DOMAIN_START_AUTODESTROY)
        try:
            yield _Guest(domain, directory / "console.log")
        finally:
            with contextlib.suppress(libvirt.libvirtError):  # QEMU may have crashed: then it is gone already
                domain.destroy()
            with contextlib.suppress(OSError):
                (_LOGS / f"{name}.log").unlink()


def _domain_xml(name: str, directory: Path, accelerator: str) -> str:
    vcpus = "".join(f"<vcpu id='{cpu}' enabled='yes' hotpluggable='{'yes' if cpu else 'no'}'/>" for cpu in range(VCPUS))
    place = escape(str(directory))
    mode = "host-passthrough" if accelerator == "kvm" else "maximum"
    return f"""<domain type='{accelerator}'>
  <name>{name}</name>
  <memory unit='MiB'>256</memory>
  <vcpu placement='static' current='{VCPUS}'>{VCPUS}</vcpu>
  <vcpus>{vcpus}</vcpus>
  <os>
    <type arch='x86_64' machine='q35'>hvm</type>
    <kernel>{place}/vmlinuz</kernel>
    <initrd>{place}/initrd</initrd>
    <cmdline>console=ttyS0 quiet panic=-1 no_timer_check</cmdline>
  </os>
  <features><acpi/><apic/></features>
  <cpu mode='{mode}'/>
  <on_poweroff>destroy</on_poweroff>
  <on_reboot>restart</on_reboot>
  <on_crash>destroy</on_crash>
  <devices>
    <controller type='usb' model='none'/>
    <memballoon model='none'/>
    <serial type='file'>
      <source path='{place}/console.log' append='on'/>
      <target port='0'/>
    </serial>
  </devices>
</domain>"""
