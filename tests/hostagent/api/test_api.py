"""The host agent's API: what is refused, with which status and field, and that nothing has changed then."""

from __future__ import annotations

from typing import Any

import pytest
from yarl import URL

from ebbtide.messages.common import MOST
from hostagent.vm.host import Host
from tests.hostagent.conftest import Client, Command, low_vm
from tests.hostagent.doing import report
from tests.hostagent.fake_hypervisor import FakeHypervisor
from tests.hostagent.world import World


async def create(command: Command, name: str = "low-1", **fields: Any) -> None:
    operation = await command("POST", "/v1/vms", {"request_id": f"c-{name}", "vm": low_vm(name, **fields)})
    assert operation.state == "done", operation.sentence


async def refused(client: Client, method: str, path: str, body: Any, **arguments: Any) -> tuple[int, dict[str, Any]]:
    response = await client.request(method, path, json=body, **arguments)
    return response.status, await response.json()


VM = low_vm("low-9")
BAD_CREATIONS = [
    pytest.param(
        {"vm": VM | {"nominal": {"cpu_cores": -1.0, "memory_mib": 1024.0}}}, "vm.nominal.cpu_cores", id="negative"
    ),
    pytest.param({"vm": VM | {"nominal": {"cpu_cores": "3", "memory_mib": 1024.0}}}, "vm.nominal.cpu_cores", id="text"),
    pytest.param({"vm": VM | {"nominal": {"cpus": 3.0}}}, "vm.nominal.cpus", id="unknown component"),
    pytest.param(
        {"vm": VM | {"nominal": {"cpu_cores": 3.0, "memory_mib": 1024.0, "disk_mib_s": 1e12}}},
        "vm.nominal.disk_mib_s",
        id="more than any host has",
    ),
    pytest.param(
        {"vm": VM | {"priority": "harvest", "ceiling": {"cpu_cores": 1e9, "memory_mib": 1024.0}}},
        "vm.ceiling.cpu_cores",
        id="a ceiling of a billion vCPUs",
    ),
    pytest.param({"vm": VM, "request_id": ".."}, "request_id", id="a request id that is another path"),
    pytest.param({"vm": VM | {"nominal": {"memory_mib": 1024.0}}}, "vm.nominal.cpu_cores", id="missing component"),
    pytest.param({"vm": VM | {"minimum": {"cpu_cores": 4.0}}}, "vm.minimum.cpu_cores", id="minimum over nominal"),
    pytest.param({"vm": VM | {"ceiling": {"cpu_cores": 4.0}}}, "vm.ceiling", id="ceiling of a deflatable VM"),
    pytest.param({"vm": VM | {"name": "No Such Name"}}, "vm.name", id="name"),
    pytest.param({"vm": VM | {"priority": "low"}}, "vm.priority", id="priority"),
    pytest.param({"vm": VM | {"boot_memory_mib": 0.0}}, "vm.boot_memory_mib", id="no boot memory"),
    pytest.param({"vm": VM | {"boot_memory_mib": 4096.0}}, "vm.boot_memory_mib", id="boot memory over nominal"),
    pytest.param({"vm": VM, "extra": 1}, "extra", id="unknown field"),
    pytest.param({}, "vm", id="missing vm"),
]


@pytest.mark.parametrize(("fields", "field"), BAD_CREATIONS)
async def test_a_malformed_vm_is_refused_by_the_name_of_its_field(
    client: Client, world: World, fields: dict[str, Any], field: str
) -> None:
    status, problem = await refused(client, "POST", "/v1/vms", {"request_id": "r"} | fields)
    assert (status, problem["field"]) == (400, field)
    assert field in problem["detail"]
    assert not world.domains


@pytest.mark.parametrize(
    "text", ['{"request_id": "r", "need": {"cpu_cores": NaN}}', '{"request_id": "r", "need": ', "7"]
)
async def test_nan_and_broken_json_are_refused(client: Client, text: str) -> None:
    response = await client.post("/v1/reclaims", data=text)
    assert response.status == 400
    assert (await response.json())["detail"]


