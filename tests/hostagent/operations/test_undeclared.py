"""Disk that a VM gave on a host that declares none: it gets it back from whatever shares room."""

from __future__ import annotations

import pytest

from ebbtide.deflation.sharing.hysteresis import Pace
from ebbtide.messages.commands import ReinflateCommand
from ebbtide.messages.common import Vector
from hostagent.control import harvest
from hostagent.control.start_admission import reinflation_targets
from hostagent.operations import mode_commands
from hostagent.vm.host import Host
from tests.hostagent.conftest import Client, Command, low_vm
from tests.waiting import until

SIZE = {"cpu_cores": 1.0, "memory_mib": 1024.0}


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mode_commands, "KEEP_S", 0.2)
    monkeypatch.setattr(harvest, "HARVEST_S", 0.1)
    monkeypatch.setattr(harvest, "HARVEST_PACE", Pace(hold_s=0.3, rest_s=0.5))


async def small(command: Command, host: Host) -> None:
    """low-1 with 20 of 100 MiB/s."""
    vm = low_vm("low-1", nominal={**SIZE, "disk_mib_s": 100.0})
    assert (await command("POST", "/v1/vms", {"request_id": "c", "vm": vm})).state == "done"
    body = {"request_id": "t", "generation": 2, "target": {**SIZE, "disk_mib_s": 20.0}, "deadline_s": 20.0}
    assert (await command("PUT", "/v1/vms/low-1/target", body)).state == "done"
    assert host.slice.capacity.disk_mib_s == 0
    assert disk(host) == 20.0


def disk(host: Host, name: str = "low-1") -> float:
    return host.vm(name).allocation().current.disk_mib_s


async def test_a_reinflation_gives_it_back_as_far_as_its_manager_allows(command: Command, host: Host) -> None:
    await small(command, host)
    some = ReinflateCommand(request_id="r", room=Vector(disk_mib_s=30.0), vms=("low-1",))
    assert reinflation_targets(host, host.resizable(), some)["low-1"].disk_mib_s == 50.0
    assert (await command("POST", "/v1/reinflations", {"request_id": "r", "vms": ["low-1"]})).state == "done"
    assert disk(host) == 100.0


async def test_a_host_that_drains_gives_it_back(command: Command, host: Host) -> None:
    await small(command, host)
    some = {"request_id": "r", "room": {"disk_mib_s": 30.0}, "vms": ["low-1"]}
    assert (await command("POST", "/v1/reinflations", some)).state == "done"
    assert (disk(host), host.vm("low-1").status().held) == (50.0, False)
    await command("PUT", "/v1/mode", {"request_id": "m", "mode": "draining"})
    await until(lambda: disk(host) == 100.0)


async def test_a_harvest_vm_grows_into_it_within_its_budget(client: Client, command: Command, host: Host) -> None:
    vm = low_vm(
        "spare",
        priority="harvest",
        nominal={**SIZE, "disk_mib_s": 10.0},
        minimum={"cpu_cores": 0.5, "memory_mib": 512.0},
        ceiling={**SIZE, "disk_mib_s": 50.0},
    )
    assert (await command("POST", "/v1/vms", {"request_id": "c", "vm": vm})).state == "done"
    await until(lambda: host.vm("spare").link.connected)
    budget = {"number": 1, "epoch": 0, "room": {"cpu_cores": 1.0, "memory_mib": 1024.0, "disk_mib_s": 39.0}}
    assert (await client.put("/v1/budget", json=budget)).status == 200
    await until(lambda: disk(host, "spare") == 40.0)
