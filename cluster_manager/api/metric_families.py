"""Metrics of a manager: what each means, and their values from what it knows. VMs stand in those of their hosts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from cluster_manager.alerts.outbox import Drop, Outbox, Outcome
from cluster_manager.plans.preemption import PreemptionReason
from ebbtide.deflation.allocations import Priority
from ebbtide.deflation.resources import ResourceVector
from ebbtide.messages.common import Vector, is_known
from ebbtide.messages.hosts import HostReport
from ebbtide.messages.machines import CalibrationReport
from ebbtide.messages.vms import VMState
from ebbtide.rest.metrics.sheet import Amounts, Metric, Sheet, amounts, counter, declared_in, gauge
from ebbtide.rest.metrics.totals import Distribution

#: How many values each label can have.
LABELS: Final[Mapping[str, str]] = {
    "host": "the hosts that the manager knows, --most-hosts at the most",
    "state": "5 states of a host, 8 of a VM, 3 of a task, of a machine and of an operation",
    "priority": "3: fixed, deflatable, harvest",
    "reason": "2 of preemptions: minimum, shortfall; 3 of alerts: overflow, expired, refused",
    "webhook": "the webhooks of --alerts-file, 16 at the most",
    "kind": "17 kinds of operations; 2 of reports",
    "outcome": "3 of tasks: done, failed, cancelled; 3 of alerts: delivered, failed, refused",
    "of": "2: machines, tasks",
    "decile": "10",
    "version": "1",
    "le": "up to 11",
}
STATES: Final = ("ready", "overcommitted", "unavailable", "silent", "revoked")


class _Manager:
    """Of the manager itself; a standby has what stands before the reports, and at 0 what `put_first_of` puts."""

    leader: Metric = gauge("manager_leader", "Whether this manager leads.")
    epoch: Metric = gauge("manager_epoch", "How often a manager has begun to lead on this store, as far as it knows.")
    disk_full: Metric = gauge("manager_disk_full", "Whether it does not lead because the disk of its store is full.")
    disk_free: Metric = gauge("manager_store_free_bytes", "Free room on the disk of a store in a file.")
    certificate_end: Metric = gauge(
        "manager_certificate_expiry_timestamp_seconds",
        "When the first of its own certificate and of the CA's ends to be valid; with TLS.",
    )
    reports: Metric = counter("manager_reports", "Reports that were taken; kind: news or repeated.", "kind")
    operations: Metric = gauge("manager_operations", "Operations under way.", "kind")
    operation: Metric = Metric(
        "ebbtide_manager_operation_duration_seconds",
        "histogram",
        "How long operations took that have ended (a placement is create); state: done, partial or failed.",
        ("kind", "state"),
    )
    preemptions: Metric = counter("manager_preemptions", "VMs that were preempted.", "reason")
    alert_tries: Metric = counter(
        "manager_alert_tries", "Tries to deliver an alert; outcome: delivered, failed, refused.", "webhook", "outcome"
    )
    alert_drops: Metric = counter(
        "manager_alert_drops", "Alerts that were given up; reason: overflow, expired, refused.", "webhook", "reason"
    )
    alerts_waiting: Metric = gauge("manager_alerts_waiting", "Alerts that are still to be delivered.", "webhook")
    rebalancing: Metric = gauge("manager_moves", "Moves of the manager's own that are under way.")


class _Cluster:
    """Of hosts and VMs, by the hosts' last reports; sums leave silent and revoked hosts out.

    What each host and VM has stands in its host's own metrics.
    """

    hosts: Metric = gauge("cluster_hosts", "Hosts.", "state")
    state: Metric = gauge(
        "cluster_host_state", "1 for the state that the host is in; others are left out.", "host", "state"
    )
    age: Metric = gauge("cluster_host_report_age_seconds", "How old the last report is.", "host")
    capacity: Amounts = amounts("ebbtide_cluster_capacity", "What the hosts hand out")
    free: Amounts = amounts("ebbtide_cluster_free", "What the hosts could give away")
    deflatable: Amounts = amounts("ebbtide_cluster_deflatable", "What could be taken from VMs")
    nominal: Amounts = amounts(
        "ebbtide_cluster_nominal",
        "What VMs that are not off were sold, one that moves live on both hosts",
        ("priority",),
    )
    minimum: Amounts = amounts(
        "ebbtide_cluster_minimum", "Minimums of VMs that are not off, one that moves live on both hosts", ("priority",)
    )
    bound: Amounts = amounts(
        "ebbtide_cluster_bound", "What hosts let VMs hold, one that moves live on both", ("priority",)
    )
    pressed: Metric = gauge("cluster_vms_under_pressure", "VMs under pressure.")
    vms: Metric = gauge(
        "cluster_vms",
        "VMs that hosts report, one that moves live once, silent and revoked hosts left out; state: unknown where only "
        "later versions know it.",
        "state",
        "priority",
    )
    waiting: Metric = gauge("cluster_preempted_vms", "Preempted VMs that wait for room.", "host")
    oldest: Metric = gauge("cluster_preempted_oldest_timestamp_seconds", "Since when the first of them waits.", "host")


class _Matcher:
    """Of tasks and predictions."""

    # No total: it is kept from term to term, and a manager that was killed has lost the last of it.
    predictions: Metric = gauge(
        "matcher_predictions", "Predictions whose outcome is known, by predicted probability.", "of", "decile"
    )
    predicted: Metric = gauge("matcher_predicted_ratio", "What was predicted on average, by decile.", "of", "decile")
    observed: Metric = gauge("matcher_observed_ratio", "The share of them that came true.", "of", "decile")
    brier: Metric = gauge("matcher_brier_score", "Mean squared error of the predictions; 0 at best.", "of")
    tasks: Metric = gauge("matcher_tasks", "Tasks that have not ended: waiting, released, running.", "state")
    ended: Metric = counter(
        "matcher_tasks_ended", "Tasks that have ended; outcome: done, failed, cancelled.", "outcome"
    )
    killed: Metric = counter("matcher_kills", "Attempts of tasks that were broken off with their machines.")
    engine_up: Metric = gauge(
        "matcher_engine_up", "Whether the engine that runs the tasks answers, and they are looked after."
    )
    machines: Metric = gauge("matcher_machines", "Machines of the engine: up, drained, down.", "state")
    cores: Metric = gauge("matcher_usable_cores", "Whole cores of the engine's machines that tasks can use.")


MANAGER: Final = _Manager
CLUSTER: Final = _Cluster
MATCHER: Final = _Matcher


def declared() -> Iterator[Metric]:
    """All metrics of a manager."""
    return declared_in(MANAGER, CLUSTER, MATCHER)


@dataclass(frozen=True, slots=True)
class OneHost:
    """A host as the manager sees it.

    :param age_s: of its last report.
    """

    id: str
    state: str
    age_s: float
    report: HostReport


@dataclass(frozen=True, slots=True)
class TermFacts:
    """What a manager that leads knows besides the hosts.

    :param waiting: by host, since when its preempted VMs wait, oldest first.
    """

    reports: Counter[str]
    operations: Counter[str]
    durations: Mapping[tuple[str, str], Distribution]
    preempted: Counter[str]
    moves: int
    waiting: Mapping[str, list[float]]
    calibration: CalibrationReport
    tasks: Counter[str]
    ended: Counter[str]
    killed: int
    engine_up: bool | None
    machines: Counter[str]
    usable_cores: int
    outboxes: Collection[Outbox]


def put_term(sheet: Sheet, facts: TermFacts) -> None:
    """Write down what is counted."""
    for kind in ("news", "repeated"):
        sheet.put(MANAGER.reports, facts.reports[kind], kind)
    for kind, count in facts.operations.items():
        sheet.put(MANAGER.operations, count, kind)
    for (kind, state), found in facts.durations.items():
        sheet.put_spread(MANAGER.operation, found, kind, state)
    put_first_of(sheet, facts.preempted, {outbox.webhook.name: outbox.drops for outbox in facts.outboxes})
    sheet.put(MANAGER.rebalancing, facts.moves)
    for outbox in facts.outboxes:
        for came in Outcome:
            sheet.put(MANAGER.alert_tries, outbox.tries.get(came, 0), outbox.webhook.name, came.value)
        sheet.put(MANAGER.alerts_waiting, len(outbox.waiting), outbox.webhook.name)
    for host, since in facts.waiting.items():
        sheet.put(CLUSTER.waiting, len(since), host)
        sheet.put(CLUSTER.oldest, since[0] if since else None, host)
    for of, curve in (("machines", facts.calibration.machines), ("tasks", facts.calibration.tasks)):
        sheet.put(MATCHER.brier, curve.brier, of)
        for row in curve.deciles:
            sheet.put(MATCHER.predictions, row.count, of, f"{row.low:.1f}")
            sheet.put(MATCHER.predicted, row.predicted, of, f"{row.low:.1f}")
            sheet.put(MATCHER.observed, row.observed, of, f"{row.low:.1f}")
    for state in ("waiting", "released", "running"):
        sheet.put(MATCHER.tasks, facts.tasks[state], state)
    for outcome in ("done", "failed", "cancelled"):
        sheet.put(MATCHER.ended, facts.ended[outcome], outcome)
    sheet.put(MATCHER.killed, facts.killed)
    sheet.put(MATCHER.engine_up, facts.engine_up)
    if facts.engine_up is not None:
        for state in ("up", "drained", "down"):
            sheet.put(MATCHER.machines, facts.machines[state], state)
        sheet.put(MATCHER.cores, facts.usable_cores)


class _Sum:
    """A vector that is added to thousands of times, so without a new one each time."""

    __slots__ = ("_cpu", "_disk", "_memory", "_network")

    def __init__(self) -> None:
        self._cpu = self._memory = self._disk = self._network = 0.0

    def add(self, size: Vector) -> None:
        self._cpu += size.cpu_cores
        self._memory += size.memory_mib
        self._disk += size.disk_mib_s
        self._network += size.network_mib_s

    @property
    def vector(self) -> ResourceVector:
        return ResourceVector(self._cpu, self._memory, self._disk, self._network)


def put_first_of(sheet: Sheet, preempted: Mapping[str, int], drops: Mapping[str, Mapping[Drop, int]]) -> None:
    """What is there from the beginning, and at a standby, so that the first one is an increase.

    :param drops: alerts that were given up, by webhook.
    """
    for reason in PreemptionReason:
        sheet.put(MANAGER.preemptions, preempted.get(reason.value, 0), reason.value)
    for webhook, counts in drops.items():
        for drop in Drop:
            sheet.put(MANAGER.alert_drops, counts.get(drop, 0), webhook, drop.value)


def put_hosts(sheet: Sheet, hosts: list[OneHost]) -> None:
    """Write down what the hosts have and hold: thousands of reports, which is not for the event loop's thread."""
    states = Counter(host.state for host in hosts)
    for state in STATES:
        sheet.put(CLUSTER.hosts, states[state], state)
    capacity, free, deflatable = _Sum(), _Sum(), _Sum()
    sums = {priority: (_Sum(), _Sum(), _Sum()) for priority in Priority}
    vms: Counter[tuple[str, Priority]] = Counter()
    pressed, counted = 0, set[str]()
    for host in hosts:
        report = host.report
        sheet.put(CLUSTER.state, 1.0, host.id, host.state)
        sheet.put(CLUSTER.age, host.age_s, host.id)
        if host.state in ("silent", "revoked"):
            continue  # what it has and holds now is not known
        capacity.add(report.capacity)
        free.add(report.free)
        deflatable.add(report.deflatable)
        for vm in report.vms:
            pressed += vm.pressure is not None
            nominal, minimum, bound = sums[vm.priority]
            # What is off holds nothing, which would look like deflation.
            if vm.state is not VMState.STOPPED:
                # One that moves live is in all three twice: else its cluster would look less deflated than it is.
                nominal.add(vm.nominal)
                minimum.add(vm.minimum)
                bound.add(vm.current)
                if vm.name in counted:
                    continue
                counted.add(vm.name)
            # Words of hosts make no labels.
            vms[vm.state.value if is_known(vm.state) else "unknown", vm.priority] += 1
    own = capacity.vector
    # VMs may have bandwidths of which their hosts declare none.
    sold = sum((nominal.vector for nominal, _, _ in sums.values()), own)
    sheet.put_amounts(CLUSTER.capacity, own, own)
    sheet.put_amounts(CLUSTER.free, free.vector, own)
    sheet.put_amounts(CLUSTER.deflatable, deflatable.vector, sold)
    for priority, three in sums.items():
        for metrics, found in zip((CLUSTER.nominal, CLUSTER.minimum, CLUSTER.bound), three, strict=True):
            sheet.put_amounts(metrics, found.vector, sold, priority.value)
    sheet.put(CLUSTER.pressed, pressed)
    for (vm_state, priority), count in vms.items():
        sheet.put(CLUSTER.vms, count, vm_state, priority.value)