async def test_a_vm_that_does_not_fit_is_refused_and_nothing_is_started(client: Client, world: World) -> None:
    vm = low_vm("big", nominal={"cpu_cores": 2.0, "memory_mib": 3400.0})
    status, problem = await refused(client, "POST", "/v1/vms", {"request_id": "r", "vm": vm})
    assert (status, problem["field"]) == (409, "vm.nominal")
    assert not world.domains


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/vms/nobody"),
        ("DELETE", "/v1/vms/nobody?request_id=r"),
        ("GET", "/v1/operations/nothing"),
        ("GET", "/v1/no-such-page"),
    ],
)
async def test_what_is_not_there_answers_404_with_a_sentence(client: Client, method: str, path: str) -> None:
    status, problem = await refused(client, method, path, None)
    assert status == 404
    assert problem["detail"]


TARGETS = [
    pytest.param({"target": {"cpu_cores": 0.2, "memory_mib": 512.0}}, 400, "target.cpu_cores", id="below the minimum"),
    pytest.param({"target": {"cpu_cores": 3.0, "memory_mib": 2048.0}}, 400, "target.memory_mib", id="above nominal"),
    pytest.param(
        {"target": {"cpu_cores": 1.0, "memory_mib": 512.0}, "generation": 1}, 409, "generation", id="old generation"
    ),
    pytest.param({"target": {"cpu_cores": -1.0, "memory_mib": 512.0}}, 400, "target.cpu_cores", id="negative"),
    pytest.param({"target": {}}, 400, "target", id="of nothing"),
    pytest.param(
        {"target": {"cpu_cores": 1.0, "memory_mib": 512.0}, "deadline_s": -1}, 400, "deadline_s", id="deadline"
    ),
    pytest.param({"target": {"cpu_cores": 1.0, "memory_mib": 512.0}, "mode": "beg"}, 400, "mode", id="mode"),
]


@pytest.mark.parametrize(("fields", "status", "field"), TARGETS)
async def test_a_target_that_cannot_be_is_refused_and_the_vm_stays_as_it_is(
    client: Client, command: Command, world: World, fields: dict[str, Any], status: int, field: str
) -> None:
    await create(command)
    before = dict(vars(world.domains["ebb-host-a.low-1"]))
    body = {"request_id": "t", "generation": 2} | fields
    got, problem = await refused(client, "PUT", "/v1/vms/low-1/target", body)
    assert (got, problem["field"]) == (status, field)
    assert field in problem["detail"]
    assert vars(world.domains["ebb-host-a.low-1"]) == before


async def test_a_fixed_vm_is_never_given_another_size(client: Client, command: Command) -> None:
    await create(command, "high-1", priority="fixed", minimum={})
    body = {"request_id": "t", "generation": 2, "target": {"cpu_cores": 2.0, "memory_mib": 1024.0}}
    status, problem = await refused(client, "PUT", "/v1/vms/high-1/target", body)
    assert (status, problem["field"]) == (400, "target.cpu_cores")


@pytest.mark.parametrize("header", [{}, {"Authorization": "Bearer wrong"}, {"Authorization": "token-of-the-test"}])
async def test_a_wrong_token_is_refused_on_every_route(client: Client, host: Host, header: dict[str, str]) -> None:
    client.session.headers.clear()
    for method, path in [
        ("GET", "/v1/host"),
        ("GET", "/v1/vms"),
        ("POST", "/v1/vms"),
        ("DELETE", "/v1/vms/x"),
        ("PUT", "/v1/vms/x/target"),
        ("POST", "/v1/reclaims"),
        ("POST", "/v1/reinflations"),
        ("GET", "/v1/operations/x"),
    ]:
        status, problem = await refused(client, method, path, None, headers=header)
        assert (status, problem["field"]) == (401, "Authorization"), path
    assert (await client.get("/healthz")).status == 200


