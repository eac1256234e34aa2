"""`ebb doctor`: what this machine has, what is missing, and what installs it. Changes nothing but a cache."""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import importlib.util
import os
import platform
import shlex
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from ebbtide.cli.doctor_certificates import certificates
from ebbtide.cli.findings import Finding
from ebbtide.lab import kvm_device, paths, services
from ebbtide.lab.errors import LabError
from hostagent.limits.cgroups import cgroup_layout
from hostagent.mechanisms.accelerator import probe_accelerator

SEARCH_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
#: Programs that a lab needs, and the Debian packages that hold them.
PROGRAMS = {
    "qemu-system-x86_64": "qemu-system-x86",
    "qemu-img": "qemu-utils",
    "libvirtd": "libvirt-daemon-system",
    "virtlogd": "libvirt-daemon-system",
    "debootstrap": "debootstrap",
    "busybox": "busybox-static",
    "mke2fs": "e2fsprogs",
    "dpkg-deb": "dpkg",
    "unshare": "util-linux",
}
#: Files that are for their owner only.
PRIVATE = ("*.sqlite*", "*token*", "*.key", "state.json", "core-changes.jsonl", "disk.qcow2")
#: A lab with the demo's three guests needs about this much of the host, MiB.
MEMORY_MIB = 6000
DISK_MIB = 3000


@dataclass(frozen=True)
class Diagnosis:
    """All findings. ``facts``: the figures behind them, as data."""

    findings: list[Finding]
    facts: dict[str, Any]

    @property
    def ok(self) -> bool:
        """Whether all that is needed is there."""
        return all(finding.ok for finding in self.findings if finding.needed)

    @property
    def problem(self) -> str:
        """What keeps it from being so, in a sentence; empty where nothing does."""
        wrong = [finding for finding in self.findings if finding.needed and not finding.ok]
        missing = ", ".join(finding.name for finding in wrong if not finding.ended)
        said = [f"{missing} missing; `scripts/install-deps.sh` installs all of it on Debian"] if missing else []
        said += [f"{one.name}: {one.detail}; to renew it: {one.fix}" for one in wrong if one.ended]
        return "; ".join(said)

    def as_dict(self) -> dict[str, Any]:
        return {"ok": self.ok} | self.facts | {"findings": [finding.model_dump() for finding in self.findings]}


def examine(report: Callable[[str], None] = lambda sentence: None) -> Diagnosis:
    """Look at everything. Boots a tiny kernel once, for at most some seconds, unless the outcome is remembered."""
    facts: dict[str, Any] = {}
    findings = [_user(), _python(), *_programs()]
    findings.append(_bindings(facts))
    findings.append(_libvirt(facts))
    findings.append(_qemu(facts))
    findings.append(_image(facts))
    report("probing the accelerator")
    findings.append(_accelerator(facts))
    findings.append(_kvm_device())
    findings.append(_cgroups(facts))
    findings.append(_swap(facts))
    findings.append(_private(paths.state_dir()))
    findings.extend(certificates(datetime.datetime.now(datetime.UTC), facts))
    findings.extend(_room(facts))
    return Diagnosis(findings, facts)


def _user() -> Finding:
    root = os.geteuid() == 0
    return Finding(
        name="user",
        ok=root,
        needed=False,
        detail="root" if root else f"uid {os.geteuid()}; the lab, the demo and the guest image need root",
        fix=None if root else "sudo ebb ...",
    )


def _python() -> Finding:
    version = platform.python_version()
    return Finding(name="python", ok=sys.version_info >= (3, 11), needed=True, detail=f"{version} at {sys.executable}")


def _programs() -> list[Finding]:
    findings = []
    for program, package in PROGRAMS.items():
        path = shutil.which(program, path=SEARCH_PATH)
        findings.append(
            Finding(
                name=program,
                ok=path is not None,
                needed=True,
                detail=path or "not installed",
                fix=None if path else f"apt-get install {package}",
            )
        )
    return findings


def _bindings(facts: dict[str, Any]) -> Finding:
    found = importlib.util.find_spec("libvirt") is not None
    version = importlib.metadata.version("libvirt-python") if found else None
    facts["libvirt_python"] = version
    return Finding(
        name="libvirt-python",
        ok=found,
        needed=True,
        detail=version or "not installed",
        fix=None if found else "apt-get install libvirt-dev pkg-config gcc python3-dev && pip install libvirt-python",
    )


def _libvirt(facts: dict[str, Any]) -> Finding:
    running = services.LIBVIRTD.answers()
    version, detail = None, "not running; `ebb lab up` starts it"
    if running:
        try:
            connection = services.open_libvirt("qemu:///system")
        except LabError as error:
            detail = str(error)
        else:
            version = version_text(connection.getLibVersion())
            detail = f"{version}, answers at qemu:///system"
            connection.close()
    facts["libvirt"] = {"running": running, "version": version or _version_of(["libvirtd", "--version"])}
    if not running and facts["libvirt"]["version"]:
        detail = f"{facts['libvirt']['version']}, {detail}"
    return Finding(name="libvirt", ok=version is not None, needed=False, detail=detail)


