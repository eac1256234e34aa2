"""Disks of VMs are for their owner, whatever the umask."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hostagent.libvirt.disks import create_overlay
from hostagent.state.files import make_parents


@pytest.fixture(params=[0o000, 0o022, 0o077])
def umask(request: pytest.FixtureRequest) -> Iterator[None]:
    before = os.umask(request.param)
    yield
    os.umask(before)


@pytest.mark.usefixtures("umask")
@pytest.mark.service
def test_an_overlay_is_its_owners_and_its_directories_can_be_passed_through(tmp_path: Path) -> None:
    base = tmp_path / "base.qcow2"
    subprocess.run(["qemu-img", "create", "-q", "-f", "qcow2", str(base), "1M"], check=True)
    disk = create_overlay(base, tmp_path / "vms" / "web")
    assert stat.S_IMODE(disk.stat().st_mode) == 0o600
    assert [stat.S_IMODE(path.stat().st_mode) for path in (disk.parent, disk.parent.parent)] == [0o711, 0o711]


@pytest.mark.usefixtures("umask")
def test_what_stands_above_an_agents_state_can_be_passed_through_since_disks_may_lie_beside_it(tmp_path: Path) -> None:
    make_parents(tmp_path / "ebbtide" / "agents" / "host-a")
    made = [tmp_path / "ebbtide", tmp_path / "ebbtide" / "agents"]
    assert [stat.S_IMODE(path.stat().st_mode) for path in made] == [0o711, 0o711]
    assert list(made[1].iterdir()) == []


@pytest.mark.service
def test_two_vms_that_are_made_at_once_make_the_directory_of_all_disks_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, vms, mkdir = tmp_path / "base.qcow2", tmp_path / "vms", Path.mkdir
    subprocess.run(["qemu-img", "create", "-q", "-f", "qcow2", str(base), "1M"], check=True)

    def late(path: Path, mode: int = 0o777, parents: bool = False, exist_ok: bool = False) -> None:
        if path == vms:
            os.mkdir(vms)  # the other one, in between
        mkdir(path, mode, parents, exist_ok)

    monkeypatch.setattr(Path, "mkdir", late)
    assert create_overlay(base, vms / "web").exists()


@pytest.mark.parametrize("module", ["hostagent.main", "cluster_manager.main"])
def test_what_a_daemon_writes_is_its_own(module: str) -> None:
    code = f"import os, sys, {module} as m\nsys.argv[1:] = ['--help']\ntry: m.main()\nexcept SystemExit: pass\n"
    code += "print(oct(os.umask(0)), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == "0o77\n"
