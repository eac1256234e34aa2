"""Probe of the accelerator: whether this host can really run guests under KVM, found by booting one.

`/dev/kvm` says nothing: on hosts whose KVM is itself virtual without hardware support it exists, opens, and hangs every
stock kernel. So a kernel is booted with a time limit, once, and the answer is remembered: that KVM works for good, that
it does not for an hour, since a busy host is slow and a module can be loaded anew.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import select
import shutil
import struct
import subprocess
import tempfile
import time
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import IO, Literal

from hostagent.mechanisms import initramfs

MARKER = "ebbtide-probe-ok"
TIME_LIMIT_S = 8.0
KVM_DEVICE = Path("/dev/kvm")
#: What distributions call it, and where: the last is that of RHEL and what is built from it.
QEMUS = ("qemu-system-x86_64", "qemu-kvm", "/usr/libexec/qemu-kvm")
#: How long it counts that no guest booted under KVM.
EMULATION_KEPT = timedelta(hours=1)
_OUTPUT_BYTES = 1 << 20


@dataclass(frozen=True)
class Accelerator:
    """What guests run under. `reason` is one sentence; `cached` tells that it was found out earlier."""

    kind: Literal["kvm", "qemu"]
    reason: str
    probed_at: datetime
    cached: bool


def probe_accelerator(
    kernel: Path | None,
    initrd: Path | None,
    cache_file: Path,
    *,
    qemu: str | None = None,
    kvm_device: Path = KVM_DEVICE,
    time_limit_s: float = TIME_LIMIT_S,
) -> Accelerator:
    """The accelerator of this host: "kvm" where a guest boots under it within time_limit_s, else "qemu" (emulation).

    kernel: a bootable Linux image; None takes the host's own. initrd: one that prints MARKER on the serial console;
    None takes a tiny one of ours. qemu: which one; None takes the host's. The answer is kept in cache_file, by the
    host's kernel and CPU and QEMU's version, "qemu" for EMULATION_KEPT; it is not kept where nothing could be booted at
    all (no QEMU, no kernel). Blocks for up to time_limit_s.
    """
    qemu_path = shutil.which(qemu) if qemu is not None else find_qemu()
    if qemu_path is None:
        return _emulation(f"{qemu or ' or '.join(QEMUS)} is not installed, so nothing could be booted under KVM")
    try:
        os.close(os.open(kvm_device, os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        return _emulation(f"{kvm_device} cannot be opened: {error.strerror}")
    key = _host_key(qemu_path)
    remembered = _remembered(cache_file, key)
    if remembered is not None:
        return remembered
    usable = kernel if kernel is not None and os.access(kernel, os.R_OK) else host_kernel()
    if usable is None:
        return _emulation("no kernel could be read to try KVM with")
    begin_s = time.monotonic()
    booted, output = boots(qemu_path, usable, initrd, "kvm", time_limit_s)
    seconds = time.monotonic() - begin_s
    if booted:
        found = _answer("kvm", f"a guest booted under KVM in {seconds:.1f} s")
    elif seconds >= time_limit_s:
        found = _emulation(f"{kvm_device} exists, but a guest under KVM did not boot within {time_limit_s:g} s")
    else:
        last_line = (output.strip().splitlines() or ["nothing was printed"])[-1]
        found = _emulation(f"{kvm_device} exists, but a guest under KVM ended without booting: {last_line[:200]}")
    return _remember(cache_file, key, found)


def boots(qemu: str, kernel: Path, initrd: Path | None, accelerator: str, time_limit_s: float) -> tuple[bool, str]:
    """Boot a kernel without disk and network; (MARKER came in time, what was printed). QEMU is gone afterwards."""
    argv = [qemu, "-machine", "q35", "-accel", accelerator, "-cpu", "host" if accelerator == "kvm" else "max"]
    argv += ["-m", "256", "-smp", "1", "-nodefaults", "-no-user-config", "-no-reboot", "-nic", "none"]
    argv += ["-display", "none", "-serial", "stdio", "-append", "console=ttyS0 quiet panic=-1"]
    with tempfile.TemporaryDirectory(prefix="ebbtide-probe-") as directory:
        disk = Path(directory) / "initrd"
        if initrd is None:
            disk.write_bytes(probe_initrd())
        argv += ["-kernel", str(kernel.resolve()), "-initrd", str(disk if initrd is None else initrd.resolve())]
        # Started in the directory that goes away, as a QEMU that aborts may leave a core file.
        process = subprocess.Popen(
            argv,
            cwd=directory,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        assert process.stdout is not None
        try:
            output = _read_until_marker(process.stdout, time.monotonic() + time_limit_s)
        finally:
            process.kill()
            process.wait()
            process.stdout.close()
    return MARKER in output, output


def _read_until_marker(stream: IO[bytes], deadline_s: float) -> str:
    output = b""
    while MARKER.encode() not in output and len(output) < _OUTPUT_BYTES:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0 or not select.select([stream], [], [], left_s)[0]:
            break
        block = os.read(stream.fileno(), 4096)
        if not block:
            break
        output += block
    return output.decode("utf-8", "replace")


def probe_initrd(stays: bool = False) -> bytes:
    """An initial RAM disk whose only program prints MARKER and reboots, which `-no-reboot` turns into QEMU's end.

    stays: waits for ever instead.
    """
    return initramfs.archive([initramfs.directory("dev"), initramfs.file("init", _probe_program(stays), 0o755)])


def _probe_program(stays: bool) -> bytes:
    """A static x86-64 ELF program: write(1, MARKER); then reboot(RESTART), or pause().

    Made here, so that no tool is needed on the host.

    Layout: System V ABI, ELF-64 object file format; call numbers and magics: Linux arch/x86/entry/syscalls, reboot(2).
    """
    base, header_bytes = 0x400000, 64 + 56
    text = f"{MARKER}\n".encode()

    def code(text_address: int) -> bytes:
        return b"".join(
            (
                b"\xb8" + struct.pack("<I", 1),  # mov eax, 1 (write)
                b"\xbf" + struct.pack("<I", 1),  # mov edi, 1 (standard output: the console)
                b"\xbe" + struct.pack("<I", text_address),  # mov esi, text
                b"\xba" + struct.pack("<I", len(text)),  # mov edx, length
                b"\x0f\x05",  # syscall
                b"\xb8" + struct.pack("<I", 34 if stays else 169),  # mov eax, 34 (pause) or 169 (reboot)
                b"\xbf" + struct.pack("<I", 0xFEE1DEAD),  # mov edi, first magic
                b"\xbe" + struct.pack("<I", 0x28121969),  # mov esi, second magic
                b"\xba" + struct.pack("<I", 0x01234567),  # mov edx, RESTART
                b"\x0f\x05",  # syscall
                b"\xeb\xfe",  # loop here: PID 1 must not end
            )
        )

    entry = base + header_bytes
    body = code(entry + len(code(0))) + text
    size = header_bytes + len(body)
    identity = b"\x7fELF\x02\x01\x01" + b"\0" * 9
    elf = identity + struct.pack("<HHIQQQIHHHHHH", 2, 62, 1, entry, 64, 0, 0, 64, 56, 1, 0, 0, 0)
    segment = struct.pack("<IIQQQQQQ", 1, 5, 0, base, base, size, size, 0x1000)
    return elf + segment + body


def find_qemu(path: str | None = None) -> str | None:
    """QEMU's program, by whatever name; None: there is none.

    :param path: where programs are looked for that are named without a directory; default: as the shell does.
    """
    return next(filter(None, (shutil.which(name, path=path) for name in QEMUS)), None)


def host_kernel() -> Path | None:
    boot = Path("/boot")
    newest_first = sorted(boot.glob("vmlinuz-*"), key=lambda path: path.stat().st_mtime, reverse=True)
    # Where the boot loader has a partition of its own (systemd-boot, ostree) the kernel lies with its modules.
    own = (boot / f"vmlinuz-{platform.release()}", Path(f"/usr/lib/modules/{platform.release()}/vmlinuz"))
    candidates = [*own, *newest_first, boot / "vmlinuz"]
    return next((path for path in candidates if os.access(path, os.R_OK)), None)


def _host_key(qemu: str) -> dict[str, str]:
    """What the answer depends on: another kernel, CPU or QEMU may do what this one cannot."""
    version = subprocess.run([qemu, "--version"], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    cpu_model = ""
    with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as cpuinfo:
        for line in cpuinfo:
            if line.startswith("model name"):
                cpu_model = line.partition(":")[2].strip()
                break
    first_line = version.stdout.splitlines()[0] if version.stdout else ""
    return {"kernel": platform.release(), "cpu_model": cpu_model, "qemu": first_line}


def _remembered(cache_file: Path, key: dict[str, str]) -> Accelerator | None:
    """The answer in the file, or None where it is missing, of another host state, too old, or not to be understood."""
    try:
        stored = json.loads(cache_file.read_text(encoding="utf-8"))
        if stored["key"] != key or stored["kind"] not in ("kvm", "qemu"):
            return None
        probed_at = datetime.fromisoformat(stored["probed_at"])
        # A clock that was set back is no reason to keep it longer.
        if stored["kind"] == "qemu" and not timedelta() <= datetime.now(UTC) - probed_at < EMULATION_KEPT:
            return None
        return Accelerator(stored["kind"], str(stored["reason"]), probed_at, cached=True)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _remember(cache_file: Path, key: dict[str, str], found: Accelerator) -> Accelerator:
    """The same answer; one that cannot be written says so, and is found out again the next time."""
    stored = {"key": key, "kind": found.kind, "reason": found.reason, "probed_at": found.probed_at.isoformat()}
    unfinished = cache_file.with_name(f"{cache_file.name}.{os.getpid()}")
    try:
        cache_file.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(json.dumps(stored, indent=2) + "\n", encoding="utf-8")
        unfinished.replace(cache_file)
    except OSError as error:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        return replace(found, reason=f"{found.reason}; it cannot be remembered: {error}")
    return found


def _emulation(reason: str) -> Accelerator:
    return _answer("qemu", reason)


def _answer(kind: Literal["kvm", "qemu"], reason: str) -> Accelerator:
    return Accelerator(kind, reason, datetime.now(UTC), cached=False)
