"""Makes the root file system of lab guests: Debian 12 by debootstrap, and the Debian cloud kernel beside it."""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ebbtide.lab.errors import ImageError, MissingTool

SUITE = "bookworm"
ARCHITECTURE = "amd64"
PACKAGES = ("kmod", "memcached", "openjdk-17-jre-headless", "python3", "qemu-guest-agent")
KERNEL_METAPACKAGE = "linux-image-cloud-amd64"
DEFAULT_MIRROR = "https://deb.debian.org/debian"
MIRROR_VARIABLE = "EBB_DEBIAN_MIRROR"
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
# In the order in which they are loaded; what they depend on is put before them.
MODULES = (
    "virtio_pci",
    "virtio_blk",
    "virtio_console",
    "virtio_balloon",
    "virtio_mem",
    "virtio_net",
    "evdev",
    "button",
)
# Nothing of this is used in a guest without people; leaving it out more than halves the image.
UNUSED = (
    "boot",
    "usr/share/doc",
    "usr/share/info",
    "usr/share/locale",
    "usr/share/man",
    "usr/share/zoneinfo",
    "var/cache/apt",
    "var/lib/apt/lists",
    "var/log",
)
_ENVIRONMENT = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8", "DEBIAN_FRONTEND": "noninteractive"}
#: No TMPDIR: within a root file system there is no such directory, and scripts of packages would fail for it.
_PASSED_ON = ("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")


@dataclass(frozen=True)
class Kernel:
    """The kernel of a root file system: its image, and the modules in the order in which to load them."""

    version: str
    image: Path
    modules: tuple[Path, ...]


