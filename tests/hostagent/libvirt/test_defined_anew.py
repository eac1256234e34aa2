"""Domains of ours whose owner defines them anew, undefines them while they run, renames or copies them, or reverts them
to a snapshot.

Against libvirt's test driver.
"""

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
from hostagent.errors import HypervisorError
from hostagent.libvirt import adopted
from hostagent.libvirt.libvirt_hypervisor import LibvirtHypervisor
from hostagent.libvirt.libvirt_readings import affected
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


@pytest.mark.parametrize("name", ["web", "ebb-host-a.web"])
async def test_a_domain_that_is_undefined_while_it_runs_is_written_to_limited_and_stopped_all_the_same(
    hypervisor: LibvirtHypervisor, driver: Any, name: str
) -> None:
    domain = define(driver, name, "host-a")
    domain.create()
    (found,) = await hypervisor.domains()
    domain.undefine()
    smaller = found.intent.changed(committed=Vector(cpu_cores=0.5, memory_mib=256))
    await hypervisor.write_intent(name, smaller)
    assert [one.intent for one in await hypervisor.domains()] == [smaller]
    await hypervisor.prepare_start(name, SIZE.vector())
    with pytest.raises(HypervisorError, match="definition was removed"):
        await hypervisor.to_save(name)
    assert "its power was cut" in await hypervisor.shut_down(name, 0.0)
    assert await hypervisor.domains() == []


async def test_a_domain_of_ours_that_is_undefined_while_it_runs_can_be_deleted(
    hypervisor: LibvirtHypervisor, driver: Any
) -> None:
    domain = define(driver, "ebb-host-a.web", "host-a")
    domain.create()
    domain.undefine()
    await hypervisor.destroy("ebb-host-a.web")
    assert [one.name() for one in driver.listAllDomains()] == ["test"]


def test_a_domain_is_changed_where_it_is(driver: Any) -> None:
    live, defined = libvirt.VIR_DOMAIN_AFFECT_LIVE, libvirt.VIR_DOMAIN_AFFECT_CONFIG
    domain = define(driver, "web", "host-a")
    assert affected(domain) == defined
    domain.create()
    assert affected(domain) == live | defined
    domain.undefine()
    assert affected(domain) == live


async def test_an_adopted_domain_that_is_renamed_is_found_under_its_new_name(
    hypervisor: LibvirtHypervisor, driver: Any
) -> None:
    define(driver, "ebb-host-a.other", "host-a")
    domain = define(driver, "web", "host-a")
    for name in ("web-old", "web-older", "web"):
        assert len(await hypervisor.domains()) == 2
        await asyncio.to_thread(domain.rename, name)
        assert {found.name for found in await hypervisor.domains()} == {"ebb-host-a.other", name}
        assert name in await hypervisor.survey()


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """One for each look at the domains of others."""
    looks: list[Any] = []
    look = adopted._bearing_our_metadata

    def noted(*given: Any) -> list[str]:
        looks.append(given)
        return look(*given)

    monkeypatch.setattr(adopted, "_bearing_our_metadata", noted)
    return looks


async def test_an_agent_that_starts_looks_once_though_an_adopted_domain_was_renamed_meanwhile(
    hypervisor: LibvirtHypervisor, driver: Any, looks: list[Any]
) -> None:
    domain = define(driver, "web", "host-a")
    await asyncio.to_thread(domain.rename, "web-old")
    for _ in range(2):
        assert [found.name for found in await hypervisor.domains()] == ["web-old"]
    assert len(looks) == 1


async def test_domains_of_others_are_not_looked_at_again_and_again_for_one_that_is_gone(
    hypervisor: LibvirtHypervisor, driver: Any, looks: list[Any]
) -> None:
    domain = define(driver, "web", "host-a")
    await hypervisor.domains()
    assert len(looks) == 1
    await asyncio.to_thread(domain.undefine)
    for _ in range(3):
        assert await hypervisor.domains() == []
    assert len(looks) == 2


def copied(driver: Any, domain: Any, name: str) -> None:
    """Another domain with all that one has but for its name and UUID, as virt-clone makes it."""
    xml = domain.XMLDesc(libvirt.VIR_DOMAIN_XML_INACTIVE)
    xml = xml.replace(f"<uuid>{domain.UUIDString()}<", f"<uuid>{uuid.uuid5(uuid.NAMESPACE_DNS, name)}<")
    driver.defineXML(xml.replace(f"<name>{domain.name()}<", f"<name>{name}<"))


@pytest.mark.parametrize("named", [True, False])
async def test_a_clone_of_an_adopted_domain_is_not_adopted(
    hypervisor: LibvirtHypervisor, driver: Any, tmp_path: Path, named: bool
) -> None:
    domain = define(driver, "web", "host-a")
    if not named:
        # The file is lost: what was written into which domain is known all the same.
        (tmp_path / "adopted.json").write_text("[]")
        (found,) = await hypervisor.domains()
        await hypervisor.write_intent("web", found.intent)
        (tmp_path / "adopted.json").write_text("[]")
    copied(driver, domain, "a-clone")
    names = tmp_path / "adopted.json"
    successor = LibvirtHypervisor(
        LibvirtSettings("host-a", "test:///default", "qemu", tmp_path, tmp_path, adopted=names)
    )
    assert [found.name for found in await successor.domains()] == ["web"]
    assert json.loads(names.read_text()) == ["web"]
    await successor.close()


@pytest.mark.parametrize("name", ["web", "ebb-host-a.web"])
async def test_a_domain_that_its_intent_was_written_into_is_told_from_its_copy(
    hypervisor: LibvirtHypervisor, driver: Any, name: str
) -> None:
    domain = define(driver, name, "host-a")
    (found,) = await hypervisor.domains()
    assert found.original is None, "an earlier agent wrote it"
    await hypervisor.write_intent(name, found.intent)
    copied(driver, domain, "ebb-host-a.copy")
    assert {one.name: one.original for one in await hypervisor.domains()} == {name: True, "ebb-host-a.copy": False}


async def test_a_released_domain_with_our_metadata_again_is_found_as_such_until_it_is_adopted_anew(
    hypervisor: LibvirtHypervisor, driver: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("limit_cpu", "restore_periods"):
        monkeypatch.setattr(adopted, name, lambda *_: None)  # this driver has neither
    names = tmp_path / "adopted.json"
    define(driver, "web", "host-a")
    (found,) = await hypervisor.domains()
    assert not found.released
    await hypervisor.adoption.give_back("web", Before())
    assert (await hypervisor.domains(), json.loads(names.read_text())) == ([], [])
    define(driver, "web", "host-a")
    (found,) = await hypervisor.domains()
    assert (found.name, found.released) == ("web", True)
    assert (list(await hypervisor.survey()), json.loads(names.read_text())) == (["web"], ["web"])
    await hypervisor.adoption.give_back("web", Before())
    await hypervisor.adoption.take_over("web", found.intent)
    assert [one.released for one in await hypervisor.domains()] == [False]


async def test_a_released_domain_that_is_refused_when_it_is_adopted_anew_stays_released(
    hypervisor: LibvirtHypervisor, driver: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("limit_cpu", "restore_periods"):
        monkeypatch.setattr(adopted, name, lambda *_: None)
    domain = define(driver, "web", "host-a")
    (found,) = await hypervisor.domains()
    await hypervisor.adoption.give_back("web", Before())
    define(driver, "web", "host-b")
    with pytest.raises(HypervisorError, match="another agent's metadata"):
        await hypervisor.adoption.take_over("web", found.intent)
    assert hypervisor.adoption.released.names() == {domain.UUIDString()}
