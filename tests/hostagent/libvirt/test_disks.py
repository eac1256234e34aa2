"""What a killed agent left of disks is swept; the disk of a VM that was there is not."""

from __future__ import annotations

import errno
import os
import subprocess
from pathlib import Path
from typing import Any

import libvirt
import pytest

from hostagent.errors import HypervisorError
from hostagent.libvirt import disks
from hostagent.libvirt.libvirt_hypervisor import LibvirtHypervisor
from hostagent.libvirt.settings import LibvirtSettings
from hostagent.state.intents import Intent, Phase
from tests.hostagent.conftest import low_vm
from tests.hostagent.libvirt_stand_in import StandIn, StandInDomain
from tests.waiting import until

VM = "ebb-host-a.low-1"
INTENT = Intent.model_validate(
    {"owner": "host-a", "spec": low_vm("low-1"), "boot_mib": 512.0, "phase": Phase.CREATING}
    | {field: {"cpu_cores": 3.0, "memory_mib": 1024.0} for field in ("target", "committed")}
)


class Killed(BaseException):
    """The agent ends here."""


@pytest.fixture(autouse=True)
def no_programs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Neither qemu-img nor ip has anything to do or to say."""
    (tmp_path / "base.qcow2").touch()
    monkeypatch.setattr(subprocess, "run", lambda argv, **_: subprocess.CompletedProcess(argv, 0, b"[]", b""))


def hypervisor(domains: StandIn, tmp_path: Path) -> LibvirtHypervisor:
    settings = LibvirtSettings("host-a", "stand-in", "qemu", tmp_path, tmp_path / "disks")
    return LibvirtHypervisor(settings, lambda uri: domains)


async def test_the_disk_of_a_vm_is_kept_where_another_libvirt_is_asked(tmp_path: Path) -> None:
    domains = StandIn(tmp_path)
    agent = hypervisor(domains, tmp_path)
    await agent.create(VM, INTENT)
    await agent.keep(VM)
    await hypervisor(StandIn(tmp_path), tmp_path).sweep()
    assert (tmp_path / "disks" / VM / "disk.qcow2").exists()
    with pytest.raises(HypervisorError, match="File exists"):
        await hypervisor(StandIn(tmp_path), tmp_path).create(VM, INTENT)
    first = hypervisor(domains, tmp_path)
    await first.sweep()
    await first.destroy(VM)
    assert not (tmp_path / "disks" / VM).exists()


@pytest.mark.parametrize("call", ["defineXML", "undefineFlags"])
async def test_what_a_kill_leaves_of_a_creation_or_a_removal_is_swept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    domains = StandIn(tmp_path)
    agent = hypervisor(domains, tmp_path)

    def killed(*_: Any) -> None:
        domains._domains.clear()
        raise Killed

    with monkeypatch.context() as kill:
        if call == "undefineFlags":
            await agent.create(VM, INTENT)
            kill.setattr(type(domains.lookupByName(VM)), call, killed)
            with pytest.raises(Killed):
                await agent.destroy(VM)
        else:
            kill.setattr(StandIn, call, killed)
            with pytest.raises(Killed):
                await agent.create(VM, INTENT)
    assert (tmp_path / "disks" / VM / "disk.qcow2").exists()
    await hypervisor(domains, tmp_path).sweep()
    assert not (tmp_path / "disks" / VM).exists()


async def test_a_new_disk_is_kept_from_the_moment_at_which_its_guest_is_to_run(tmp_path: Path) -> None:
    domains = StandIn(tmp_path)
    agent = hypervisor(domains, tmp_path)
    await agent.create(VM, INTENT)
    await hypervisor(domains, tmp_path).sweep([VM])
    assert await agent.is_new(VM), "an agent that is started meanwhile goes on with it"
    await agent.keep(VM)
    assert not await agent.is_new(VM)
    domains._domains.clear()
    await hypervisor(domains, tmp_path).sweep([])
    assert (tmp_path / "disks" / VM / "disk.qcow2").exists()


def test_a_disk_is_not_taken_for_new_where_its_directory_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, **_: Any) -> bool:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(Path, "exists", refuse)
    assert not disks.is_new(tmp_path)


async def test_a_domain_with_checkpoints_snapshots_saved_memory_and_firmware_of_its_own_can_be_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    domains = StandIn(tmp_path)
    agent = hypervisor(domains, tmp_path)
    await agent.create(VM, INTENT)
    given: list[int] = []
    monkeypatch.setattr(StandInDomain, "undefineFlags", lambda _, flags: given.append(flags))
    await agent.destroy(VM)
    kinds = ("CHECKPOINTS_METADATA", "SNAPSHOTS_METADATA", "MANAGED_SAVE", "NVRAM")
    assert given == [sum(getattr(libvirt, f"VIR_DOMAIN_UNDEFINE_{kind}") for kind in kinds)]


def test_a_removal_that_came_to_nothing_leaves_the_disk_kept(tmp_path: Path) -> None:
    (tmp_path / VM).mkdir()
    (tmp_path / VM / "disk.qcow2").touch()
    disks.doomed(tmp_path / VM)
    disks.sweep([tmp_path / VM], [VM])
    disks.sweep([tmp_path / VM], [])
    assert (tmp_path / VM / "disk.qcow2").exists()


async def test_a_base_image_is_missed_and_seen_without_a_restart(tmp_path: Path) -> None:
    (tmp_path / "base.qcow2").unlink()
    host = hypervisor(StandIn(tmp_path), tmp_path)
    await host.sweep()
    assert not host.can_create
    (tmp_path / "base.qcow2").touch()

    async def seen() -> bool:
        await host.survey()
        return host.can_create

    await until(seen)
    (tmp_path / "base.qcow2").unlink()

    async def missed() -> bool:
        return not await seen()

    await until(missed)
    await host.close()


async def test_storage_that_fails_is_not_taken_for_one_without_a_base_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = hypervisor(StandIn(tmp_path), tmp_path)

    def fails(path: Path) -> None:
        raise OSError(errno.ESTALE, "Stale file handle")

    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", fails)
        await host._look_for_base()
    assert host.can_create
    await host.close()
