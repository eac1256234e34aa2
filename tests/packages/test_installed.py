"""`apt install ./ebbtide_*.deb` in a Debian 12 that has nothing else: it runs, and goes without a trace."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ebbtide.lab.cluster import free_ports
from ebbtide.lab.rootfs import debian_mirror
from guestagent import __version__

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.package, pytest.mark.timeout(1500)]
ENVIRON = ["PATH=/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL=C.UTF-8", "DEBIAN_FRONTEND=noninteractive"]
APT = ("apt-get", "-q", "-y", "--no-install-recommends")


class Debian:
    """A root file system whose commands run in name spaces of their own."""

    def __init__(self, tree: Path) -> None:
        self.tree = tree

    def command(self, *words: str) -> list[str]:
        space = ["unshare", "--mount", "--pid", "--fork", "--kill-child", f"--mount-proc={self.tree}/proc"]
        return [*space, "chroot", str(self.tree), "env", "-i", *ENVIRON, *words]

    def run(self, *words: str, code: int = 0) -> str:
        done = subprocess.run(
            self.command(*words), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert done.returncode == code, done.stdout[-4000:]
        return done.stdout

    def __truediv__(self, path: str) -> Path:
        return self.tree / path.lstrip("/")


@pytest.fixture(scope="module")
def debian(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Debian]:
    folder = tmp_path_factory.mktemp("debian")
    subprocess.run(["bash", ROOT / "scripts/packages.sh", sys.executable, folder / "dist"], check=True)
    tree = folder / "tree"
    bootstrap = ["debootstrap", "--variant=minbase", "bookworm", str(tree), debian_mirror()]
    subprocess.run(
        ["unshare", "--mount", "--propagation", "private", *bootstrap], check=True, stdout=subprocess.DEVNULL
    )
    for name in ("resolv.conf", "hosts"):
        (tree / "etc" / name).write_bytes((Path("/etc") / name).read_bytes())
    # Nothing is started by the packages that apt brings along.
    (tree / "usr/sbin/policy-rc.d").write_text("#!/bin/sh\nexit 101\n")
    (tree / "usr/sbin/policy-rc.d").chmod(0o755)
    for path in (folder / "dist").glob("*.deb"):
        shutil.copy(path, tree / "root")
    found = Debian(tree)
    packages = sorted(f"/root/{path.name}" for path in (tree / "root").glob("*.deb"))
    found.run(*APT, "install", *packages)
    yield found
    shutil.rmtree(tree)


def test_its_programs_run_and_nothing_in_it_is_other_than_it_was_packed(debian: Debian) -> None:
    assert debian.run("ebb", "--version") == f"ebb {__version__}\n"
    for program in ("ebb-manager", "ebb-hostagent", "ebb-guestagent"):
        assert debian.run(program, "--version") == f"{__version__}\n"
    assert "usage: " in debian.run("ebb-adapter", "--help")
    imports = "import libvirt, psutil, psycopg, cryptography, distributed; print(libvirt.getVersion() >= 9_000_000)"
    assert debian.run("/usr/lib/ebbtide/bin/python3", "-I", "-c", imports) == "True\n"
    assert debian.run("dpkg", "--verify", "ebbtide", "ebbtide-guest") == ""
    # Compiled, as the manager's user could not.
    assert list((debian / "/usr/lib/ebbtide/lib/python3.11/site-packages/cluster_manager/__pycache__").glob("*.pyc"))
    named = debian.run("grep", "-rlF", str(ROOT), "/usr/lib/ebbtide", code=1)
    assert named == ""


BACKUP = """
import asyncio, time
from pathlib import Path
from cluster_manager.store.backup import back_up
from cluster_manager.store.store import Store

async def main():
    store = Store(Path("/root/made.sqlite"), time.time)
    await store.open()
    back_up(Path("/root/made.sqlite"), Path("/root/backup"))
    await store.close()

