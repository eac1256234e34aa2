"""Domains that were saved and go on.

A memory limit that stood meanwhile is no limit then: nothing may back it by that time.
"""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import libvirt
import pytest

from hostagent.errors import HypervisorError
from hostagent.libvirt import disks
from hostagent.libvirt.libvirt_hypervisor import LibvirtHypervisor
from hostagent.libvirt.settings import LibvirtSettings
from tests.hostagent.libvirt.test_disks import INTENT, VM
from tests.hostagent.libvirt_stand_in import StandIn, StandInDomain


class Saved(StandInDomain):
    """A domain that can be saved, its live XML with it; ``refuses``: what is saved cannot be changed."""

    saved = ""
    refuses = False
    why = libvirt.VIR_DOMAIN_RUNNING_BOOTED

    def state(self) -> list[int]:
        return [self._state, self.why]

    def hasManagedSaveImage(self) -> int:
        return bool(self.saved)

    def managedSave(self, flags: int) -> None:
        self.saved, self._state = self.XMLDesc(), libvirt.VIR_DOMAIN_SHUTOFF

    def managedSaveGetXMLDesc(self, flags: int) -> str:
        assert flags == libvirt.VIR_DOMAIN_SAVE_IMAGE_XML_SECURE, "or its passwords were lost"
        return self.saved

    def managedSaveDefineXML(self, xml: str, flags: int = 0) -> None:
        if self.refuses:
            raise libvirt.libvirtError("refused")
        self.saved = xml

    def createWithFlags(self, flags: int) -> None:
        self.went_on_as = ElementTree.fromstring(self.saved)
        super().createWithFlags(flags)


@pytest.fixture
async def hypervisor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[LibvirtHypervisor]:
    monkeypatch.setattr(disks, "create_overlay", lambda _, directory: directory / "disk.qcow2")
    connection = StandIn(tmp_path)
    made = LibvirtHypervisor(LibvirtSettings("host-a", "", "qemu", tmp_path, tmp_path), lambda uri: connection)
    await made.create(VM, INTENT)
    yield made
    await made.close()


async def limited(hypervisor: LibvirtHypervisor, name: str = VM) -> Any:
    """The domain, with a limit of its memory beside another setting; under a name of its own it is its owner's."""
    domain = await hypervisor._connection.call(lambda c: c.lookupByName(VM))
    domain.__class__ = Saved
    memtune = ElementTree.SubElement(domain._root, "memtune")
    for what in ("hard_limit", "swap_hard_limit"):
        ElementTree.SubElement(memtune, what, unit="KiB").text = "2097152"
    domain._connection._domains[name] = domain
    return domain


def tuned(root: ElementTree.Element) -> list[str]:
    return [setting.tag for setting in root.findall("./memtune/*")]


async def test_what_the_agent_saves_has_no_memory_limit(hypervisor: LibvirtHypervisor) -> None:
    domain = await limited(hypervisor)
    await hypervisor.save(VM, 10.0)
    saved = ElementTree.fromstring(domain.saved)
    assert tuned(saved) == ["swap_hard_limit"]
    assert saved.find("./metadata/*") is not None
    assert saved.findtext("name") == VM


async def test_what_another_program_has_saved_goes_on_without_a_memory_limit(hypervisor: LibvirtHypervisor) -> None:
    domain = await limited(hypervisor)
    domain.managedSave(0)
    await hypervisor.start(VM, INTENT)
    assert tuned(domain.went_on_as) == ["swap_hard_limit"]


async def test_a_domain_whose_limit_cannot_be_taken_out_is_saved_and_not_started_with_it(
    hypervisor: LibvirtHypervisor,
) -> None:
    domain = await limited(hypervisor)
    domain.refuses = True
    await hypervisor.save(VM, 10.0)
    with pytest.raises(HypervisorError, match="refused"):
        await hypervisor.start(VM, INTENT)
    assert domain.saved
    assert not domain.isActive()


async def test_an_owners_memory_limit_stays_in_what_is_saved(hypervisor: LibvirtHypervisor) -> None:
    domain = await limited(hypervisor, "web")
    domain.managedSave(0)
    await hypervisor.start("web", INTENT)
    assert tuned(domain.went_on_as) == ["hard_limit", "swap_hard_limit"]


@pytest.mark.parametrize(
    ("state", "why", "goes_on"),
    [
        (libvirt.VIR_DOMAIN_RUNNING, libvirt.VIR_DOMAIN_RUNNING_RESTORED, True),
        (libvirt.VIR_DOMAIN_RUNNING, libvirt.VIR_DOMAIN_RUNNING_BOOTED, False),
        (libvirt.VIR_DOMAIN_PAUSED, libvirt.VIR_DOMAIN_PAUSED_SAVE, False),
    ],
)
async def test_a_domain_that_another_program_has_let_go_on_is_told_from_one_that_has_booted(
    hypervisor: LibvirtHypervisor, state: int, why: int, goes_on: bool
) -> None:
    domain = await limited(hypervisor)
    domain._state, domain.why = state, why
    assert [found.goes_on for found in await hypervisor.domains()] == [goes_on]
