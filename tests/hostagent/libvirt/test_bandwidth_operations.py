"""Disk and network through the agent's commands, over a make-believe hypervisor, and what may be asked for at all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer

from ebbtide.deflation.resources import ResourceVector
from ebbtide.messages.hosts import capacity_of
from ebbtide.messages.vms import VMSpec
from hostagent.api.app import make_app
from hostagent.domain_xml.templates import PACKAGED
from hostagent.errors import DomainGone, RequestRefused, TrafficControlError
from hostagent.libvirt.definitions import usable_boot_mib
from hostagent.libvirt.libvirt_hypervisor import LibvirtHypervisor
from hostagent.libvirt.settings import LibvirtSettings
from hostagent.limits.network import Networks
from hostagent.operations.agent import Agent
from hostagent.state.journal import Journal
from hostagent.vm.host import Host, Slice
from tests.hostagent.conftest import TOKEN, Client, Command, low_vm
from tests.hostagent.fake_hypervisor import FakeHypervisor
from tests.hostagent.world import Domain, World

CAPACITY = ResourceVector(cpu_cores=6, memory_mib=3600, disk_mib_s=100, network_mib_s=100)
SIZE = {"cpu_cores": 3.0, "memory_mib": 1024.0}


@pytest.fixture
async def agent(world: World, tmp_path: Path) -> AsyncIterator[Agent]:
    """A host that hands out disk and network, too."""
    part = Slice("host-a", "http://127.0.0.1:1", CAPACITY, "qemu", 320.0)
    made = Agent(Host(part, FakeHypervisor(world.socket), Journal(tmp_path), lambda: 1e6), usable_boot_mib)
    await made.start()
    yield made
    await made.close()


@pytest.fixture
async def client(agent: Agent) -> AsyncIterator[Client]:
    async with TestClient(TestServer(make_app(agent, TOKEN)), headers={"Authorization": f"Bearer {TOKEN}"}) as made:
        yield made


@pytest.fixture
async def domain(command: Command, world: World) -> Domain:
    nominal = SIZE | {"disk_mib_s": 80.0, "network_mib_s": 60.0}
    operation = await command("POST", "/v1/vms", {"request_id": "c", "vm": low_vm("low-1", nominal=nominal)})
    assert operation.state == "done", operation.sentence
    (made,) = world.domains.values()
    return made


def target(disk_mib_s: float, network_mib_s: float) -> dict[str, Any]:
    size = SIZE | {"disk_mib_s": disk_mib_s, "network_mib_s": network_mib_s}
    return {"request_id": "t", "generation": 2, "target": size}


async def test_a_target_moves_the_limits_and_a_reinflation_moves_them_back(
    command: Command, agent: Agent, domain: Domain
) -> None:
    assert agent.host.free().disk_mib_s == 20
    operation = await command("PUT", "/v1/vms/low-1/target", target(30.0, 10.0))
    assert operation.state == "done", operation.sentence
    assert (domain.disk_mib_s, domain.network_mib_s) == (30, 10)
    assert (agent.host.free().disk_mib_s, agent.host.free().network_mib_s) == (70, 90)
    operation = await command("POST", "/v1/reinflations", {"request_id": "r", "vms": ["low-1"]})
    assert operation.state == "done", operation.sentence
    assert (domain.disk_mib_s, domain.network_mib_s) == (80, 60)
    assert agent.host.free().disk_mib_s == 20


async def test_a_reclaim_takes_bandwidth_down_to_the_floor_and_not_below(
    command: Command, agent: Agent, domain: Domain
) -> None:
    operation = await command("POST", "/v1/reclaims", {"request_id": "r", "need": {"disk_mib_s": 80.0}})
    assert operation.state == "partial"
    assert domain.disk_mib_s == 1
    assert agent.host.free().disk_mib_s == 99


async def test_a_limit_that_fails_keeps_its_charge_and_its_reason(
    command: Command, agent: Agent, domain: Domain, world: World
) -> None:
    world.failures["set_network"] = "tc failed: no such qdisc"
    operation = await command("PUT", "/v1/vms/low-1/target", target(80.0, 10.0))
    assert operation.state == "partial"
    assert agent.host.free().network_mib_s == 40
    (row,) = [r for r in operation.vms[0].ledger if (r.layer, r.resource) == ("hypervisor", "network_mib_s")]
    assert (row.verified, row.reason) == (0.0, "tc failed: no such qdisc")


async def test_a_repair_that_fails_says_why(
    command: Command, agent: Agent, domain: Domain, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (await command("PUT", "/v1/vms/low-1/target", target(30.0, 10.0))).state == "done"

    async def refuse(name: str, mib_s: float | None) -> str:
        return "the disk has no such limit"

    monkeypatch.setattr(agent.host.hypervisor, "set_disk", refuse)
    domain.disk_mib_s = None
    agent.host.vms["low-1"].request_check()
    agent.host.check_requested.set()

    def said() -> bool:
        return "not put right: the disk has no such limit" in {
            d.sentence for d in agent.host.history.decisions("low-1")
        }

    async with asyncio.timeout(30):
        while not said():
            await asyncio.sleep(0.05)


def test_a_slice_may_have_disk_and_network() -> None:
    assert capacity_of("cpu_cores=6,memory_mib=3600,disk_mib_s=100,network_mib_s=100") == CAPACITY
    with pytest.raises(ValueError, match="disk_mib is no component"):
        capacity_of("cpu_cores=6,memory_mib=3600,disk_mib=100")


@pytest.fixture
def templates(tmp_path: Path) -> Path:
    device = "<interface type='user'><mac address='52:54:00:00:00:02'/></interface>"
    (tmp_path / "outward.xml").write_text(f"<domain><name>$name</name><devices>{device}</devices></domain>")
    return tmp_path


@pytest.mark.parametrize(
    ("template", "component", "why"),
    [
        ("outward", "network_mib_s", "interface 52:54:00:00:00:02 is of type user"),
        ("outward", "disk_mib_s", "the domain has no disk"),
        ("lab", "network_mib_s", "the domain has no network interface"),
    ],
)
async def test_bandwidth_that_could_not_be_held_is_not_sold(
    templates: Path, template: str, component: str, why: str
) -> None:
    directories = (templates, PACKAGED)
    hypervisor = LibvirtHypervisor(
        LibvirtSettings("host-a", "test:///default", "qemu", templates, templates, directories)
    )
    try:
        spec = VMSpec.model_validate(low_vm("low-1", template=template, nominal=SIZE | {component: 10.0}))
        with pytest.raises(RequestRefused, match=why) as refused:
            await hypervisor.check(spec)
        assert (refused.value.status, refused.value.field) == (400, f"vm.nominal.{component}")
        await hypervisor.check(VMSpec.model_validate(low_vm("low-1", template=template)))
    finally:
        await hypervisor.close()


async def test_a_limit_that_libvirt_or_tc_refuses_is_a_reason_but_a_domain_that_is_gone_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hypervisor = LibvirtHypervisor(LibvirtSettings("host-a", "test:///default", "qemu", tmp_path, tmp_path))

    async def refuse(networks: Networks, domain: str, network_mib_s: float | None) -> str:
        raise TrafficControlError("tc is not there")

    monkeypatch.setattr(Networks, "limit", refuse)
    try:
        assert await hypervisor.sizes.set_network("test", 8.0) == "tc is not there"
        # libvirt's test driver refuses any limit without a peak.
        assert "total_bytes_sec" in await hypervisor.sizes.set_disk("test", 8.0)
        assert await hypervisor.sizes.set_disk("test", None) == ""
        with pytest.raises(DomainGone):
            await hypervisor.sizes.set_disk("nobody", 8.0)
    finally:
        await hypervisor.close()
