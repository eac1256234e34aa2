"""What the cluster's script must have shown, each as a pure function of what happened."""

from __future__ import annotations

import re
from collections.abc import Sequence

from deflation.ledger import Layer
from deflation.pages import Event
from ebb.demo.checks import BLOCK_MIB, CPU_TOLERANCE, RESOURCES
from ebb.demo.report import Check, Deflation
from ebb.readings import Reading

TOLERANCES = {"cpu_cores": CPU_TOLERANCE, "memory_mib": BLOCK_MIB}
_SHORT = re.compile(r"in layer (application|guest|hypervisor)\b")


def given(deflation: Deflation, resource: str) -> float:
    """What guest and hypervisor layer verified together."""
    rows = (row for row in deflation.ledger if row.resource == resource and row.layer is not Layer.APPLICATION)
    return sum(row.verified for row in rows)


def cpu_bound(reading: Reading, expected: float) -> float:
    """A VM's cores, by its quotas: those of the CPUs on line, or of all that are plugged, whichever is as expected.

    The agent counts all while it distrusts a parked vCPU, whose thread may move on a busy host (docs/contracts.md).
    """
    quotas = [1.0 if quota is None else min(quota, 1.0) for quota in reading.vcpu_quota_cores]
    plugged = round(min(float(len(reading.cpus_online)), sum(quotas)), 4)
    return min((reading.cpu_cores, plugged), key=lambda cores: abs(cores - expected))


def fall(deflation: Deflation, resource: str) -> float:
    """By how much the bound fell, by the readings."""
    return float(getattr(deflation.before, resource) - getattr(deflation.after, resource))


def adds_up(deflation: Deflation) -> Check:
    """One VM's ledger is the fall of its bound."""
    words = [f"ledger {given(deflation, name):g}, bound fell by {fall(deflation, name):g} {name}" for name in RESOURCES]
    ok = all(abs(given(deflation, name) - fall(deflation, name)) <= TOLERANCES[name] for name in RESOURCES)
    return Check(name=f"the ledger of {deflation.vm} for {deflation.cause} adds up", ok=ok, detail="; ".join(words))


def sums_agree(deflations: Sequence[Deflation]) -> Check:
    """The ledger of all deflations is the fall of all bounds."""
    ok, words = bool(deflations), []
    for name in RESOURCES:
        ledger, bounds = (sum(figure(row, name) for row in deflations) for figure in (given, fall))
        ok = ok and ledger > 0 and abs(ledger - bounds) <= TOLERANCES[name] * len(deflations)
        words.append(f"ledgers {ledger:g}, bounds {bounds:g} {name}")
    return Check(name="the ledgers of all deflations add up", ok=ok, detail="; ".join(words))


def nobody_for_a_minimum(events: Sequence[Event]) -> Check:
    """No minimum was ever in the way, so nobody was preempted for one."""
    found = [event.sentence for event in events if event.kind == "preempting" and "reason minimum" in event.sentence]
    return Check(name="nobody was preempted for a minimum", ok=not found, detail="; ".join(found) or "none")


def shortfalls_name_a_layer(events: Sequence[Event]) -> Check:
    """The preemption by shortfall happened, and its record names the layer that failed."""
    found = [event.sentence for event in events if event.kind == "preempting" and "reason shortfall" in event.sentence]
    ok = bool(found) and all(_SHORT.search(sentence) for sentence in found)
    return Check(name="each shortfall names the layer that failed", ok=ok, detail="; ".join(found) or "none happened")
