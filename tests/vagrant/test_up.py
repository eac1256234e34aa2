"""`vagrant up` of manager and host in emulation, by a user who is not root; the Ansible role, applied to the host.

What was typed, what came of it and how long it took goes to build/vagrant.log.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import psutil
import pytest

ROOT = Path(__file__).parents[2]
BOX = ROOT / "build/ebbtide-debian12.box"
LOG = ROOT / "build/vagrant.log"
ANSIBLE = ROOT / "packaging/ansible"
MANAGER = "https://10.77.0.1:7100"
#: A user that each Debian has; its libvirt is its own, and no network is its to make.
USER = "nobody"
PORT = 2760
#: A machine is emulated, on cores that others use, too.
WAIT_S = 900.0
pytestmark = [pytest.mark.vagrant, pytest.mark.timeout(3 * 3600)]


class Lab:
    """Copies of vagrant/ and dist/ that the user can read, and a home with nothing in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = folder / "ssh-config"
        self.environ = {
            "PATH": "/usr/bin:/bin",
            "LC_ALL": "C.UTF-8",
            "HOME": str(folder / "h"),
            # Short: libvirt makes sockets below it.
            "XDG_CONFIG_HOME": str(folder / "c"),
            "XDG_RUNTIME_DIR": str(folder / "r"),
            "EBB_VAGRANT_PORT": str(PORT),
            "EBB_VAGRANT_DRIVER": "qemu",
            "EBB_VAGRANT_HOST_MEMORY_MIB": "1024",
            "EBB_VAGRANT_HEADROOM_MIB": "1024",
        }
        LOG.parent.mkdir(exist_ok=True)
        LOG.write_text("")

    def run(self, *words: str, user: str | None = USER, environ: Mapping[str, str] | None = None) -> str:
        begin_s = time.monotonic()
        done = subprocess.run(
            words,
            cwd=self.folder / "vagrant",
            env={**self.environ, **(environ or {})},
            user=user,
            extra_groups=[] if user else None,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        lines = done.stdout.replace("\r", "\n").splitlines()
        said = "".join(f"{line}\n" for line in lines if line.strip() and "Progress: " not in line)
        with LOG.open("a") as log:
            log.write(f"$ {' '.join(words)}\n{said}[{time.monotonic() - begin_s:.0f} s]\n\n")
        assert done.returncode == 0, said[-4000:]
        return said

    def on(self, machine: str, command: str) -> str:
        return self.run("ssh", "-F", str(self.config), machine, command)

    def hosts(self) -> dict[str, Any]:
        listed = json.loads(self.on("manager", "sudo -i ebb host list -o json"))["hosts"]
        return {host["id"]: host for host in listed}

    def domain(self, name: str) -> ElementTree.Element:
        return ElementTree.fromstring(self.run("virsh", "-q", "-c", "qemu:///session", "dumpxml", name))

    def ends(self) -> None:
        """End the user's libvirtd, which would end by itself in two minutes."""
        for path in (self.folder / "r/libvirt").glob("*.pid"):
            try:
                process = psutil.Process(int(path.read_text()))
                process.send_signal(signal.SIGTERM)
                process.wait(60)
            except psutil.NoSuchProcess:
                continue


def until(true: Callable[[], bool]) -> None:
    end_s = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < end_s, f"not within {WAIT_S:.0f} s"
        time.sleep(5)


def box() -> Path:
    sources = [path.stat().st_mtime for path in (ROOT / "vagrant/box").rglob("*")]
    if not BOX.exists() or BOX.stat().st_mtime < max(sources):
        subprocess.run([ROOT / "vagrant/box/build.sh", BOX], check=True)
    return BOX


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    folder = Path(tempfile.mkdtemp(prefix="ebbtide-", dir="/var/tmp"))
    try:
        shutil.copytree(ROOT / "vagrant", folder / "vagrant", ignore=shutil.ignore_patterns(".vagrant"))
        shutil.copytree(ROOT / "dist", folder / "dist")
        (folder / "build").mkdir()
        shutil.copy(box(), folder / "build")
        for name in ("h", "c", "r"):
            (folder / name).mkdir(mode=0o700)
        for path in (folder, *folder.rglob("*")):
            shutil.chown(path, USER)
        found = Lab(folder)
        try:
            found.run("vagrant", "up", "--no-color")
            found.config.write_text(found.run("vagrant", "ssh-config", "--no-color"))
            yield found
        finally:
            found.run("vagrant", "destroy", "--force", "--no-color")
            found.ends()
    finally:
        shutil.rmtree(folder)


def test_the_host_has_joined_by_the_line_of_the_manager_and_is_ready(lab: Lab) -> None:
    assert f"host-1 has joined {MANAGER}" in LOG.read_text()
    until(lambda: lab.hosts()["host-1"]["state"] == "ready")
    # Over the link between both machines, not through the machine they run on.
    assert lab.hosts()["host-1"]["url"] == "https://10.77.1.2:7101"


def test_the_host_gets_memory_and_vcpus_while_it_runs(lab: Lab) -> None:
    virsh = ("virsh", "-q", "-c", "qemu:///session")
    lab.run(*virsh, "update-memory-device", "ebb-host-1", "--live", "--requested-size", "512MiB")
    current = "devices/memory[@model='virtio-mem']/target/current"
    until(lambda: lab.domain("ebb-host-1").findtext(current) == str(512 * 1024))
    lab.run(*virsh, "setvcpus", "ebb-host-1", "3", "--live")
    until(lambda: lab.on("host-1", "cat /sys/devices/system/cpu/present").strip() == "0-2")


def test_the_role_makes_a_machine_a_host_and_changes_nothing_a_second_time(lab: Lab) -> None:
    lab.on("host-1", "sudo apt-get -q -y purge ebbtide && sudo rm -rf /var/lib/ebbtide")
    # They count as new, and nothing is fetched: all that the role installs is in the box.
    lab.on("host-1", "sudo touch /var/lib/apt/lists")
    inventory = lab.folder / "inventory.ini"
    inventory.write_text("[ebbtide_hosts]\nhost-1\n\n[ebbtide_manager]\nmanager\n")
    given = {
        "ebbtide_host_id": "host-a",
        "ebbtide_package": str(next((lab.folder / "dist").glob("ebbtide_*.deb"))),
        "ebbtide_manager_url": MANAGER,
    }
    options = ("--inventory", str(inventory), "--become", "--extra-vars", json.dumps(given))
    environ = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "ANSIBLE_HOME": str(lab.folder / "ansible"),
        "ANSIBLE_SSH_ARGS": f"-F {lab.config}",
        "ANSIBLE_TIMEOUT": "300",
        "ANSIBLE_NOCOLOR": "1",
    }

    def play() -> str:
        return lab.run("ansible-playbook", *options, str(ANSIBLE / "hosts.yml"), user=None, environ=environ)

    assert "failed=0" in play()
    until(lambda: lab.hosts().get("host-a", {}).get("state") == "ready")
    again = next(line for line in play().splitlines() if line.startswith("host-1") and "ok=" in line)
    assert "changed=0" in again
    assert "failed=0" in again
