"""What a host's report comes to as one row each for it and its VMs."""

from __future__ import annotations

import math

from cluster_manager.history.packs import AT
from cluster_manager.history.sampling import sample_of, used_by
from ebbtide.messages.common import Vector
from ebbtide.messages.history import HostUsage, VMUsage
from tests.manager.plan_events import report_of, spec_of, status_of


def test_a_host_has_no_sum_of_what_is_not_known_of_one_of_its_vms_but_of_what_is_resident() -> None:
    half = Vector(cpu_cores=1.5, memory_mib=500.0)
    vms = [status_of(spec_of(name, "deflatable", 3.0, 1000.0), "a", half) for name in ("said", "silent")]
    usage = VMUsage(name="said", resident_memory_mib=600.0, guest_cpu_cores=1.0, guest_memory_mib=500.0)
    names, rows = sample_of(report_of("a", *vms), used_by(HostUsage(vms=(usage,))))
    host = dict(zip(AT, rows[0].tolist(), strict=False))
    assert names == ("", "said", "silent")
    assert (host["nominal_cpu_cores"], host["bound_memory_mib"]) == (6.0, 1000.0)
    assert host["resident_memory_mib"] == 600.0, "the sum of those that are known"
    for layer in ("application", "guest", "hypervisor"):
        assert math.isnan(host[f"{layer}_cpu_cores"]), layer
    _, rows = sample_of(report_of("a", vms[0]), used_by(HostUsage(vms=(usage,))))
    assert rows[0, AT["guest_cpu_cores"]] == 1.0
