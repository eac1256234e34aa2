"""The host agent's metrics, from an agent over a make-believe hypervisor: all of them, by Prometheus' conventions."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from ebbtide.deflation.allocations import Priority
from ebbtide.deflation.resources import COMPONENTS
from ebbtide.messages.common import Vector
from ebbtide.messages.guest import Memory, MemoryState, Pressure
from ebbtide.messages.hosts import HostReport
from ebbtide.messages.operations import Operation
from ebbtide.messages.vms import VMState, VMStatus
from ebbtide.rest.metrics.sheet import MIB
from ebbtide.rest.metrics.totals import Calls, Reports
from hostagent.api.metric_families import HostFacts, Machine, VMFacts, declared, put_machine, sheet_of
from hostagent.api.metrics import facts_of
from hostagent.control.renewal import load
from hostagent.control.usage import SAID_FOR_S
from hostagent.operations.agent import Agent
from hostagent.state.tallies import Tally
from hostagent.vm.host import MOST_CHANGES, Host
from tests.hostagent.conftest import Client, Command
from tests.hostagent.world import Domain
from tests.promtool import check_metrics
from tests.rest.pki import Pki
from tests.rest.sheets import amount, said_by, unsaid
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
    assert set(asked) <= {"calls", "can_create", "templates", "moves"}, "properties and what is in memory"


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


def size(cores: float, memory: float, disk: float, network: float) -> Vector:
    return Vector(cpu_cores=cores, memory_mib=memory, disk_mib_s=disk, network_mib_s=network)


def tally(asked: float, verified: float, seconds: float, short: int, resizes: int) -> Tally:
    made = Tally()
    for number, component in enumerate(COMPONENTS):
        made.asked["deflate", "guest", component] = asked + number
        made.verified["deflate", "guest", component] = verified + number
    made.seconds["deflate", "guest"] = seconds
    made.shortfalls["deflate", "memory_mib", "guest"] = short
    made.resizes["reinflate", "short"] = resizes
    return made


def test_every_metric_has_the_value_of_what_it_is_named_for() -> None:
    vm = VMStatus(
        name="low",
        host="host-a",
        domain="ebb-host-a.low",
        state=VMState.RUNNING,
        priority=Priority.HARVEST,
        nominal=size(2, 3, 5, 7),
        minimum=size(1, 2.5, 4, 6),
        ceiling=size(11, 13, 17, 19),
        current=size(1.5, 2.75, 4.5, 6.5),
        asks=size(23, 29, 31, 37),
        overhead_mib=1.0,
        generation=1,
        guest_connected=True,
        boot_memory_mib=2.0,
        pressure="memory",
        pressure_budget_s=41.0,
        throttled_share=0.43,
        drift_total=47,
        broken_offline_total=53,
        contention="another program undoes what is put right",
        held=True,
        started_at=59.0,
    )
    said = MemoryState(
        boot_id="b",
        memory=Memory(total_mib=61, available_mib=67, reserve_mib=71, floor_mib=73, unpluggable_mib=79),
        pressure=Pressure(
            memory_some_avg10=83,
            memory_full_avg10=89,
            cpu_some_avg10=97,
            memory_some_total_us=101_000_000,
            memory_full_total_us=103_000_000,
        ),
        major_faults=107,
    )
    report = HostReport(
        id="host-a",
        url="http://127.0.0.1:1",
        incarnation="i",
        capacity=size(109, 113, 127, 131),
        free=size(137, 139, 149, 151),
        deflatable=size(157, 163, 167, 173),
        overcommitted=size(179, 181, 191, 193),
        budget=size(197, 199, 211, 223),
        reserve_mib=227.0,
        vm_overhead_mib=1.0,
        accelerator="qemu",
        mode="draining",
        vms=(vm,),
    )
    facts = HostFacts(
        report=report,
        vms=(
            VMFacts(status=vm, resident_mib=229.0, tally=tally(233, 239, 241, 251, 257), said=(said, 5.0), online=263),
        ),
        tally=tally(269, 271, 277, 281, 283),
        decisions=Counter(deflate=293),
        operations=Counter(target=307),
        durations={},
        reports=Reports(311, 313, 317.0),
        calls=Calls(outcomes=Counter(ok=331, error=337, timeout=347, gone=349)),
        changes=353,
        epoch=359,
        available_mib=367.0,
        untouched_mib=373.5,
        trimmed_mib=373.0,
        given_back_mib=379.0,
        certificate_end=383.0,
        certificate_begin=389.0,
    )
    sheet = sheet_of(facts)
    put_machine(sheet, Machine((397 * MIB, 401 * MIB), {"state": (409 * MIB, 419 * MIB)}))
    found = said_by(sheet)
    assert found == {
        "host_info host-a qemu": 1,
        "host_mode draining": 1,
        "host_hypervisor_up": 1,
        **amount("host_capacity", "", 109, 113, 127, 131),
        **amount("host_free", "", 137, 139, 149, 151),
        **amount("host_deflatable", "", 157, 163, 167, 173),
        **amount("host_overcommitted", "", 179, 181, 191, 193),
        **amount("host_harvest_budget", "", 197, 199, 211, 223),
        "host_reserve_bytes": 227,
        "host_trimmed_bytes": 373,
        "host_trimmed_back_bytes": 379,
        "host_memory_available_bytes": 367,
        "host_untouched_memory_bytes": 373.5,
        "host_swap_size_bytes": 397,
        "host_swap_free_bytes": 401,
        "host_disk_size_bytes state": 409,
        "host_disk_free_bytes state": 419,
        "host_vms running harvest": 1,
        "host_decisions deflate": 293,
        "host_operations target": 307,
        "host_reports taken": 311,
        "host_reports failed": 313,
        "host_last_report_timestamp_seconds": 317,
        "host_core_changes_waiting": 353,
        "host_epoch": 359,
        "host_certificate_expiry_timestamp_seconds": 383,
        "host_certificate_start_timestamp_seconds": 389,
        "libvirt_calls ok": 331,
        "libvirt_calls error": 337,
        "libvirt_calls timeout": 347,
        "libvirt_calls gone": 349,
        "host_resizes reinflate short": 283,
        **amount("host_layer_asked", "deflate guest", 269, 270, 271, 272),
        **amount("host_layer_verified", "deflate guest", 271, 272, 273, 274),
        "host_layer_seconds deflate guest": 277,
        "host_shortfalls deflate memory_mib guest": 281,
        "vm_info low harvest agent lab": 1,
        "vm_state low running": 1,
        **amount("vm_nominal", "low", 2, 3, 5, 7),
        **amount("vm_minimum", "low", 1, 2.5, 4, 6),
        **amount("vm_ceiling", "low", 11, 13, 17, 19),
        **amount("vm_bound", "low", 1.5, 2.75, 4.5, 6.5),
        **amount("vm_asks", "low", 23, 29, 31, 37),
        "vm_resident_memory_bytes low": 229,
        "vm_under_pressure low": 1,
        "vm_pressure_budget_seconds low": 41,
        "vm_throttled_ratio low": 0.43,
        "vm_guest_connected low": 1,
        "vm_held low": 1,
        "vm_start_timestamp_seconds low": 59,
        "vm_drift_repairs low": 47,
        "vm_broken_offline low": 53,
        "vm_contended low": 1,
        "vm_resizes low reinflate short": 257,
        **amount("vm_layer_asked", "low deflate guest", 233, 234, 235, 236),
        **amount("vm_layer_verified", "low deflate guest", 239, 240, 241, 242),
        "vm_layer_seconds low deflate guest": 241,
        "vm_shortfalls low deflate memory_mib guest": 251,
        "guest_memory_size_bytes low": 61,
        "guest_memory_available_bytes low": 67,
        "guest_memory_floor_bytes low": 73,
        "guest_cpus_online low": 263,
        "guest_memory_pressure_ratio low some": 0.83,
        "guest_memory_pressure_ratio low full": 0.89,
        "guest_cpu_pressure_ratio low": 0.97,
        "guest_memory_stalled_seconds low some": 101,
        "guest_memory_stalled_seconds low full": 103,
        "guest_major_faults low": 107,
        "guest_status_age_seconds low": 5,
    }
    assert unsaid(declared(), found) == set()


async def test_what_an_agent_knows_of_its_host_stands_under_its_own_name(
    agent: Agent, two_vms: list[Domain], tmp_path: Path
) -> None:
    """But for distributions, each of which has a test of its own."""
    host, own = agent.host, Pki(tmp_path / "tls").pair("host-a").certificate
    host.steady_taken_mib, host.steady_given_mib, host.available_mib, host.reports = 2.0, 3.0, 5.0, Reports(7, 11, 13.0)
    host.journal.epoch = 17
    host.tallies.whole.resizes["deflate", "done"] = 19
    host.history.made["deflate"] = 23
    host.hypervisor.calls.outcomes["gone"] = 29
    agent.certificate = lambda: (own.read_bytes(),)

    async def wait(operation: Operation) -> Operation:
        await asyncio.Event().wait()
        return operation

    agent.requests.operations.begin("r", "target", {}, wait)
    facts = facts_of(agent)
    assert (facts.trimmed_mib, facts.given_back_mib, facts.available_mib) == (2.0, 3.0, 5.0)
    assert (facts.reports, facts.epoch, facts.operations) == (Reports(7, 11, 13.0), 17, {"target": 1})
    counted = facts.tally.resizes["deflate", "done"], facts.decisions["deflate"], facts.calls.outcomes["gone"]
    assert counted == (19, 23, 29)
    assert (facts.changes, facts.report.id) == (2, "host-a")
    ends, begins = load(own).not_valid_after_utc, load(own).not_valid_before_utc
    assert (facts.certificate_end, facts.certificate_begin) == (ends.timestamp(), begins.timestamp())
