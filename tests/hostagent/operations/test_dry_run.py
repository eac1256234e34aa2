"""Dry runs: what a command would do, told from fresh readings, with nothing changed or remembered."""

from __future__ import annotations

from typing import Any

import pytest

from ebbtide.deflation.cascade.forecast import NOT_ASKED
from ebbtide.deflation.cascade.mechanisms import Mechanism
from ebbtide.messages.dry_runs import Forecast
from hostagent.vm.host import Host
from tests.hostagent.conftest import Client, Command, low_vm
from tests.hostagent.control.test_pressure import press
from tests.hostagent.doing import reclaim
from tests.hostagent.world import World
from tests.waiting import until

#: What the agent may call in a dry run.
READINGS = {"read", "findings", "survey", "domains"}


@pytest.fixture
async def two_vms(command: Command, host: Host, world: World) -> None:
    """low-1 and low-2, with 300 MiB in use beside the system, their guests connected."""
    for name in ("low-1", "low-2"):
        operation = await command("POST", "/v1/vms", {"request_id": f"c-{name}", "vm": low_vm(name)})
        assert operation.state == "done", operation.sentence
    await until(lambda: all(vm.link.connected and not vm.lock.locked() for vm in host.vms.values()))
    for domain in world.domains.values():
        domain.used_mib = 300.0


async def ask(client: Client, method: str, path: str, body: dict[str, Any]) -> Forecast:
    response = await client.request(method, path, json=body | {"dry_run": True})
    text = await response.text()
    assert response.status == 200, text
    return Forecast.model_validate_json(text)


def picture(world: World, host: Host) -> list[dict[str, Any]]:
    """All that a command could change."""
    moving = {"vcpu_seconds"}
    domains = [{k: v for k, v in vars(d).items() if k not in moving} for d in world.domains.values()]
    return [*map(dict, domains), *({"intent": vm.intent, "operations": None} for vm in host.vms.values())]


COMMANDS = [
    pytest.param(
        "PUT", "/v1/vms/low-1/target", {"generation": 2, "target": {"cpu_cores": 1.5, "memory_mib": 700.0}}, id="target"
    ),
    pytest.param("POST", "/v1/reclaims", {"need": {"cpu_cores": 2.0, "memory_mib": 400.0}}, id="reclaim"),
    pytest.param("POST", "/v1/reinflations", {}, id="reinflate"),
]


@pytest.mark.parametrize(("method", "path", "body"), COMMANDS)
@pytest.mark.usefixtures("two_vms")
async def test_nothing_is_changed_called_or_remembered(
    client: Client, host: Host, world: World, method: str, path: str, body: dict[str, Any]
) -> None:
    before, journal, calls = picture(world, host), host.journal.epoch, len(world.calls)
    decisions = host.history.newest
    await ask(client, method, path, {"request_id": "dry", "epoch": 9} | body)
    assert {call for call, _ in world.calls[calls:]} <= READINGS
    assert picture(world, host) == before
    assert (host.journal.epoch, host.history.newest) == (journal, decisions)
    assert (await client.get("/v1/operations/dry")).status == 404


@pytest.mark.usefixtures("two_vms")
async def test_a_vm_whose_agent_has_died_gets_its_plugged_memory_back_and_a_dry_run_says_so(
    client: Client, command: Command, host: Host, world: World
) -> None:
    await reclaim(command, memory_mib=400.0)
    world.guests_answer = False
    for vm in host.vms.values():
        vm.link.connected = False
    for domain in world.domains.values():
        domain.findings = [[Mechanism.VIRTIO_MEM, False, "no guest agent has opened the channel", "", 2.0, True]]
    told = await ask(client, "POST", "/v1/reinflations", {"request_id": "r"})
    done = await command("POST", "/v1/reinflations", {"request_id": "r", "deadline_s": 20.0})
    assert [forecast.expected.memory_mib for forecast in told.vms] == [1024, 1024]
    assert [domain.bound_mib for domain in world.domains.values()] == [1024, 1024], done.sentence