Path("/root/backup").touch(0o600)
asyncio.run(main())
"""


def restored_without_a_start(debian: Debian) -> None:
    """A store of a backup, on a machine where no manager has run and no systemd has made its directory."""
    debian.run("/usr/lib/ebbtide/bin/python3", "-I", "-c", BACKUP)
    assert "restored /root/backup" in debian.run("ebb-manager", "restore", "/root/backup")
    assert debian.run("stat", "-c", "%a %U %G", "/var/lib/ebbtide/manager") == "700 ebbtide ebbtide\n"
    assert debian.run("stat", "-c", "%a %U", "/var/lib/ebbtide/manager/manager.sqlite") == "600 ebbtide\n"


def test_the_manager_serves_with_the_options_and_the_secrets_that_are_there(debian: Debian) -> None:
    for secret in ("token", "hosts.key"):
        assert debian.run("stat", "-c", "%a %U %G", f"/etc/ebbtide/{secret}") == "640 root ebbtide\n"
    assert "can start with it" in debian.run("ebb", "config", "check", "/etc/ebbtide/manager.toml")
    address = f"127.0.0.1:{free_ports(1)[0]}"
    restored_without_a_start(debian)
    command = debian.command(
        "setpriv", "--pdeathsig=KILL", "--reuid=ebbtide", "--regid=ebbtide", "--clear-groups", "ebb-manager"
    )
    manager = subprocess.Popen([*command, "--listen", address], stderr=subprocess.PIPE, text=True)
    try:
        ask = debian.command(
            "ebb", "health", "--ready", "--manager", f"http://{address}", "--token-file", "/etc/ebbtide/token"
        )
        for _ in range(50):
            asked = subprocess.run(ask, capture_output=True, text=True)
            if asked.returncode == 0:
                break
            time.sleep(0.5)
        assert asked.returncode == 0, asked.stderr
    finally:
        manager.kill()
        manager.communicate()
    assert (debian / "/var/lib/ebbtide/manager/manager.sqlite").exists()


def test_a_host_that_nobody_has_named_is_told_by_file_and_key(debian: Debian) -> None:
    said = debian.run("ebb-hostagent", code=2)
    assert re.match(r"ebb-hostagent: /etc/ebbtide/hostagent.toml:\d+: id: this is no name", said)


def test_it_goes_when_no_vm_is_deflated_any_more_and_purged_it_leaves_the_disks_of_vms(debian: Debian) -> None:
    options = debian / "/etc/ebbtide/hostagent.toml"
    options.write_text(options.read_text().replace('id = "..."', 'id = "host-a"'))
    token = debian / "/etc/ebbtide/command-token"
    token.write_text("a-word\n")
    token.chmod(0o600)
    disk = debian / "/var/lib/ebbtide/disks/web/disk.qcow2"
    disk.parent.mkdir(parents=True)
    disk.touch()
    state = debian / "/var/lib/ebbtide/agent/state.json"
    state.parent.mkdir(parents=True)
    state.write_text('{"epoch": 0, "sequence": 0}')
    lab = debian / "/var/lib/ebbtide/lab/lab.json"
    lab.parent.mkdir()
    lab.write_text("no lab's")
    said = debian.run(*APT, "remove", "ebbtide", code=100)
    assert "is not the state of a lab" in said
    assert "a lab is up still, so the package stays" in said
    lab.write_text("{}")
    # There is no libvirt here to ask.
    said = debian.run(*APT, "remove", "ebbtide", code=100)
    assert "the lab is down" in said
    assert not lab.parent.exists()
    assert "VMs of this host are deflated still, so the package stays" in said
    assert debian.run("ebb", "--version") == f"ebb {__version__}\n"
    debian.run("env", "EBB_LEAVE_LIMITS=1", *APT, "remove", "ebbtide")
    assert not (debian / "/usr/lib/ebbtide").exists()
    assert 'id = "host-a"' in options.read_text()
    debian.run(*APT, "purge", "ebbtide", "ebbtide-guest")
    token.unlink()
    left = [path for path in (debian / "/etc/ebbtide", debian / "/usr/lib/ebbtide-guest") if path.exists()]
    assert not left or [list(path.rglob("*")) for path in left] == [[]]
    assert sorted(path.name for path in (debian / "/var/lib/ebbtide").iterdir()) == ["disks"]
    assert disk.exists()


EXAMPLE, OPTIONS = "usr/share/ebbtide/hostagent.toml", "etc/ebbtide/hostagent.toml"


def packed_as(tree: Path, version: str) -> str:
    """What is below a tree, as a package of this version beside it; returns its path there."""
    control = tree / "DEBIAN/control"
    control.write_text(re.sub(r"^Version: .*$", f"Version: {version}", control.read_text(), flags=re.MULTILINE))
    made = tree.with_name(f"{version}.deb")
    subprocess.run(["dpkg-deb", "-Znone", "--build", tree, made], check=True, stdout=subprocess.DEVNULL)
    return f"/root/{made.name}"


@pytest.fixture(scope="module")
def versions(debian: Debian) -> dict[str, tuple[str, str]]:
    """Versions and paths: two that have the agent's options as a file that dpkg asks about, this one, the next."""
    (this,) = (debian / "/root").glob("ebbtide_*.deb")
    number = this.name.split("_")[1]
    tree = debian / "/root/tree"
    subprocess.run(["dpkg-deb", "--raw-extract", this, tree], check=True)
    # Nothing of it runs here, and it is all but a few MiB.
    shutil.rmtree(tree / "usr/lib/ebbtide/lib")
    made = {"this": (number, f"/root/{this.name}")}
    (tree / EXAMPLE).write_text("# another example\n")
    made["next"] = (f"{number}+1", packed_as(tree, f"{number}+1"))
    (tree / EXAMPLE).rename(tree / OPTIONS)
    with (tree / "DEBIAN/conffiles").open("a") as asked:
        asked.write(f"/{OPTIONS}\n")
    for name, version in (("before", f"{number}~1"), ("stuck", f"{number}~2")):
        (tree / OPTIONS).write_text(f"# the example of {version}\n")
        made[name] = (version, packed_as(tree, version))
    return made


@pytest.mark.parametrize("stuck", [False, True], ids=["at once", "after one that had asked"])
def test_an_upgrade_asks_nothing_about_the_options_of_a_host_that_has_joined_and_keeps_each_byte(
    debian: Debian, versions: dict[str, tuple[str, str]], stuck: bool
) -> None:
    debian.run(*APT, "install", versions["before"][1])
    options = debian / OPTIONS
    joined = b'# Written by `ebb-hostagent join`\nid = "host-b"\ntemplates = ["/etc/ebbtide/templates"]\n'
    options.write_bytes(joined)
    options.chmod(0o600)
    if stuck:
        said = debian.run(*APT, "install", versions["stuck"][1], code=100)
        assert "end of file on stdin at conffile prompt" in said
    for version, package in (versions["this"], versions["next"]):
        debian.run(*APT, "install", package)
        state = debian.run("dpkg-query", "--show", "--showformat=${Status} ${Version}", "ebbtide")
        assert state == f"install ok installed {version}"
        assert (options.read_bytes(), options.stat().st_mode & 0o777) == (joined, 0o600)
    assert (debian / EXAMPLE).read_text() == "# another example\n"
    debian.run(*APT, "purge", "ebbtide")
    assert not options.exists()
