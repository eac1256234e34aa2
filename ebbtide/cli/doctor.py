"""`ebb doctor`: what this machine has, what is missing, and what installs it. Changes nothing but a cache."""

from __future__ import annotations

import contextlib
import datetime
import grp
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

from cluster_manager.options import ManagerOptions
from cluster_manager.privileges import SERVICE_USER
from ebbtide.cli.doctor_certificates import certificates
from ebbtide.cli.findings import Finding
from ebbtide.extras import installing
from ebbtide.lab import kvm_device, paths, services
from ebbtide.lab.errors import LabError
from hostagent.limits.cgroups import cgroup_layout, kernel_lacks_quotas, own_mountinfo
from hostagent.mechanisms.accelerator import QEMUS, find_qemu, probe_accelerator
from hostagent.options import HostAgentOptions, is_unnamed

SEARCH_PATH = services.SEARCH_PATH
#: Programs, the Debian packages that hold them, and what needs them; a lab needs what a host needs, too.
PROGRAMS = {
    "qemu-system-x86_64": ("qemu-system-x86", "host"),
    "qemu-img": ("qemu-utils", "host"),
    "libvirtd": ("libvirt-daemon-system", "host"),
    "virtlogd": ("libvirt-daemon-system", "host"),
    "debootstrap": ("debootstrap", "lab"),
    "busybox": ("busybox-static", "lab"),
    "mke2fs": ("e2fsprogs", "lab"),
    "dpkg-deb": ("dpkg", "lab"),
    "unshare": ("util-linux", "lab"),
}
#: libvirt's modular daemon, where it has taken libvirtd's place, and QEMU by its other names.
INSTEAD = {"libvirtd": ("virtqemud",), "qemu-system-x86_64": QEMUS}
#: Where the daemons of a machine keep what they know: agent, disks, enrolment, manager.
DAEMONS = Path("/var/lib/ebbtide")
#: Files that are for their owner only.
PRIVATE = ("*.sqlite*", "*token*", "*.key", "state.json", "core-changes.jsonl", "disk.qcow2")
#: Of those beside the manager's options the manager's group reads some.
SECRETS = ("*token*", "*.key", "*.secret")
#: What a lab with the demo's three guests takes of the machine at the most, MiB: they are all on its larger host, whose
#: capacity holds them and what QEMU needs besides; the rest is for the daemons.
MEMORY_MIB = 4096
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
        by = "what installs it stands beside it; in a checkout `scripts/install-deps.sh` installs all of it on Debian"
        said = [f"{missing} missing; {by}"] if missing else []
        said += [f"{one.name}: {one.detail}; to renew it: {one.fix}" for one in wrong if one.ended]
        return "; ".join(said)

    def as_dict(self) -> dict[str, Any]:
        return {"ok": self.ok} | self.facts | {"findings": [finding.model_dump() for finding in self.findings]}


def examine(
    report: Callable[[str], None] = lambda sentence: None,
    manager: Path = ManagerOptions.file,
    agent: Path = HostAgentOptions.file,
) -> Diagnosis:
    """Look at everything. Boots a tiny kernel once, for at most some seconds, unless the outcome is remembered.

    :param manager: the manager's file of options, where there is one; ``agent``: that of the host agent.
    """
    facts: dict[str, Any] = {}
    machine, purposes = _machine(manager, agent)
    host, lab = "host" in purposes, "lab" in purposes
    findings = [machine, _user(), _python(), *_programs(purposes)]
    findings.append(_bindings(facts, needed=host))
    findings.append(_libvirt(facts, lab=lab))
    findings.append(_qemu(facts, needed=host))
    findings.append(_image(facts))
    report("probing the accelerator")
    findings.append(_accelerator(facts))
    findings.append(_kvm_device())
    findings.append(_cgroups(facts, needed=host))
    findings.append(_swap(facts))
    findings.append(_private(DAEMONS, paths.state_dir()))
    with contextlib.suppress(KeyError):  # there is no such group: the manager's service is not here
        findings.append(_secrets(manager.parent, grp.getgrnam(SERVICE_USER).gr_gid))
    findings.extend(certificates(datetime.datetime.now(datetime.UTC), facts, manager, agent))
    findings.extend(_room(facts, lab=lab))
    return Diagnosis(findings, facts)


def _machine(manager: Path, agent: Path) -> tuple[Finding, frozenset[str]]:
    """What this machine is by the files of options on it, and so what it has to have of PROGRAMS.

    The package brings both files, that of the host agent without the host's id.
    """
    if agent.exists() and not is_unnamed(agent):
        said, purposes = f"a host, by {agent}", frozenset({"host"})
    elif agent.exists() or manager.exists():
        said, purposes = f"no host: {agent} names none", frozenset[str]()
    else:
        said, purposes = f"no daemon has options in {agent.parent}: a machine for labs", frozenset({"host", "lab"})
    return Finding(name="machine", ok=True, needed=False, detail=said), purposes


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


