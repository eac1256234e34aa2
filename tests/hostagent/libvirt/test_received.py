"""Of a VM that could not be received nothing is left, neither at once nor when libvirt carries it out late."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import libvirt
import pytest

from ebbtide.messages.common import Vector
from hostagent.errors import HypervisorError
from hostagent.libvirt import moves
from hostagent.libvirt.libvirt_hypervisor import LibvirtHypervisor
from hostagent.libvirt.settings import LibvirtSettings
from hostagent.libvirt_connection import LibvirtConnection
from hostagent.state.intents import Cause, Intent, Phase
from tests.hostagent.conftest import low_vm
from tests.hostagent.libvirt_stand_in import StandIn, StandInDomain

VM = "ebb-host-a.low-1"
IDENTITY = "0c9d1a34-6c1b-4f0e-9a55-0d8d9f6b2c11"
LIMIT_S = 0.2


def intent(request_id: str = "a") -> Intent:
    sizes = {field: {"cpu_cores": 3.0, "memory_mib": 1024.0} for field in ("target", "committed")}
    cause = Cause(request_id=request_id, kind="arrive", body={}, started_at=0.0, before=Vector())
    return Intent.model_validate(
        {"owner": "host-a", "spec": low_vm("low-1"), "boot_mib": 512.0, "phase": Phase.ARRIVING, "cause": cause} | sizes
    )


class Hanging(StandIn):
    """One that defines when it is let go on."""

    def __init__(self, channels: Path) -> None:
        super().__init__(channels)
        self._goes_on = threading.Event()
        self._refuses = False

    def defineXML(self, xml: str) -> StandInDomain:
        self._goes_on.wait(30.0)
        if self._refuses:
            raise libvirt.libvirtError("the client's socket has gone")
        return super().defineXML(xml)

    def lookupByUUIDString(self, identity: str) -> StandInDomain:
        for domain in self._domains.values():
            if domain.UUIDString() == identity:
                return domain
        return self.lookupByName(identity)  # which fails


@pytest.fixture
def domains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hanging:
    (tmp_path / "base.qcow2").touch()
    monkeypatch.setattr(subprocess, "run", lambda argv, **_: subprocess.CompletedProcess(argv, 0, b"[]", b""))
    monkeypatch.setattr(LibvirtConnection.call, "__kwdefaults__", {"modifies": None, "limit_s": LIMIT_S})
    return Hanging(tmp_path)


@pytest.fixture
async def hypervisor(domains: Hanging, tmp_path: Path) -> AsyncIterator[LibvirtHypervisor]:
    settings = LibvirtSettings("host-a", "stand-in", "qemu", tmp_path, tmp_path / "disks")
    made = LibvirtHypervisor(settings, lambda uri: domains)
    yield made
    domains._goes_on.set()
    await made.close()


async def test_what_is_defined_after_its_time_is_undone_with_its_disk(
    hypervisor: LibvirtHypervisor, domains: Hanging, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    undo = moves.LibvirtMoves._undo

    async def late(*arguments: Any) -> None:
        # By now the definition has been given up.
        domains._goes_on.set()
        await undo(*arguments)

    monkeypatch.setattr(moves.LibvirtMoves, "_undo", late)
    with pytest.raises(HypervisorError, match="could not be defined: libvirt did not answer"):
        await hypervisor.moves.receive(VM, IDENTITY, intent())
    assert "defineXML" in {name for name, _ in domains._calls}
    assert not domains._domains
    assert not (tmp_path / "disks" / VM).exists()


@pytest.mark.parametrize("defined", [True, False])
async def test_the_disk_of_what_may_still_be_defined_stays_until_that_is_over(
    hypervisor: LibvirtHypervisor, domains: Hanging, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, defined: bool
) -> None:
    monkeypatch.setattr(moves, "UNDO_S", LIMIT_S)
    with pytest.raises(
        HypervisorError, match=r"could not be defined: .*; what may still come of it could not be undone yet"
    ):
        await hypervisor.moves.receive(VM, IDENTITY, intent())
    disk = tmp_path / "disks" / VM / "disk.qcow2"
    assert disk.exists()
    domains._refuses = not defined
    domains._goes_on.set()
    await hypervisor._connection.ended(VM)
    assert disk.exists()
    if defined:
        # As the reconciler does with what no VM belongs to.
        await hypervisor.destroy(VM)
        assert not disk.parent.exists()
    domains._refuses = False
    await hypervisor.moves.receive(VM, IDENTITY, intent("again"))
    assert disk.exists()
    assert list(domains._domains) == [VM]


async def test_a_domain_of_the_same_identity_that_was_there_before_stays(
    hypervisor: LibvirtHypervisor, domains: Hanging, tmp_path: Path
) -> None:
    domains._goes_on.set()
    await hypervisor.moves.receive(VM, IDENTITY, intent())
    there = domains._domains.pop(VM)
    there._name = "another"
    domains._domains["another"] = there
    with pytest.raises(HypervisorError, match="File exists"):
        await hypervisor.moves.receive(VM, IDENTITY, intent("b"))
    other = "ebb-host-a.low-2"
    with pytest.raises(HypervisorError, match="there is a domain another already"):
        await hypervisor.moves.receive(other, IDENTITY, intent("b"))
    assert list(domains._domains) == ["another"]
    assert (tmp_path / "disks" / VM / "disk.qcow2").exists()
    assert not (tmp_path / "disks" / other).exists()
