"""Disk image of a real Debian 12 with systemd, built from Debian's packages: nothing of ours is in it.

`build_debian(["qemu-guest-agent"])` needs root and, the first time, the network; it lies in the cache afterwards.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ebbtide.lab import paths
from ebbtide.lab.rootfs import ARCHITECTURE, KERNEL_METAPACKAGE, KEYRING, SUITE, debian_mirror, run

#: What every guest has: an init, device names, Debian's cloud kernel with an initial RAM disk.
BASE = (
    "busybox",
    "ca-certificates",
    "dbus",
    "iproute2",
    "kmod",
    "procps",
    "systemd",
    "systemd-sysv",
    "udev",
    KERNEL_METAPACKAGE,
)
#: Changed by hand when the same packages give another image.
RECIPE = 1
DISK_GIB = 8
APT = ("apt-get", "-q", "-y", "--no-install-recommends")


@dataclass(frozen=True)
class DebianImage:
    """A disk to make overlays of, with its kernel and initial RAM disk."""

    base: Path
    kernel: Path
    initrd: Path


def build_debian(packages: Sequence[str] = ()) -> DebianImage:
    """Build the image, or take it from the cache. A second builder waits for the first; one that fails leaves nothing.

    :raises ImageError: a program failed, with the end of what it said.
    """
    names = sorted({*BASE, *packages})
    key = hashlib.sha256(repr((RECIPE, SUITE, DISK_GIB, names)).encode()).hexdigest()[:16]
    cache = paths.cache_dir() / "debian"
    final = cache / key
    cache.mkdir(mode=0o755, parents=True, exist_ok=True)
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not final.exists():
            with tempfile.TemporaryDirectory(prefix=".building-", dir=cache) as work:
                _build(Path(work) / "tree", Path(work) / "image", names)
                (Path(work) / "image").rename(final)
    return DebianImage(final / "base.qcow2", final / "vmlinuz", final / "initrd")


def _build(tree: Path, target: Path, packages: Sequence[str]) -> None:
    target.mkdir(mode=0o755)
    private = ("unshare", "--mount", "--propagation", "private")
    bootstrap = ("debootstrap", "--variant=minbase", f"--arch={ARCHITECTURE}", f"--keyring={KEYRING}")
    run([*private, *bootstrap, SUITE, tree, debian_mirror()])
    for name in ("resolv.conf", "hosts"):
        shutil.copyfile(Path("/etc") / name, tree / "etc" / name)
    policy = tree / "usr/sbin/policy-rc.d"
    policy.write_text("#!/bin/sh\nexit 101\n")
    policy.chmod(0o755)
    space = (*private, "--pid", "--fork", "--kill-child", f"--mount-proc={tree}/proc", "chroot", tree)
    run([*space, *APT, "install", *packages])
    run([*space, "apt-get", "clean"])
    policy.unlink()
    (tree / "etc/resolv.conf").unlink()
    (tree / "etc/hosts").write_text("127.0.0.1 localhost\n")
    (tree / "etc/hostname").write_text("debian\n")
    (tree / "etc/machine-id").write_text("")  # each guest makes one of its own
    for kind, name in (("vmlinuz-*", "vmlinuz"), ("initrd.img-*", "initrd")):
        (found,) = (tree / "boot").glob(kind)
        shutil.copyfile(found, target / name)
        (target / name).chmod(0o644)
    raw = target.with_name("disk.raw")
    run(["mke2fs", "-q", "-t", "ext4", "-m", "0", "-L", "root", "-d", tree, raw, f"{DISK_GIB}G"])
    run(["qemu-img", "convert", "-O", "qcow2", raw, target / "base.qcow2"])
    os.chmod(target / "base.qcow2", 0o644)