def _programs(purposes: frozenset[str]) -> list[Finding]:
    findings = []
    for program, (package, purpose) in PROGRAMS.items():
        names = (program, *INSTEAD.get(program, ()))
        path = next(filter(None, (shutil.which(name, path=SEARCH_PATH) for name in names)), None)
        findings.append(
            Finding(
                name=program,
                ok=path is not None,
                needed=purpose in purposes,
                detail=path or f"not installed; a {purpose} needs it",
                fix=None if path else _installing(package),
            )
        )
    return findings


def _installing(packages: str) -> str:
    """How Debian's packages are installed, or what else is to be."""
    if shutil.which("apt-get", path=SEARCH_PATH):
        return f"apt-get install {packages}"
    return f"install what Debian's {packages} {'have' if ' ' in packages else 'has'}"


def _bindings(facts: dict[str, Any], *, needed: bool) -> Finding:
    found = importlib.util.find_spec("libvirt") is not None
    version = importlib.metadata.version("libvirt-python") if found else None
    facts["libvirt_python"] = version
    return Finding(
        name="libvirt-python",
        ok=found,
        needed=needed,
        detail=version or "not installed",
        fix=None if found else f"{_installing('libvirt-dev pkg-config gcc python3-dev')}; then {installing('host')}",
    )


def _libvirt(facts: dict[str, Any], *, lab: bool) -> Finding:
    running = services.LIBVIRTD.answers()
    version = None
    start = "`ebb lab up` starts it" if lab else f"systemctl start {services.libvirts_unit(SEARCH_PATH)}"
    detail = f"not running; {start}"
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


def _qemu(facts: dict[str, Any], *, needed: bool) -> Finding:
    version = _version_of([find_qemu(SEARCH_PATH) or QEMUS[0], "--version"])
    facts["qemu"] = version
    return Finding(name="qemu", ok=version is not None, needed=needed, detail=version or "not installed")


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


def _cgroups(facts: dict[str, Any], *, needed: bool) -> Finding:
    layout = cgroup_layout(Path("/proc/mounts").read_text())
    facts["cgroups"] = layout
    lacks = kernel_lacks_quotas(own_mountinfo()) if layout != "none" else "no cgroup file system is mounted"
    detail = f"{lacks}, so no CPU can be throttled" if lacks else layout
    return Finding(name="cgroups", ok=not lacks, needed=needed, detail=detail)


def _private(*directories: Path) -> Finding:
    """Whether other users can read stores, tokens, keys, journals and disks."""
    apart = [one for one in directories if not any(other in one.parents for other in directories)]
    open_to_others, looked_at = [], 0
    for path in {path for directory in apart for pattern in PRIVATE for path in directory.rglob(pattern)}:
        with contextlib.suppress(OSError):
            found = path.lstat()
            looked_at += 1
            if stat.S_ISREG(found.st_mode) and found.st_mode & 0o077:
                open_to_others.append(path)
    if not open_to_others:
        below = " and ".join(map(str, apart))
        return Finding(name="private files", ok=True, needed=False, detail=f"{looked_at} below {below}")
    words = shlex.join(str(path) for path in sorted(open_to_others)[:20])
    detail = f"{len(open_to_others)} can be read by other users, like {min(open_to_others)}"
    return Finding(name="private files", ok=False, needed=False, detail=detail, fix=f"chmod go= {words}")


def _secrets(directory: Path, group: int) -> Finding:
    """Whether a group can read the manager's secrets that is neither root's nor this one, the service's: a copy from
    another machine has groups by their numbers there.
    """
    strange, found = [], 0
    for path in {path for pattern in SECRETS for path in directory.rglob(pattern)}:
        with contextlib.suppress(OSError):
            at = path.lstat()
            found += stat.S_ISREG(at.st_mode)
            if stat.S_ISREG(at.st_mode) and at.st_mode & 0o070 and at.st_gid not in (0, group):
                strange.append(path)
    if not strange:
        return Finding(name="secrets", ok=True, needed=False, detail=f"{found} below {directory}")
    words = shlex.join(str(path) for path in sorted(strange)[:20])
    detail = f"{len(strange)} can be read by a group that is not the manager's, like {min(strange)}"
    return Finding(name="secrets", ok=False, needed=False, detail=detail, fix=f"chgrp {SERVICE_USER} {words}")


def _swap(facts: dict[str, Any]) -> Finding:
    total_mib = psutil.swap_memory().total // 2**20
    facts["swap_mib"] = total_mib
    detail = f"{total_mib} MiB" if total_mib else "none, so no memory limit can be backed by it: balloon only"
    return Finding(name="swap", ok=total_mib > 0, needed=False, detail=detail)


def _room(facts: dict[str, Any], *, lab: bool) -> list[Finding]:
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
            needed=lab,
            detail=f"{free_mib} MiB free at {place}; a lab takes about {DISK_MIB} MiB",
        ),
    ]