@pytest.mark.usefixtures("two_vms")
async def test_a_dry_target_comes_true(client: Client, command: Command) -> None:
    body = {"request_id": "r", "generation": 2, "target": {"cpu_cores": 1.5, "memory_mib": 700.0}}
    told = await ask(client, "PUT", "/v1/vms/low-1/target", body)
    done = await command("PUT", "/v1/vms/low-1/target", body)
    (forecast,), (outcome,) = told.vms, done.vms
    assert forecast.expected == outcome.after
    assert (forecast.now, forecast.target, forecast.shortfall) == (outcome.before, outcome.target, outcome.shortfall)
    assert told.sentence == (
        "low-1 would take 1.5 cores, 324 MiB of 1.5 cores, 324 MiB (guest 1 cores, 324 MiB; hypervisor 0.5 cores)"
    )


@pytest.mark.usefixtures("two_vms")
async def test_a_dry_reclaim_tells_each_vms_share_of_each_layer_and_comes_true(
    client: Client, command: Command
) -> None:
    body = {"request_id": "r", "need": {"cpu_cores": 3.0, "memory_mib": 1100.0}}
    told = await ask(client, "POST", "/v1/reclaims", body)
    assert [vm.name for vm in told.vms] == ["low-1", "low-2"]
    for vm in told.vms:
        could = {(row.layer.value, row.resource): row.could for row in vm.rows}
        assert could["guest", "memory_mib"] == 512
        assert could["hypervisor", "memory_mib"] == 38
        assert could["guest", "cpu_cores"] == 1.0
        assert could["hypervisor", "cpu_cores"] == 0.5
    assert told.shortfall.vector().is_zero()
    done = await command("POST", "/v1/reclaims", body)
    assert [vm.expected for vm in told.vms] == [outcome.after for outcome in done.vms]


@pytest.mark.usefixtures("two_vms")
async def test_what_the_minimums_do_not_leave_is_missing(client: Client) -> None:
    told = await ask(client, "POST", "/v1/reclaims", {"request_id": "r", "need": {"cpu_cores": 5.5}})
    assert told.shortfall.cpu_cores == pytest.approx(0.5)
    assert told.sentence.startswith("short of 0.5 cores: low-1 would take 2.5 cores")


@pytest.mark.usefixtures("two_vms")
async def test_an_application_is_named_as_what_could_give_more(client: Client, world: World) -> None:
    domain = world.domains["ebb-host-a.low-1"]
    domain.cache_mib, domain.applications = 600.0, {"memcached": 600.0}
    body = {"request_id": "r", "generation": 2, "target": {"cpu_cores": 3.0, "memory_mib": 400.0}}
    (vm,) = (await ask(client, "PUT", "/v1/vms/low-1/target", body)).vms
    assert vm.shortfall.memory_mib > 500
    assert vm.sentence.endswith("its application, which a dry run does not ask, may make more possible")
    (row,) = [row for row in vm.rows if row.layer.value == "application"]
    assert (row.could, row.reason) == (0.0, NOT_ASKED)
    assert not domain.releases


@pytest.mark.usefixtures("two_vms")
async def test_a_dry_reinflation_tells_who_would_get_what(client: Client, command: Command) -> None:
    await command("POST", "/v1/reclaims", {"request_id": "r", "need": {"cpu_cores": 2.0, "memory_mib": 400.0}})
    told = await ask(client, "POST", "/v1/reinflations", {"request_id": "dry", "room": {"cpu_cores": 1.0}})
    assert [vm.target.cpu_cores for vm in told.vms] == [2.5, 2.5]
    assert told.vms[0].sentence == "would give back 0.5 cores of 0.5 cores (guest 0.5 cores; hypervisor nothing)"