def version_text(number: int) -> str:
    """libvirt's version number as it is written: 9000000 is 9.0.0."""
    return f"{number // 1_000_000}.{number // 1000 % 1000}.{number % 1000}"


def _qemu(facts: dict[str, Any]) -> Finding:
    version = _version_of(["qemu-system-x86_64", "--version"])
    facts["qemu"] = version
    return Finding(name="qemu", ok=version is not None, needed=True, detail=version or "not installed")


def _version_of(argv: list[str]) -> str | None:
    program = shutil.which(argv[0], path=SEARCH_PATH)
    if program is None:
        return None
    try:
        done = subprocess.run([program, *argv[1:]], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    words = (done.stdout.splitlines() or [""])[0].split()
    return next((word for word in words if word[:1].isdigit()), None)


def _image(facts: dict[str, Any]) -> Finding:
    cache = paths.image_cache()
    images = _images(cache)
    facts["image"] = {"cache": str(cache), "cached": [path.name for path in images]}
    detail = f"{len(images)} in {cache}" if images else f"none in {cache}; `ebb lab up` builds one"
    return Finding(
        name="guest image", ok=bool(images), needed=False, detail=detail, fix=None if images else "ebb lab image build"
    )


def _images(cache: Path) -> list[Path]:
    """Directories of built images, the newest first."""
    try:
        found = [path.parent for path in cache.glob("*/base.qcow2")]
    except OSError:
        return []
    return sorted(found, key=lambda path: path.stat().st_mtime, reverse=True)


def _accelerator(facts: dict[str, Any]) -> Finding:
    images = _images(paths.image_cache())
    kernel = images[0] / "vmlinuz" if images else None
    try:
        found = probe_accelerator(kernel, None, paths.accelerator_cache())
    except OSError as error:
        facts["accelerator"] = None
        return Finding(name="accelerator", ok=False, needed=False, detail=f"could not be probed: {error}")
    facts["accelerator"] = {"kind": found.kind, "reason": found.reason, "cached": found.cached}
    words = "KVM" if found.kind == "kvm" else "emulation"
    return Finding(name="accelerator", ok=True, needed=False, detail=f"{words}: {found.reason}")


def _kvm_device() -> Finding:
    device = kvm_device.KVM
    closed = kvm_device.closed_to_guests(device)
    detail = "open to libvirt's QEMU user" if device.exists() else "not there"
    if closed:
        detail = "closed to libvirt's QEMU user, so libvirt probes QEMU again at every start; `ebb lab up` opens it"
    return Finding(
        name=str(device),
        ok=not closed,
        needed=False,
        detail=detail,
        fix=f"chgrp {kvm_device.GROUP} {device} && chmod {kvm_device.MODE:o} {device}" if closed else None,
    )


def _cgroups(facts: dict[str, Any]) -> Finding:
    layout = cgroup_layout(Path("/proc/mounts").read_text())
    facts["cgroups"] = layout
    return Finding(
        name="cgroups",
        ok=layout != "none",
        needed=True,
        detail=layout if layout != "none" else "no cgroup file system is mounted, so no CPU can be throttled",
    )


def _private(directory: Path) -> Finding:
    """Whether other users can read stores, tokens, keys, journals and disks."""
    open_to_others, looked_at = [], 0
    for pattern in PRIVATE:
        for path in directory.rglob(pattern):
            with contextlib.suppress(OSError):
                found = path.lstat()
                looked_at += 1
                if stat.S_ISREG(found.st_mode) and found.st_mode & 0o077:
                    open_to_others.append(path)
    if not open_to_others:
        return Finding(name="private files", ok=True, needed=False, detail=f"{looked_at} below {directory}")
    words = shlex.join(str(path) for path in sorted(open_to_others)[:20])
    detail = f"{len(open_to_others)} can be read by other users, like {min(open_to_others)}"
    return Finding(name="private files", ok=False, needed=False, detail=detail, fix=f"chmod go= {words}")


def _swap(facts: dict[str, Any]) -> Finding:
    total_mib = psutil.swap_memory().total // 2**20
    facts["swap_mib"] = total_mib
    detail = f"{total_mib} MiB" if total_mib else "none, so no memory limit can be backed by it: balloon only"
    return Finding(name="swap", ok=total_mib > 0, needed=False, detail=detail)


def _room(facts: dict[str, Any]) -> list[Finding]:
    cpus, available_mib = psutil.cpu_count() or 1, psutil.virtual_memory().available // 2**20
    place = paths.state_dir()
    while not place.exists():
        place = place.parent
    free_mib = shutil.disk_usage(place).free // 2**20
    facts["host"] = {"cpus": cpus, "memory_available_mib": available_mib, "disk_free_mib": free_mib}
    return [
        Finding(
            name="memory",
            ok=available_mib >= MEMORY_MIB,
            needed=False,
            detail=f"{available_mib} MiB available, {cpus} CPUs; the demo takes about {MEMORY_MIB} MiB",
        ),
        Finding(
            name="disk",
            ok=free_mib >= DISK_MIB,
            needed=True,
            detail=f"{free_mib} MiB free at {place}; a lab takes about {DISK_MIB} MiB",
        ),
    ]
