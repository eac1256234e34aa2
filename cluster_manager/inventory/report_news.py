"""News in a host's report, against the one before: what its VMs' owners and the cluster's operators are to be told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import structlog

from cluster_manager.alerts.endings import answers_again, within_capacity
from ebbtide.messages.common import is_known
from ebbtide.messages.explanations import EventKind
from ebbtide.messages.hosts import HostReport
from ebbtide.messages.vms import VMState, VMStatus

log = structlog.get_logger()

#: What is not worth a write: free memory and throttling move all the time, core changes have their own table, and which
#: manager a host follows counts only for the one that hears it.
_MOVING: Final = frozenset({"free", "sequence", "core_changes", "vms", "epoch"})
_MOVING_IN_VM: Final = frozenset({"throttled_share", "pressure", "pressure_budget_s", "not_yet"})


@dataclass(frozen=True, slots=True)
class News:
    """A line for the event log."""

    kind: EventKind
    vm: str | None
    sentence: str


#: Kinds that are no trouble by themselves.
_QUIET: Final = ("mode", "pressure")


def tell(news: News, host: str) -> None:
    """Log what a report brings, as the event log has it; the end of a trouble is none."""
    over = news.sentence in (answers_again(host), within_capacity(host))
    level = log.info if over or news.kind in _QUIET else log.warning
    level(news.kind, vm=news.vm, host=host, why=news.sentence)


def news_in(report: HostReport, known: HostReport | None) -> list[News]:
    """What to tell of a report.

    :param known: the one before it; None: the host is new.
    """
    return [*_of_host(report, known), *_of_vms(report, known), *_of_contention(report, known)]


def has_room_to_share(report: HostReport, known: HostReport | None) -> bool:
    """Whether VMs can grow that could not before: one went off by itself, or one that was paused runs deflated."""
    if any(news.kind == "stopped" for news in _of_vms(report, known)):
        return True
    paused = {vm.name for vm in known.vms if vm.state is VMState.PAUSED} if known is not None else set()
    resumed = (vm for vm in report.vms if vm.name in paused and vm.state is VMState.RUNNING)
    return any(not vm.nominal.vector().fits_in(vm.current.vector()) for vm in resumed)


def _of_host(report: HostReport, known: HostReport | None) -> list[News]:
    """Its hypervisor goes or comes back; its VMs hold more than it has, or no longer."""
    news, host = [], report.id
    if bool(report.unavailable) != (known is not None and bool(known.unavailable)):
        trouble = f"the hypervisor of {host} does not answer: {report.unavailable}"
        news.append(News("hypervisor", None, trouble if report.unavailable else answers_again(host)))
    beyond = report.overcommitted.vector()
    if beyond.is_zero() is (known is not None and not known.overcommitted.vector().is_zero()):
        said = f"{host} is overcommitted by {beyond}: it gets no VM, and its VMs are deflated towards its capacity"
        news.append(News("overcommitted", None, within_capacity(host) if beyond.is_zero() else said))
    return news


def _of_contention(report: HostReport, known: HostReport | None) -> list[News]:
    """Another program has begun to undo again and again what is put right."""
    fought = [vm for vm in report.vms if vm.contention is not None]
    before = {vm.name for vm in known.vms if vm.contention is not None} if known is not None and fought else set()
    told = [(vm.name, f"{vm.name} on {report.id}: {vm.contention}") for vm in fought if vm.name not in before]
    return [News("contention", name, sentence) for name, sentence in told]


def _of_vms(report: HostReport, known: HostReport | None) -> list[News]:
    stopped = [vm for vm in report.vms if vm.off_reason is not None]
    if not stopped:
        return []
    before = {vm.name: vm.state for vm in known.vms} if known is not None else {}
    news = []
    for vm in stopped:
        if before.get(vm.name) is vm.state or not is_known(vm.state):
            continue
        where = f"on {report.id}: {vm.off_reason}"
        if vm.state is VMState.PAUSED:
            news.append(News("paused", vm.name, f"{vm.name} is paused {where}"))
        else:
            news.append(News("stopped", vm.name, f"{vm.name} is off {where}; `ebb vm start {vm.name}` starts it"))
    return news


def same_essence(one: HostReport, other: HostReport) -> bool:
    """Whether two reports of a host differ in nothing that is worth a write."""
    if len(one.vms) != len(other.vms) or not _alike(one, other, _MOVING):
        return False
    return all(_alike(a, b, _MOVING_IN_VM) for a, b in zip(one.vms, other.vms, strict=True))


def _alike(one: HostReport | VMStatus, other: HostReport | VMStatus, but: frozenset[str]) -> bool:
    """Whether two bodies of one kind agree in all other fields."""
    theirs = other.__dict__
    return all(value == theirs[name] for name, value in one.__dict__.items() if name not in but)
