"""Builds the disk image, kernel and initial RAM disk that all lab guests share.

Two caches: the root file system, which takes debootstrap and the network, and the image, which also holds our own code
and takes seconds. Both are named by the hash of their inputs. `ebb lab image build` builds them.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ebbtide.lab import rootfs
from ebbtide.lab.errors import ImageError
from ebbtide.lab.rootfs import run, tool
from ebbtide.lab.state import make_open_directory
from hostagent.mechanisms import initramfs
from hostagent.state.files import make_parents

DISK_MIB = 2048
GUEST_FILES = Path(__file__).parent / "guest"
GUEST_PACKAGES = ("guestagent", "app_adapters")
# Changed by hand when make_rootfs does something else with the same constants.
ROOTFS_RECIPE = 1
# File in ebbtide/lab/guest -> where it goes in the guest, and its permissions.
PLACES = {
    "init": ("sbin/init", 0o755),
    "shutdown": ("sbin/shutdown", 0o755),
    "power-button": ("etc/acpi/PWRF/00000080", 0o755),
    "labd.py": ("opt/ebbtide/labd.py", 0o644),
    "memcached.json": ("etc/ebbtide/adapters.d/memcached.json", 0o644),
}
_BUILDING = ".building-"


@dataclass(frozen=True)
class Image:
    """A built guest image. `built_s` is the time the build took, 0 when it was cached."""

    key: str
    base: Path
    kernel: Path
    initrd: Path
    built_s: float


def build_image(
    cache_dir: Path, progress: Callable[[str, float], None] | None = None, mirror: str | None = None
) -> Image:
    """Build the guest image, or take it from the cache.

    progress: called with (stage, fraction done of the whole). mirror: default `rootfs.debian_mirror()`.
    Needs root and, for the first build, the network. A second builder waits for the first. Raises ImageError; a failed
    build leaves nothing behind.
    """
    report = progress or (lambda stage, fraction: None)
    begin_s = time.monotonic()
    sources = _guest_sources()
    busybox = Path(tool("busybox", "busybox-static"))
    rootfs_key = _rootfs_key()
    key = _image_key(rootfs_key, sources, busybox)
    final = cache_dir / key
    if not final.exists():
        if os.geteuid() != 0:
            raise ImageError("building the guest image needs root (debootstrap, files of root in the image)")
        for name, package in (("mke2fs", "e2fsprogs"), ("qemu-img", "qemu-utils"), ("tar", "tar")):
            tool(name, package)
        make_open_directory(cache_dir)
        with _lock(cache_dir), _building(cache_dir) as work:
            if not final.exists():
                tree = _rootfs_tree(cache_dir / f"rootfs-{rootfs_key}.tar", work, mirror, report)
                _build(tree, sources, busybox, work, report)
                (work / "image").rename(final)
                report("done", 1.0)
                return _image(final, time.monotonic() - begin_s)
    report("done", 1.0)
    return _image(final, 0.0)


def _image(directory: Path, built_s: float) -> Image:
    return Image(directory.name, directory / "base.qcow2", directory / "vmlinuz", directory / "initrd", built_s)


def _guest_sources() -> dict[str, Path]:
    """Our own Python packages for the guest: path in the guest -> file. Raises ImageError when one is not there."""
    found: dict[str, Path] = {}
    for package in GUEST_PACKAGES:
        spec = importlib.util.find_spec(package)
        places = list(spec.submodule_search_locations or []) if spec else []
        if not places or not (Path(places[0]) / "__main__.py").exists():
            raise ImageError(f"the package {package}, which runs inside the guest, cannot be found or has no __main__")
        home = Path(places[0])
        for path in sorted(home.rglob("*.py")):
            found[f"opt/ebbtide/{package}/{path.relative_to(home)}"] = path
    return found


def _rootfs_key() -> str:
    # The mirror is left out: all of them carry the same packages.
    inputs = (
        ROOTFS_RECIPE,
        rootfs.SUITE,
        rootfs.ARCHITECTURE,
        rootfs.PACKAGES,
        rootfs.KERNEL_METAPACKAGE,
        rootfs.MODULES,
        rootfs.UNUSED,
    )
    return hashlib.sha256(repr(inputs).encode()).hexdigest()[:16]


def _image_key(rootfs_key: str, sources: dict[str, Path], busybox: Path) -> str:
    digest = hashlib.sha256(rootfs_key.encode())
    inputs = sources | {name: GUEST_FILES / name for name in (*PLACES, "initrd-init")}
    inputs |= {"image.py": Path(__file__), "initramfs.py": Path(initramfs.__file__), "busybox": busybox}
    for name in sorted(inputs):
        digest.update(name.encode() + b"\0" + hashlib.sha256(inputs[name].read_bytes()).digest())
    return digest.hexdigest()[:16]


def _rootfs_tree(archive: Path, work: Path, mirror: str | None, report: Callable[[str, float], None]) -> Path:
    """A fresh tree of the root file system in `work`, out of the cached archive, which is made first if need be."""
    tree = work / "tree"
    tree.mkdir()
    tree.chmod(0o755)  # whatever the umask
    if archive.exists():
        report("unpack", 0.0)
        run(["tar", "-x", "--numeric-owner", "-f", archive, "-C", tree])
        return tree
    rootfs.make_rootfs(tree, mirror or rootfs.debian_mirror(), lambda stage, done: report(stage, 0.8 * done))
    report("pack", 0.8)
    packed = work / "rootfs.tar"
    run(["tar", "-c", "--numeric-owner", "-f", packed, "-C", tree, "."])
    packed.rename(archive)
    return tree


def _build(
    tree: Path, sources: dict[str, Path], busybox: Path, work: Path, report: Callable[[str, float], None]
) -> None:
    """Fill `work/image` with the four files of an image."""
    report("guest files", 0.85)
    kernel = rootfs.kernel_of(tree)
    target = work / "image"
    target.mkdir()
    # QEMU's user reads the one, the guest's users the other; an archive of before may have a tree that they cannot.
    for directory in (target, tree):
        directory.chmod(0o755)
    _install(kernel.image, target / "vmlinuz", 0o644)
    (target / "initrd").write_bytes(_initrd(kernel, busybox))
    (target / "initrd").chmod(0o644)
    shutil.rmtree(kernel.image.parent)
    _install(busybox, tree / "bin/busybox", 0o755)
    for name, (place, mode) in PLACES.items():
        _install(GUEST_FILES / name, tree / place, mode)
    for place, path in sources.items():
        _install(path, tree / place, 0o644)
    # Compiled here, as the emulated guest would take seconds for it; never checked against the source again.
    run(["chroot", tree, "python3", "-m", "compileall", "-q", "--invalidation-mode", "unchecked-hash", "/opt/ebbtide"])
    report("disk", 0.9)
    raw = work / "disk.raw"
    ext4 = ["-q", "-t", "ext4", "-O", "^has_journal", "-m", "0", "-L", "ebbtide"]
    run([tool("mke2fs", "e2fsprogs"), *ext4, "-d", tree, raw, f"{DISK_MIB}M"])
    report("qcow2", 0.95)
    base = target / "base.qcow2"
    run([tool("qemu-img", "qemu-utils"), "convert", "-O", "qcow2", raw, base])
    base.chmod(0o644)


def _initrd(kernel: rootfs.Kernel, busybox: Path) -> bytes:
    entries = [initramfs.directory(name) for name in ("bin", "dev", "modules", "proc", "root", "sys")]
    entries.append(initramfs.file("init", (GUEST_FILES / "initrd-init").read_bytes(), 0o755))
    entries.append(initramfs.file("bin/busybox", busybox.read_bytes(), 0o755))
    entries += [initramfs.file(f"modules/{path.name}", path.read_bytes()) for path in kernel.modules]
    entries.append(initramfs.file("modules/order", "".join(f"{path.name}\n" for path in kernel.modules).encode()))
    return initramfs.archive(entries)


def _install(source: Path, target: Path, mode: int) -> None:
    make_parents(target, 0o755)
    target.unlink(missing_ok=True)
    shutil.copyfile(source, target)
    target.chmod(mode)


@contextmanager
def _lock(cache_dir: Path) -> Iterator[None]:
    with (cache_dir / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def _building(cache_dir: Path) -> Iterator[Path]:
    """A directory for an unfinished build, gone at the end however it ends. The lock must be held."""
    for stale in cache_dir.glob(f"{_BUILDING}*"):
        shutil.rmtree(stale)
    work = Path(tempfile.mkdtemp(prefix=_BUILDING, dir=cache_dir))
    try:
        yield work
    finally:
        shutil.rmtree(work)
