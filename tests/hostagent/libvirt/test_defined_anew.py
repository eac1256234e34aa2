"""Domains of ours that their owner defines anew while they run, without our metadata. Against libvirt's test driver."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import libvirt
import pytest

from ebbtide.messages.common import Vector
from ebbtide.messages.vms import VMSpec
from hostagent.libvirt.libvirt_hypervisor import LibvirtHypervisor
from hostagent.libvirt.settings import LibvirtSettings
from hostagent.state.intents import NAMESPACE, Before, Intent, Phase, to_qualified_element
from tests import libvirt_driver

SIZE = Vector(cpu_cores=1, memory_mib=512)


@pytest.fixture
def driver() -> Iterator[Any]:
    connection = libvirt_driver.opened()
    yield connection
    connection.close()
    libvirt_driver.opened().close()  # nothing of this is left to others


@pytest.fixture
async def hypervisor(tmp_path: Path, driver: Any) -> AsyncIterator[LibvirtHypervisor]:
    names = tmp_path / "adopted.json"
    names.write_text(json.dumps(["web"]))
    made = LibvirtHypervisor(LibvirtSettings("host-a", "test:///default", "qemu", tmp_path, tmp_path, adopted=names))
    yield made
    await made.close()


def define(driver: Any, name: str, owner: str = "") -> Any:
    intent = Intent(
        owner=owner or "nobody",
        spec=VMSpec(name="web", nominal=SIZE),
        boot_mib=512,
        phase=Phase.SETTLED,
        target=SIZE,
        committed=SIZE,
        adopted=Before() if name == "web" else None,
    )
    metadata = f"<metadata>{to_qualified_element(intent)}</metadata>" if owner else ""
    identity = f"<name>{name}</name><uuid>{uuid.uuid5(uuid.NAMESPACE_DNS, name)}</uuid>"
    rest = "<memory>524288</memory><os><type>hvm</type></os>"
    return driver.defineXML(f"<domain type='test'>{identity}{metadata}{rest}</domain>")


def stored(domain: Any) -> bool:
    return NAMESPACE in domain.XMLDesc(libvirt.VIR_DOMAIN_XML_INACTIVE)


@pytest.mark.parametrize("name", ["web", "ebb-host-a.web"])
async def test_a_running_domain_that_is_defined_anew_without_our_metadata_stays_ours_and_has_it_again(
    hypervisor: LibvirtHypervisor, driver: Any, name: str
) -> None:
    domain = define(driver, name, "host-a")
    domain.create()
    before = await hypervisor.domains()
    define(driver, name)
    assert not stored(domain)
    assert await hypervisor.domains() == before != []
    assert stored(domain)
    await asyncio.to_thread(domain.destroy)
    assert [found.state for found in await hypervisor.domains()] == ["stopped"]


async def test_a_running_domain_of_another_owner_or_of_nobody_is_not_written_to(
    hypervisor: LibvirtHypervisor, driver: Any
) -> None:
    for name, owner in (("web", "host-b"), ("ebb-host-a.web", "")):
        domain = define(driver, name, owner)
        domain.create()
        define(driver, name)
        assert await hypervisor.domains() == []
        assert not stored(domain)


async def test_a_domain_that_is_defined_anew_without_our_metadata_while_it_is_off_is_its_owners(
    hypervisor: LibvirtHypervisor, driver: Any
) -> None:
    domain = define(driver, "web", "host-a")
    assert len(await hypervisor.domains()) == 1
    define(driver, "web")
    assert await hypervisor.domains() == []
    assert not stored(domain)
