"""The host agent's metrics, from an agent over a make-believe hypervisor: all of them, by Prometheus' conventions."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from ebbtide.rest.metrics.sheet import MIB
from hostagent.api.metric_families import declared, sheet_of
from hostagent.api.metrics import facts_of
from hostagent.control.renewal import load
from hostagent.control.usage import SAID_FOR_S
from hostagent.operations.agent import Agent
from hostagent.vm.host import MOST_CHANGES, Host
from tests.hostagent.conftest import Client, Command
from tests.hostagent.world import Domain
from tests.promtool import check_metrics
from tests.rest.pki import Pki
from tests.waiting import until

EXPIRY = "ebbtide_host_certificate_expiry_timestamp_seconds"
START = "ebbtide_host_certificate_start_timestamp_seconds"


async def values_of(client: Client) -> dict[str, float]:
    """Samples by name with labels, as they are written."""
    response = await client.get("/metrics")
    assert response.status == 200
    assert response.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
    text = await response.read()
    check_metrics(text)
    return {name: float(value) for name, value in re.findall(r"^([^#].*) (\S+)$", text.decode(), re.MULTILINE)}


async def test_an_agent_without_vms_has_metrics_of_its_host(client: Client, host: Host, tmp_path: Path) -> None:
    host.directories = {"state": tmp_path, "saved": tmp_path / "not-there"}
    found = await values_of(client)
    assert found['ebbtide_host_info{accelerator="qemu",id="host-a"}'] == 1.0
    assert found['ebbtide_host_mode{mode="active"}'] == 1.0
    assert found['ebbtide_host_mode{mode="off"}'] == 0.0
    assert found["ebbtide_host_hypervisor_up"] == 1.0
    assert found["ebbtide_host_capacity_memory_bytes"] == host.slice.capacity.memory_mib * MIB
    assert (
        0
        < found['ebbtide_host_disk_free_bytes{directory="state"}']
        <= found['ebbtide_host_disk_size_bytes{directory="state"}']
    )
    assert 'ebbtide_host_disk_free_bytes{directory="saved"}' not in found
    assert not [name for name in found if "_vm_" in name]


async def test_the_metrics_say_when_the_hosts_certificate_began_and_ends(
    client: Client, agent: Agent, tmp_path: Path
) -> None:
    assert not {EXPIRY, START} & (await values_of(client)).keys(), "there is none"
    own = Pki(tmp_path / "tls").pair("host-a").certificate
    agent.certificate = lambda: (own.read_bytes(),)
    found = await values_of(client)
    assert found[EXPIRY] == load(own).not_valid_after_utc.timestamp()
    assert found[START] == load(own).not_valid_before_utc.timestamp()


async def test_a_deflation_is_told_as_its_ledger_says(
    client: Client, command: Command, host: Host, two_vms: list[Domain]
) -> None:
    target = {"cpu_cores": 1.0, "memory_mib": 640.0}
    body = {"request_id": "smaller", "generation": 5, "target": target}
    operation = await command("PUT", "/v1/vms/low-1/target", body)
    assert operation.state == "done", operation.sentence
    outcome = operation.vms[0]
    found = await values_of(client)
    worked: dict[str, float] = {}
    for row in outcome.ledger:
        worked[row.layer.value] = max(worked.get(row.layer.value, 0.0), row.seconds)
        name = {"cpu_cores": "cpu_cores", "memory_mib": "memory_bytes"}[row.resource]
        unit = MIB if row.resource == "memory_mib" else 1.0
        labels = f'{{direction="deflate",layer="{row.layer.value}",vm="low-1"}}'
        assert found[f"ebbtide_vm_layer_asked_{name}_total{labels}"] == pytest.approx(row.asked * unit)
        assert found[f"ebbtide_vm_layer_verified_{name}_total{labels}"] == pytest.approx(row.verified * unit)
    # Memory and CPU go side by side: a layer worked for as long as the longer of them took.
    for layer, seconds in worked.items():
        labels = f'{{direction="deflate",layer="{layer}",vm="low-1"}}'
        assert found[f"ebbtide_vm_layer_seconds_total{labels}"] == pytest.approx(seconds)
    assert found['ebbtide_vm_resizes_total{direction="deflate",outcome="done",vm="low-1"}'] == 1.0
    assert found['ebbtide_vm_bound_memory_bytes{vm="low-1"}'] == outcome.after.memory_mib * MIB
    assert found['ebbtide_vm_nominal_cpu_cores{vm="low-1"}'] == 3.0
    assert found['ebbtide_vm_minimum_memory_bytes{vm="low-1"}'] == 320 * MIB
    assert found['ebbtide_vm_under_pressure{vm="low-1"}'] == 0.0
    assert found['ebbtide_vm_held{vm="low-1"}'] == 1.0
    assert found['ebbtide_guest_memory_available_bytes{vm="low-1"}'] > 0
    assert found['ebbtide_guest_cpus_online{vm="low-1"}'] >= 1.0
    assert found['ebbtide_host_operation_duration_seconds_count{kind="target",state="done"}'] == 1.0
    assert found['ebbtide_host_decisions_total{kind="deflate"}'] >= 1.0
    assert found['ebbtide_host_vms{priority="deflatable",state="running"}'] == 2.0
    # Nothing of it is known of the other one, which is not zero but absent.
    assert not [name for name in found if name.startswith("ebbtide_vm_layer") and 'vm="low-2"' in name]


async def test_the_first_of_anything_is_an_increase_since_its_series_was_there_at_zero(
    client: Client, command: Command, two_vms: list[Domain]
) -> None:
    before = await values_of(client)
    target = {"cpu_cores": 1.0, "memory_mib": 640.0}
    await command("PUT", "/v1/vms/low-1/target", {"request_id": "smaller", "generation": 5, "target": target})
    after = await values_of(client)
    rose = {
        name
        for name, value in after.items()
        if name.startswith(("ebbtide_vm_resizes", "ebbtide_host_resizes", "ebbtide_host_layer", "ebbtide_host_short"))
        and value > before[name]
    }
    assert {
        'ebbtide_vm_resizes_total{direction="deflate",outcome="done",vm="low-1"}',
        'ebbtide_host_resizes_total{direction="deflate",outcome="done"}',
        'ebbtide_host_layer_verified_memory_bytes_total{direction="deflate",layer="guest"}',
    } <= rose
    assert before['ebbtide_vm_resizes_total{direction="deflate",outcome="short",vm="low-2"}'] == 0.0
    assert before['ebbtide_host_resizes_total{direction="deflate",outcome="short"}'] == 0.0
    assert before['ebbtide_host_shortfalls_total{direction="deflate",reason="unasked",resource="cpu_cores"}'] == 0.0
    # Also of what the host does not declare, for its VMs may.
    hypervisors = '{direction="deflate",layer="hypervisor"}'
    assert before[f"ebbtide_host_layer_asked_disk_bytes_per_second_total{hypervisors}"] == 0.0
    assert not [name for name in after if name.startswith("ebbtide_vm_layer_asked_disk")], "which was never asked for"


async def test_a_bandwidth_that_is_declared_is_told_at_zero_and_one_that_is_not_is_left_out(
    agent: Agent, two_vms: list[Domain]
) -> None:
    facts = facts_of(agent)
    vms = {vm.status.name: vm for vm in facts.vms}
    sold = vms["low-1"].status.nominal.model_copy(update={"network_mib_s": 50.0})
    metered = replace(vms["low-1"], status=vms["low-1"].status.model_copy(update={"nominal": sold}))
    capacity = facts.report.capacity.model_copy(update={"disk_mib_s": 100.0})
    report = facts.report.model_copy(update={"capacity": capacity, "vms": (metered.status, vms["low-2"].status)})
    found = sheet_of(replace(facts, report=report, vms=(metered, vms["low-2"]))).values()
    assert found["ebbtide_host_capacity_disk_bytes_per_second"] == {(): 100 * MIB}
    assert found["ebbtide_host_free_disk_bytes_per_second"] == {(): 0.0}
    assert found["ebbtide_host_free_network_bytes_per_second"] == {}
    assert found["ebbtide_host_deflatable_network_bytes_per_second"] == {(): 0.0}, "of a VM, though not of the host"
    assert found["ebbtide_vm_bound_network_bytes_per_second"] == {("low-1",): 0.0}
    assert found["ebbtide_vm_bound_disk_bytes_per_second"] == {}


async def test_drift_that_was_put_right_is_counted(
    client: Client, command: Command, host: Host, two_vms: list[Domain]
) -> None:
    one = host.vms["low-2"]
    two_vms[1].quota = 0.5
    one.request_check()
    await until(lambda: one.drift_repair.drift_total > 0)
    found = await values_of(client)
    assert found['ebbtide_vm_drift_repairs_total{vm="low-2"}'] == one.drift_repair.drift_total
    assert found['ebbtide_host_decisions_total{kind="repair"}'] >= 1.0


async def test_a_vm_that_is_gone_leaves_no_series(client: Client, command: Command, two_vms: list[Domain]) -> None:
    await command("DELETE", "/v1/vms/low-1?request_id=gone")
    found = await values_of(client)
    assert not [name for name in found if 'vm="low-1"' in name]
    assert [name for name in found if 'vm="low-2"' in name]


async def test_all_core_changes_that_wait_are_counted_not_only_those_of_the_next_report(
    client: Client, host: Host, two_vms: list[Domain]
) -> None:
    change = host.journal.changes[0]
    host.journal.changes += [change] * (MOST_CHANGES + 1 - len(host.journal.changes))
    assert (await values_of(client))["ebbtide_host_core_changes_waiting"] == MOST_CHANGES + 1


async def test_of_a_guest_that_has_fallen_silent_only_the_age_of_its_figures_is_told(
    agent: Agent, two_vms: list[Domain]
) -> None:
    one = agent.host.vms["low-1"]
    await until(lambda: one.pressure.said is not None and one.link.online is not None)
    said = one.pressure.said
    assert said is not None
    before = {name for name, rows in sheet_of(facts_of(agent)).values().items() if ("low-1",) in rows}
    assert {"ebbtide_guest_cpus_online", "ebbtide_guest_memory_available_bytes"} <= before
    one.pressure.said = said[0], said[1] - SAID_FOR_S
    one.link.connected = False
    found = sheet_of(facts_of(agent)).values()
    told = [name for name, rows in found.items() if "_guest_" in name and any("low-1" in labels for labels in rows)]
    assert told == ["ebbtide_vm_guest_connected", "ebbtide_guest_status_age_seconds"]
    assert found["ebbtide_guest_status_age_seconds"]["low-1",] >= SAID_FOR_S


async def test_what_an_agent_knows_is_known_without_asking(agent: Agent, two_vms: list[Domain]) -> None:
    asked: list[str] = []
    hypervisor = agent.host.hypervisor
    agent.host.hypervisor = _Silent(hypervisor, asked)  # type: ignore[assignment]
    facts = facts_of(agent)
    agent.host.hypervisor = hypervisor
    assert [vm.status.name for vm in facts.vms] == ["low-1", "low-2"]
    assert set(asked) <= {"calls", "templates", "moves"}, "properties and what is in memory"


class _Silent:
    """Notes what is asked of a hypervisor."""

    def __init__(self, real: object, asked: list[str]) -> None:
        self._real, self._asked = real, asked

    def __getattr__(self, name: str) -> object:
        self._asked.append(name)
        return getattr(self._real, name)


def test_every_metric_has_words_of_its_own() -> None:
    helps = [metric.help for metric in declared()]
    assert len(set(helps)) == len(helps)