def tool(name: str, package: str) -> str:
    """Path of a program. Raises MissingTool with the package to install."""
    path = shutil.which(name, path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")
    if path is None:
        raise MissingTool(name, package)
    return path


def run(argv: Sequence[str | Path]) -> str:
    """Run a program to its end and return what it printed. Raises ImageError with the end of its output."""
    environment = _ENVIRONMENT | {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
    done = subprocess.run(
        [str(word) for word in argv],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment,
        check=False,
        text=True,
        errors="replace",
    )
    if done.returncode != 0:
        tail = " / ".join(done.stdout.strip().splitlines()[-3:])
        raise ImageError(f"{shlex.join(str(word) for word in argv[:4])} ended with {done.returncode}: {tail}")
    return done.stdout


def debian_mirror(environment: Mapping[str, str] = os.environ) -> str:
    """EBB_DEBIAN_MIRROR, else the mirror of this Debian host, else the one that Debian recommends to all."""
    if environment.get(MIRROR_VARIABLE):
        return environment[MIRROR_VARIABLE].rstrip("/")
    apt_get = shutil.which("apt-get")
    if apt_get is None:
        return DEFAULT_MIRROR
    targets = subprocess.run(
        [apt_get, "indextargets", "--format", "$(ORIGIN)|$(CODENAME)|$(COMPONENT)|$(REPO_URI)"],
        capture_output=True,
        text=True,
        check=False,
    )
    for line in targets.stdout.splitlines():
        origin, codename, component, uri = (line.split("|") + [""] * 4)[:4]
        # `bookworm-security` and the like are other archives, or not complete ones.
        if origin == "Debian" and component == "main" and "-" not in codename and uri.startswith(("http:", "https:")):
            return uri.rstrip("/")
    return DEFAULT_MIRROR


def make_rootfs(tree: Path, mirror: str, report: Callable[[str, float], None]) -> None:
    """Fill the directory `tree` with a slim Debian and, under `ebbtide/`, the kernel with the modules a guest needs.

    `report` gets (stage, fraction of this function's work). Needs root and the network. Raises ImageError.
    """
    debootstrap = tool("debootstrap", "debootstrap")
    dpkg_deb = tool("dpkg-deb", "dpkg")
    unshare = tool("unshare", "util-linux")
    if not KEYRING.exists():
        raise MissingTool(str(KEYRING), "debian-archive-keyring")
    report("debootstrap", 0.0)
    include = ",".join(PACKAGES)
    options = ["--variant=minbase", f"--arch={ARCHITECTURE}", f"--keyring={KEYRING}", f"--include={include}"]
    # In a mount namespace of its own: whatever debootstrap mounts is gone with it, even when it is killed.
    run([unshare, "--mount", "--propagation", "private", debootstrap, *options, SUITE, tree, mirror])
    report("kernel", 0.8)
    package = _download_kernel(tree)
    kernel_tree = tree / "ebbtide-kernel"
    run([dpkg_deb, "-x", package, kernel_tree])
    package.unlink()
    report("slim", 0.95)
    _keep_kernel(tree, kernel_tree)
    shutil.rmtree(kernel_tree)
    for unused in UNUSED:
        shutil.rmtree(tree / unused, ignore_errors=True)
        (tree / unused).mkdir(parents=True)
    # Root has no password and cannot log in; there is no getty either.
    run(["chroot", tree, "passwd", "--lock", "root"])
    for leftover in ("etc/resolv.conf", "etc/hostname", "etc/machine-id"):
        (tree / leftover).unlink(missing_ok=True)


def kernel_of(tree: Path) -> Kernel:
    """The kernel that make_rootfs put into the tree."""
    home = tree / "ebbtide"
    order = (home / "order").read_text().split()
    return Kernel((home / "version").read_text().strip(), home / "vmlinuz", tuple(home / name for name in order))


def _download_kernel(tree: Path) -> Path:
    """Fetch the package of the newest cloud kernel that the rootfs's own apt knows, and hold it to its hash.

    The metapackage is only resolved: installing it would pull in initramfs-tools. The lists of apt are those that
    debootstrap verified, so the hash carries Debian's signature.
    """
    meta = _control(tree, KERNEL_METAPACKAGE)
    name = meta["Depends"].split()[0]
    package = _control(tree, name)
    mirror = (tree / "etc/apt/sources.list").read_text().split()[1].rstrip("/")
    url = f"{mirror}/{package['Filename']}"
    path = tree / "ebbtide-kernel.deb"
    digest = hashlib.sha256()
    try:
        with urllib.request.urlopen(url, timeout=60) as answer, path.open("wb") as target:
            while block := answer.read(1 << 20):
                digest.update(block)
                target.write(block)
    except (urllib.error.URLError, OSError) as error:
        raise ImageError(f"cannot fetch {url}: {error}") from error
    if digest.hexdigest() != package["SHA256"]:
        raise ImageError(f"{url} does not have the SHA-256 that Debian's index gives for it")
    return path


def _control(tree: Path, package: str) -> dict[str, str]:
    """The control fields of the newest version of a package, by the rootfs's apt (the host may be another release)."""
    text = run(["chroot", tree, "apt-cache", "--no-all-versions", "show", package])
    fields = (line.split(": ", 1) for line in text.splitlines() if ": " in line and not line.startswith(" "))
    return dict(fields)


def _keep_kernel(tree: Path, kernel_tree: Path) -> None:
    """Keep the kernel image and the needed modules under `ebbtide/`; the other 100 MiB of modules go."""
    modules_tree = next((kernel_tree / "lib/modules").iterdir())
    version = modules_tree.name
    run(["chroot", tree, "depmod", "-b", "/" + kernel_tree.name, version])
    home = tree / "ebbtide"
    home.mkdir()
    shutil.copy(kernel_tree / "boot" / f"vmlinuz-{version}", home / "vmlinuz")
    order = load_order((modules_tree / "modules.dep").read_text(), (modules_tree / "modules.builtin").read_text())
    for path in order:
        shutil.copy(modules_tree / path, home / Path(path).name)
    (home / "order").write_text("".join(f"{Path(path).name}\n" for path in order))
    (home / "version").write_text(version + "\n")


def load_order(dependencies: str, builtin: str, wanted: Sequence[str] = MODULES) -> list[str]:
    """Module files in an order in which each finds what it depends on already loaded.

    dependencies, builtin: the text of depmod's `modules.dep` and of the kernel's `modules.builtin`.
    Raises ImageError for a module that the kernel has neither as a file nor built in.
    """
    needs: dict[str, tuple[str, list[str]]] = {}
    for line in dependencies.splitlines():
        path, _, others = line.partition(":")
        needs[_module_name(path)] = (path, [_module_name(other) for other in others.split()])
    inside = {_module_name(path) for path in builtin.split()}
    order: list[str] = []

    def add(name: str) -> None:
        if name in inside:
            return
        if name not in needs:
            raise ImageError(f"the kernel has no module {name}")
        path, others = needs[name]
        for other in others:
            add(other)
        if path not in order:
            order.append(path)

    for name in wanted:
        add(name)
    return order


def _module_name(path: str) -> str:
    return Path(path).name.split(".")[0].replace("-", "_")