async def test_a_command_of_a_manager_that_no_longer_leads_is_refused(client: Client, command: Command) -> None:
    await command("POST", "/v1/reinflations", {"request_id": "a", "epoch": 7})
    status, problem = await refused(client, "POST", "/v1/reinflations", {"request_id": "b", "epoch": 6})
    assert (status, problem["field"]) == (409, "epoch")


async def test_the_same_request_gives_the_same_answer_and_another_body_a_conflict(
    client: Client, command: Command, world: World
) -> None:
    first = await command("POST", "/v1/vms", {"request_id": "c", "vm": low_vm("low-1")})
    second = await command("POST", "/v1/vms", {"request_id": "c", "vm": low_vm("low-1"), "epoch": 3})
    assert first == second
    assert [method for method, _ in world.calls].count("create") == 1
    body = {"request_id": "c", "epoch": 3, "vm": low_vm("low-2")}
    status, problem = await refused(client, "POST", "/v1/vms", body)
    assert (status, problem["field"]) == (409, "request_id")


async def test_a_body_that_is_too_large_is_refused(client: Client) -> None:
    response = await client.post("/v1/reclaims", data=b" " * 300_000)
    assert response.status == 413
    assert (await response.json())["detail"]


@pytest.mark.parametrize("wait", ["-1", "soon", "1e9", "nan"])
async def test_a_malformed_wait_is_refused(client: Client, wait: str) -> None:
    status, problem = await refused(client, "GET", f"/v1/operations/x?wait_s={wait}", None)
    assert (status, problem["field"]) == (400, "wait_s")


async def test_an_unknown_parameter_is_refused(client: Client) -> None:
    status, problem = await refused(client, "GET", "/v1/operations/x?wait=3", None)
    assert (status, problem["field"]) == (400, "wait")


async def test_an_unknown_template_is_refused(client: Client, world: World) -> None:
    body = {"request_id": "r", "vm": low_vm("low-1", template="windows")}
    status, problem = await refused(client, "POST", "/v1/vms", body)
    assert (status, problem["field"]) == (400, "vm.template")
    assert not world.domains


async def test_a_token_that_is_no_text_is_wrong(client: Client) -> None:
    client.session.headers.clear()
    status, _ = await refused(client, "GET", "/v1/host", None, headers={"Authorization": "Bearer \udcff\udcfe"})
    assert status == 401


async def test_a_refusal_is_remembered_with_the_path_as_it_was_sent(client: Client, host: Host) -> None:
    host.journal.raise_epoch(4)
    path = "/v1/vms/low-1%0Areclaim%20r1:%20done/stop"
    response = await client.post(URL(path, encoded=True), json={"request_id": "r", "epoch": 3})
    assert response.status == 409
    refusal = host.history.decisions()[-1]
    assert (refusal.kind, refusal.inputs["path"]) == ("refused", path)
    assert not [text for text in refusal.inputs.values() if "\n" in str(text)]


async def test_vms_of_the_largest_sizes_leave_the_hosts_report_whole(client: Client, command: Command) -> None:
    """Disk is not declared here, so that any size fits; the sums are reported."""
    sizes = {"cpu_cores": 1.0, "memory_mib": 512.0, "disk_mib_s": MOST, "network_mib_s": MOST}
    for name in ("low-1", "low-2"):
        await create(command, name, nominal=sizes, minimum={"cpu_cores": 0.5, "memory_mib": 320.0})
    response = await client.get("/v1/host")
    assert response.status == 200, await response.text()
    assert (await response.json())["deflatable"]["disk_mib_s"] > MOST


async def test_a_host_without_a_base_image_reports_that_nothing_can_be_made_there(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeHypervisor, "can_create", False)
    said = await report(client)
    assert not said.can_create
    assert said.templates, "what its VMs are made of, and where their disks are, is told all the same"
