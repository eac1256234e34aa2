"""Reports that are kept take little memory, and are what they were."""

from __future__ import annotations

import tracemalloc

from cluster_manager.slim_reports import slim
from deflation.messages import HostReport, Vector, VMSpec, VMState
from tests.manager.plan_events import report_of, spec_of, status_of


def report(less_mib: float = 0.0) -> HostReport:
    """A host of 20 VMs of different sizes, one of them stopped with another spec to come.

    :param less_mib: below what each VM has at other hosts.
    """
    vms = []
    for number in range(20):
        spec = spec_of(f"vm-{number}", "deflatable", 2.0 + number % 3, 1000.0)
        vms.append(status_of(spec, "host-a", Vector(cpu_cores=1.0 + number / 100, memory_mib=900.0 - less_mib)))
    to_come = VMSpec.model_validate({"name": "vm-3", "nominal": {"cpu_cores": 9.0, "memory_mib": 512.0}})
    off = {"state": VMState.STOPPED, "start_size": vms[3].nominal, "at_next_start": to_come}
    vms[3] = vms[3].model_copy(update=off)
    return report_of("host-a", *vms, cpu_cores=64.0, memory_mib=64_000.0)


def test_a_slim_report_is_the_same_report() -> None:
    body = report().model_dump_json()
    read, kept = HostReport.model_validate_json(body), slim(HostReport.model_validate_json(body))
    assert kept == read
    assert kept.model_dump_json() == body
    assert kept.model_dump(exclude_unset=True) == read.model_dump(exclude_unset=True)
    changed = kept.vms[0].model_copy(update={"current": Vector(cpu_cores=7.0)})
    assert changed.current.cpu_cores == 7.0
    assert kept.vms[0].current.cpu_cores == 1.0


def test_equal_sizes_are_one_object_across_hosts_and_given_fields_stay_their_own() -> None:
    first, second = slim(report()), slim(HostReport.model_validate_json(report().model_dump_json()))
    assert first.vms[0].nominal is second.vms[0].nominal
    part = HostReport.model_validate({**report().model_dump(exclude={"budget"})})
    assert "budget" not in slim(part).model_fields_set


def test_many_reports_take_less_than_half_of_what_they_take_unslimmed() -> None:
    # No two VMs have the same size, nor had any before.
    bodies = [report(1.0 + number).model_dump_json() for number in range(40)]

    def taken(keep: bool) -> float:
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            kept = [HostReport.model_validate_json(body) for body in bodies]
            if keep:
                kept = [slim(one) for one in kept]
            return (tracemalloc.get_traced_memory()[0] - before) / len(kept)
        finally:
            tracemalloc.stop()

    slim(HostReport.model_validate_json(report().model_dump_json()))
    plain, slimmed = taken(False), taken(True)
    print(f"a report of 20 VMs: {plain / 1000:.1f} kB, slim {slimmed / 1000:.1f} kB")
    assert slimmed < plain / 2
