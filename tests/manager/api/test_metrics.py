"""The manager's metrics: of itself, of hosts and tasks; those of hosts passed on; where all of them are."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster_manager.alerts.outbox import Drop, Outbox, Outcome
from cluster_manager.alerts.webhooks import Webhook
from cluster_manager.api import metrics
from cluster_manager.api.metric_families import STATES, OneHost, TermFacts, declared, put_hosts, put_term
from cluster_manager.errors import DISK_FULL
from cluster_manager.inventory.agents import METRICS_LIMIT
from ebbtide.messages.common import Vector
from ebbtide.messages.explanations import Event
from ebbtide.messages.guest import Memory, MemoryState
from ebbtide.messages.machines import CalibrationCurve, CalibrationReport, Decile
from ebbtide.messages.vms import VMState
from ebbtide.rest.metrics.sheet import MIB, Sheet
from hostagent.api import metrics as of_agent
from hostagent.api.metric_families import VMFacts
from hostagent.state.tallies import Tallies
from tests.manager.cluster import QUICK, Cluster, cluster_of, vm
from tests.manager.fake_agent import FakeAgent
from tests.manager.plan_events import spec_of, status_of
from tests.manager.with_agent import lab_of
from tests.promtool import check_metrics
from tests.rest.sheets import amount, said_by, unsaid
from tests.waiting import until

SCRAPES = Path(__file__).resolve().parents[3] / "deploy" / "prometheus" / "prometheus.yml"

pytestmark = pytest.mark.usefixtures("each_store")


def host(name: str) -> FakeAgent:
    return FakeAgent(name, cpu_cores=6.0, memory_mib=3600.0)


async def text_of(cluster: Cluster, path: str = "/metrics") -> tuple[int, bytes]:
    headers = {"Authorization": f"Bearer {cluster.settings.token}"}
    url = cluster.url + path
    async with cluster.session.get(url, headers=headers) as response:
        return response.status, await response.read()


async def values_of(cluster: Cluster, path: str = "/metrics") -> dict[str, float]:
    """Samples by name with labels."""
    status, text = await text_of(cluster, path)
    assert status == 200, text
    check_metrics(text)
    return {name: float(value) for name, value in re.findall(r"^([^#].*) (\S+)$", text.decode(), re.MULTILINE)}


async def test_a_leader_tells_of_itself_its_hosts_and_its_placements(tmp_path: Path) -> None:
    agents = host("host-a"), host("host-b")
    async with cluster_of(tmp_path, *agents, silent_after_s=60.0) as cluster:
        await cluster.create(vm("web"))
        await cluster.ready()
        found = await values_of(cluster)
        assert (found["ebbtide_manager_leader"], found["ebbtide_manager_epoch"]) == (1.0, 1.0)
        assert {state: found[f'ebbtide_cluster_hosts{{state="{state}"}}'] for state in STATES} == {
            "ready": 2.0,
            "overcommitted": 0.0,
            "unavailable": 0.0,
            "silent": 0.0,
            "revoked": 0.0,
        }
        assert found['ebbtide_manager_operation_duration_seconds_count{kind="create",state="done"}'] == 1.0
        assert found['ebbtide_manager_preemptions_total{reason="minimum"}'] == 0.0
        (where,) = [agent.id for agent in agents if agent.vms]
        assert found['ebbtide_cluster_nominal_memory_bytes{priority="deflatable"}'] == 1000 * MIB
        assert found['ebbtide_cluster_bound_cpu_cores{priority="deflatable"}'] == 3.0
        assert found['ebbtide_cluster_minimum_memory_bytes{priority="deflatable"}'] == 300 * MIB
        assert 0 <= found[f'ebbtide_cluster_host_report_age_seconds{{host="{where}"}}'] < 60
        assert found['ebbtide_cluster_vms{priority="deflatable",state="running"}'] == 1.0
        assert found['ebbtide_manager_reports_total{kind="news"}'] >= 2.0
        assert "ebbtide_manager_store_free_bytes" in found or not isinstance(cluster.settings.database, Path)
        # Without an engine nothing is said of it: unknown is not zero.
        assert "ebbtide_matcher_engine_up" not in found


def test_vms_that_are_off_are_in_no_sum_so_that_they_do_not_look_deflated() -> None:
    off = [status_of(spec_of(name, "deflatable"), "host-a", Vector(), VMState.STOPPED) for name in ("a", "b", "c")]
    runs = status_of(spec_of("web", "deflatable"), "host-a")
    report = host("host-a").report().model_copy(update={"vms": (*off, runs)})
    sheet = Sheet(declared())
    put_hosts(sheet, [OneHost("host-a", "ready", 1.0, report)])
    found = sheet.values()
    for name, memory_mib in (("nominal", 800), ("minimum", 300), ("bound", 800)):
        assert found[f"ebbtide_cluster_{name}_memory_bytes"]["deflatable",] == memory_mib * MIB, name
    assert found["ebbtide_cluster_vms"] == {("stopped", "deflatable"): 3.0, ("running", "deflatable"): 1.0}


def test_a_vm_that_moves_live_is_one_vm_and_makes_the_cluster_look_no_less_deflated() -> None:
    spec = spec_of("web", "deflatable")
    hosts = []
    for name in ("host-a", "host-b"):
        moves = status_of(spec, name, state=VMState.MIGRATING)
        hosts.append(OneHost(name, "ready", 1.0, host(name).report().model_copy(update={"vms": (moves,)})))
    sheet = Sheet(declared())
    put_hosts(sheet, hosts)
    found = sheet.values()
    for name, memory_mib in (("nominal", 1600), ("minimum", 600), ("bound", 1600)):
        assert found[f"ebbtide_cluster_{name}_memory_bytes"]["deflatable",] == memory_mib * MIB, name
    assert found["ebbtide_cluster_vms"] == {("migrating", "deflatable"): 1.0}


async def test_a_standbys_preemptions_and_lost_alerts_stand_at_0_so_that_its_first_one_is_an_increase(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    webhook = Webhook("oncall", "http://127.0.0.1:1", b"key", frozenset())
    async with cluster_of(tmp_path, webhooks=(webhook,)) as cluster:
        assert cluster.manager is not None
        monkeypatch.setattr(cluster.manager.leadership, "leads", lambda: False)
        found = await values_of(cluster)
        assert found["ebbtide_manager_leader"] == 0.0
        for reason in ("minimum", "shortfall"):
            assert found[f'ebbtide_manager_preemptions_total{{reason="{reason}"}}'] == 0.0
        for reason in ("overflow", "expired", "refused"):
            assert found[f'ebbtide_manager_alert_drops_total{{reason="{reason}",webhook="oncall"}}'] == 0.0


def test_bandwidth_of_the_cluster_is_told_at_zero_where_hosts_declare_it() -> None:
    full = host("host-a").report()
    full = full.model_copy(update={"capacity": full.capacity.model_copy(update={"disk_mib_s": 100.0})})
    sheet = Sheet(declared())
    put_hosts(sheet, [OneHost("host-a", "ready", 1.0, full)])
    found = sheet.values()
    assert found["ebbtide_cluster_free_disk_bytes_per_second"] == {(): 0.0}
    assert found["ebbtide_cluster_bound_disk_bytes_per_second"]["fixed",] == 0.0
    assert found["ebbtide_cluster_capacity_network_bytes_per_second"] == {}


async def test_a_preemption_is_counted_by_its_reason_and_the_queue_told(tmp_path: Path) -> None:
    agent = host("host-a")
    async with cluster_of(tmp_path, agent, silent_after_s=60.0) as cluster:
        await cluster.create(
            vm("low", cpu_cores=6.0, memory_mib=1000.0, minimum={"cpu_cores": 5.0, "memory_mib": 300.0})
        )
        operation = await cluster.create(vm("high", "fixed", cpu_cores=4.0))
        assert operation.state == "done", operation.sentence
        assert await cluster.events("preempted")
        found = await values_of(cluster)
        assert found['ebbtide_manager_preemptions_total{reason="minimum"}'] == 1.0
        assert found['ebbtide_cluster_preempted_vms{host="host-a"}'] == 1.0
        assert found['ebbtide_cluster_preempted_oldest_timestamp_seconds{host="host-a"}'] > 1e9


async def test_a_silent_host_stands_with_the_age_of_its_last_report(tmp_path: Path) -> None:
    agent = host("host-a")
    async with cluster_of(tmp_path, agent, silent_after_s=0.3) as cluster:
        await agent.close()

        async def silent() -> bool:
            return 'ebbtide_cluster_host_state{host="host-a",state="silent"}' in await values_of(cluster)

        await until(silent)
        found = await values_of(cluster)
        assert 'ebbtide_cluster_host_state{host="host-a",state="ready"}' not in found
        assert found['ebbtide_cluster_host_report_age_seconds{host="host-a"}'] >= 0.3
        assert found['ebbtide_cluster_hosts{state="silent"}'] == 1.0


async def test_a_revoked_host_is_told_as_that_and_not_as_silent_which_would_alarm_until_it_is_forgotten(
    tmp_path: Path,
) -> None:
    async with cluster_of(tmp_path, host("host-a"), silent_after_s=60.0) as cluster:
        assert (await cluster.call("POST", "/v1/hosts/host-a/revocation", json={"reason": "stolen"}))[0] == 200
        found = await values_of(cluster)
        states = {name for name in found if name.startswith("ebbtide_cluster_host_state{")}
        assert states == {'ebbtide_cluster_host_state{host="host-a",state="revoked"}'}
        assert {state: found[f'ebbtide_cluster_hosts{{state="{state}"}}'] for state in ("silent", "revoked")} == {
            "silent": 0.0,
            "revoked": 1.0,
        }
        assert (await cluster.get("/v1/hosts/host-a"))["state"] == "silent"


@pytest.mark.parametrize("state", ["silent", "revoked"])
def test_a_host_that_is_not_heard_and_its_vms_are_in_no_sum(state: str) -> None:
    runs, pressed = (status_of(spec_of(name, "deflatable"), "host-a") for name in ("web", "db"))
    pressed = pressed.model_copy(update={"pressure": "memory"})
    report = host("host-a").report().model_copy(update={"vms": (runs, pressed)})
    sheet, wanted = Sheet(declared()), Sheet(declared())
    put_hosts(sheet, [OneHost("host-a", "ready", 1.0, report), OneHost("host-b", state, 99.0, report)])
    put_hosts(wanted, [OneHost("host-a", "ready", 1.0, report)])
    of_each_host = {"ebbtide_cluster_hosts", "ebbtide_cluster_host_state", "ebbtide_cluster_host_report_age_seconds"}
    found = sheet.values()
    assert {name for name, rows in wanted.values().items() if found[name] != rows} == of_each_host
    assert found["ebbtide_cluster_capacity_cpu_cores"] == {(): 6.0}
    assert found["ebbtide_cluster_hosts"][state,] == 1.0


async def test_a_hosts_metrics_come_through_the_manager_and_prometheus_hears_where(tmp_path: Path) -> None:
    async with lab_of(tmp_path) as lab:
        await lab.create("web")
        await lab.add_old_host()
        (here, old) = await lab.cluster.get(metrics.TARGETS)
        assert old["labels"]["host"] == "host-old"
        assert here == {
            "targets": [lab.url.removeprefix("http://")],
            "labels": {
                "__scheme__": "http",
                "__metrics_path__": "/v1/hosts/host-a/metrics",
                "host": "host-a",
                "instance": "host-a",
            },
        }
        found = await values_of(lab.cluster, here["labels"]["__metrics_path__"])
        assert found['ebbtide_vm_nominal_cpu_cores{vm="web"}'] == 3.0
        assert (await text_of(lab.cluster, "/v1/hosts/nobody/metrics"))[0] == 404
        assert (await text_of(lab.cluster, "/v1/hosts/host-old/metrics"))[0] == 503
        engine = await values_of(lab.cluster)
        assert engine['ebbtide_matcher_tasks{state="waiting"}'] == 0.0
        assert "ebbtide_matcher_engine_up" in engine


async def test_a_host_that_says_too_much_is_not_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with lab_of(tmp_path) as lab:
        monkeypatch.setattr(of_agent, "_written", lambda *_: b"# " + b"x" * METRICS_LIMIT)
        status, text = await text_of(lab.cluster, "/v1/hosts/host-a/metrics")
        assert (status, b"more than" in text) == (503, True)
        assert len(text) < 1000


async def test_metrics_of_a_thousand_vms_are_passed_on_and_scraped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tally = Tallies().whole  # as of a VM all of whose layers have worked
    guest = MemoryState.model_validate({"boot_id": "b", "memory": dict.fromkeys(Memory.model_fields, 1234.567)})
    vms = tuple(
        VMFacts(
            status_of(spec_of(f"a-vm-with-a-rather-long-name-{number:04d}", "deflatable", 1.2345, 1234.567), "host-a"),
            resident_mib=1234.567,
            tally=tally,
            said=(guest, 1.2345),
            online=2,
        )
        for number in range(1000)
    )
    # On two cores that four processes share, writing them all down may take longer than an answer.
    async with lab_of(tmp_path, replace(QUICK, answer_s=60.0)) as lab:
        known = of_agent.facts_of
        monkeypatch.setattr(of_agent, "facts_of", lambda agent: replace(known(agent), vms=vms))
        status, text = await text_of(lab.cluster, "/v1/hosts/host-a/metrics")
        assert status == 200, text
        samples = len(re.findall(rb"^[^#]", text, re.MULTILINE))
        assert samples > 1000 * 90
        assert samples < yaml.safe_load(SCRAPES.read_text())["scrape_configs"][1]["sample_limit"]


async def test_a_manager_that_does_not_lead_says_so_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cluster_of(tmp_path, host("host-a")) as cluster:
        assert cluster.manager is not None
        monkeypatch.setattr(cluster.manager.leadership, "leads", lambda: False)
        found = await values_of(cluster)
        assert found["ebbtide_manager_leader"] == 0.0
        assert not [name for name in found if name.startswith(("ebbtide_cluster", "ebbtide_matcher"))]
        assert (await text_of(cluster, metrics.TARGETS))[0] == 503


async def test_predictions_are_told_by_decile_as_they_are_kept_and_not_as_totals_of_a_term(tmp_path: Path) -> None:
    async with cluster_of(tmp_path, host("host-a")) as cluster:
        assert cluster.manager is not None
        calibration: Any = cluster.manager.core_changes.check.calibration
        for came in (True, True, False):
            calibration.add(0.95, came)
        found = await values_of(cluster)
        assert found['ebbtide_matcher_predictions{decile="0.9",of="machines"}'] == 3.0
        assert found['ebbtide_matcher_predicted_ratio{decile="0.9",of="machines"}'] == pytest.approx(0.95)
        assert found['ebbtide_matcher_observed_ratio{decile="0.9",of="machines"}'] == pytest.approx(2 / 3)
        assert found['ebbtide_matcher_brier_score{of="machines"}'] == pytest.approx((2 * 0.05**2 + 0.95**2) / 3)


def test_every_metric_has_words_of_its_own() -> None:
    helps = [metric.help for metric in declared()]
    assert len(set(helps)) == len(helps)


def size(cores: float, memory: float, disk: float, network: float) -> Vector:
    return Vector(cpu_cores=cores, memory_mib=memory, disk_mib_s=disk, network_mib_s=network)


def curve(brier: float, count: int, predicted: float, observed: float) -> CalibrationCurve:
    row = Decile(low=0.5, count=count, predicted=predicted, observed=observed)
    return CalibrationCurve(count=1, brier=brier, deciles=(row,))


def test_every_metric_has_the_value_of_what_it_is_named_for() -> None:
    event = Event(id=1, at=0.0, kind="placed", sentence="it was placed")
    outbox = Outbox(
        Webhook("oncall", "http://127.0.0.1:1", b"key", frozenset()),
        seen=1,
        waiting=(event,) * 2,
        tries={Outcome.DELIVERED: 3, Outcome.FAILED: 5, Outcome.REFUSED: 7},
        drops={Drop.OVERFLOW: 11, Drop.EXPIRED: 13, Drop.REFUSED: 17},
    )
    facts = TermFacts(
        reports=Counter(news=19, repeated=23),
        operations=Counter(create=29),
        durations={},
        preempted=Counter(minimum=31, shortfall=37),
        moves=41,
        waiting={"host-a": [43.0, 47.0]},
        calibration=CalibrationReport(machines=curve(53, 59, 61, 67), tasks=curve(71, 73, 79, 83)),
        tasks=Counter(waiting=89, released=97, running=101),
        ended=Counter(done=103, failed=107, cancelled=109),
        killed=113,
        engine_up=True,
        machines=Counter(up=127, drained=131, down=137),
        usable_cores=139,
        outboxes=(outbox,),
    )
    sizes = {"nominal": size(2, 3, 5, 7), "minimum": size(1, 2.5, 4, 6), "current": size(1.5, 2.75, 4.5, 6.5)}
    web = status_of(spec_of("web", "deflatable"), "host-a").model_copy(update={**sizes, "pressure": "memory"})
    room = {"capacity": size(149, 151, 157, 163), "free": size(167, 173, 179, 181)}
    room["deflatable"] = size(191, 193, 197, 199)
    report = host("host-a").report().model_copy(update={**room, "vms": (web,)})
    sheet = Sheet(declared())
    put_term(sheet, facts)
    put_hosts(sheet, [OneHost("host-a", "overcommitted", 211.0, report)])
    found = said_by(sheet)
    assert found == {
        "manager_reports news": 19,
        "manager_reports repeated": 23,
        "manager_operations create": 29,
        "manager_preemptions minimum": 31,
        "manager_preemptions shortfall": 37,
        "manager_alert_tries oncall delivered": 3,
        "manager_alert_tries oncall failed": 5,
        "manager_alert_tries oncall refused": 7,
        "manager_alert_drops oncall overflow": 11,
        "manager_alert_drops oncall expired": 13,
        "manager_alert_drops oncall refused": 17,
        "manager_alerts_waiting oncall": 2,
        "manager_moves": 41,
        "cluster_hosts overcommitted": 1,
        "cluster_host_state host-a overcommitted": 1,
        "cluster_host_report_age_seconds host-a": 211,
        **amount("cluster_capacity", "", 149, 151, 157, 163),
        **amount("cluster_free", "", 167, 173, 179, 181),
        **amount("cluster_deflatable", "", 191, 193, 197, 199),
        **amount("cluster_nominal", "deflatable", 2, 3, 5, 7),
        **amount("cluster_minimum", "deflatable", 1, 2.5, 4, 6),
        **amount("cluster_bound", "deflatable", 1.5, 2.75, 4.5, 6.5),
        "cluster_vms_under_pressure": 1,
        "cluster_vms running deflatable": 1,
        "cluster_preempted_vms host-a": 2,
        "cluster_preempted_oldest_timestamp_seconds host-a": 43,
        "matcher_predictions machines 0.5": 59,
        "matcher_predictions tasks 0.5": 73,
        "matcher_predicted_ratio machines 0.5": 61,
        "matcher_predicted_ratio tasks 0.5": 79,
        "matcher_observed_ratio machines 0.5": 67,
        "matcher_observed_ratio tasks 0.5": 83,
        "matcher_brier_score machines": 53,
        "matcher_brier_score tasks": 71,
        "matcher_tasks waiting": 89,
        "matcher_tasks released": 97,
        "matcher_tasks running": 101,
        "matcher_tasks_ended done": 103,
        "matcher_tasks_ended failed": 107,
        "matcher_tasks_ended cancelled": 109,
        "matcher_kills": 113,
        "matcher_engine_up": 1,
        "matcher_machines up": 127,
        "matcher_machines drained": 131,
        "matcher_machines down": 137,
        "matcher_usable_cores": 139,
    }
    # The route itself puts what does not follow from these.
    leadership = {"manager_leader", "manager_epoch", "manager_disk_full"}
    assert unsaid(declared(), found) == {
        *leadership,
        "manager_store_free_bytes",
        "manager_certificate_expiry_timestamp_seconds",
    }


@pytest.mark.parametrize(("why", "full"), [(DISK_FULL, 1.0), ("another manager leads", 0.0)])
async def test_a_store_whose_disk_is_full_is_told_apart_from_other_reasons_not_to_lead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str, full: float
) -> None:
    async with cluster_of(tmp_path) as cluster:
        assert cluster.manager is not None
        monkeypatch.setattr(cluster.manager.leadership, "leads", lambda: False)
        monkeypatch.setattr(type(cluster.manager.leadership), "why", why)
        assert (await values_of(cluster))["ebbtide_manager_disk_full"] == full