@pytest.mark.usefixtures("two_vms")
async def test_a_dry_reinflation_leaves_a_vm_under_pressure_what_it_wants_as_the_command_does(
    client: Client, command: Command, host: Host, world: World
) -> None:
    await command("POST", "/v1/reclaims", {"request_id": "r", "need": {"memory_mib": 400.0}})
    # Paused, so that nothing answers the pressure meanwhile.
    await command("PUT", "/v1/mode", {"request_id": "m", "mode": "paused"})
    press(world.domains["ebb-host-a.low-2"])
    await until(lambda: not host.vms["low-2"].pressure.wants.is_zero())
    body = {"request_id": "dry", "room": {"memory_mib": 150.0}}
    assert (await ask(client, "POST", "/v1/reinflations", body | {"vms": ["low-1"]})).vms == ()


@pytest.mark.usefixtures("two_vms")
async def test_a_dry_run_asks_the_machine_what_memory_it_has_now(client: Client, command: Command, host: Host) -> None:
    await command("POST", "/v1/reclaims", {"request_id": "r", "need": {"memory_mib": 400.0}})
    host.memory_available_mib = lambda: host.slice.reserve_mib
    host.available_mib = 1e6
    assert (await ask(client, "POST", "/v1/reinflations", {"request_id": "dry"})).vms == ()


@pytest.mark.parametrize(
    ("fields", "status", "field"),
    [
        ({"target": {"cpu_cores": 0.1, "memory_mib": 700.0}}, 400, "target.cpu_cores"),
        ({"generation": 1}, 409, "generation"),
        ({"dry_run": "yes"}, 400, "dry_run"),
    ],
)
@pytest.mark.usefixtures("two_vms")
async def test_what_the_command_would_be_refused_for_is_refused(
    client: Client, host: Host, fields: dict[str, Any], status: int, field: str
) -> None:
    body = {"request_id": "r", "generation": 2, "target": {"cpu_cores": 1.5, "memory_mib": 700.0}, "dry_run": True}
    decisions = host.history.newest
    response = await client.put("/v1/vms/low-1/target", json=body | fields)
    assert (response.status, (await response.json())["field"]) == (status, field)
    assert host.history.newest == decisions


@pytest.mark.usefixtures("two_vms")
async def test_a_paused_host_tells_what_would_be_and_that_it_would_be_refused(client: Client, command: Command) -> None:
    await command("PUT", "/v1/mode", {"request_id": "m", "mode": "paused", "reason": "new disks"})
    told = await ask(client, "POST", "/v1/reclaims", {"request_id": "r", "need": {"cpu_cores": 1.0}})
    assert told.sentence.startswith(
        "would be refused now: host-a is paused: no VM is created and no size is changed (new disks); "
        "`ebb host resume host-a` makes it active again. Otherwise: low-1 would take 0.5 cores"
    )


@pytest.mark.usefixtures("two_vms")
async def test_a_vm_that_cannot_be_read_would_not_be_touched(client: Client, world: World) -> None:
    world.failures["read"] = "the monitor does not answer"
    told = await ask(client, "POST", "/v1/reclaims", {"request_id": "r", "need": {"cpu_cores": 1.0}})
    assert {vm.sentence for vm in told.vms} == {"would not be touched: its size cannot be read"}
    assert told.shortfall.cpu_cores == pytest.approx(1.0)


@pytest.mark.usefixtures("two_vms")
async def test_a_vm_under_pressure_would_be_shrunk_no_further(client: Client, host: Host, world: World) -> None:
    press(world.domains["ebb-host-a.low-1"])
    await until(lambda: bool(host.vms["low-1"].pressure.sentence))
    body = {"request_id": "r", "generation": 2, "target": {"cpu_cores": 1.0, "memory_mib": 700.0}}
    (vm,) = (await ask(client, "PUT", "/v1/vms/low-1/target", body)).vms
    # The figures in it may be older than those of now.
    assert vm.sentence.startswith("would be shrunk no further: under memory pressure: ")
    assert vm.expected == vm.now
    told = await ask(client, "POST", "/v1/reclaims", {"request_id": "r", "need": {"cpu_cores": 1.0}})
    assert [(vm.name, vm.target.cpu_cores) for vm in told.vms] == [("low-2", 2.0)]
