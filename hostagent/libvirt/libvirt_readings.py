"""Readings of a domain through libvirt. Every function here blocks: call them in the pool.

What each call reads was checked on libvirt 9.0 with QEMU 7.2 (docs/internals/contracts.md, concurrency with libvirt).
"""

from __future__ import annotations

import time
import xml.etree.ElementTree as ElementTree
from typing import Any, Final

import libvirt

from ebbtide.deflation.cascade.ordinary import Statement
from hostagent.domain_xml.dimms import takeable_dimms
from hostagent.libvirt import plugged
from hostagent.libvirt.hypervisor import DomainSummary, HostSideReading
from hostagent.limits import bandwidth
from hostagent.limits.footprints import memory_of, read_limit_mib
from hostagent.mechanisms.fixes import QEMU_AGENT
from hostagent.state.intents import CpuLimits

#: Quota periods in us; the longer one is for shares so small that the quota would fall under libvirt's 1000 us.
PERIODS_US: Final = (100_000, 1_000_000)
LEAST_QUOTA_US: Final = 1_000
#: Statistics of the balloon driver older than this say nothing of now, in seconds: some drivers stop updating them.
FRESH_S: Final = 5.0
#: What libvirt says for no limit under cgroup v2; -1 under v1 (https://libvirt.org/formatdomain.html#cpu-tuning).
NO_QUOTA_US: Final = 17592186044415
#: States in which vCPUs run, or would if they had not been paused (virDomainState); all others are "stopped".
STATES: Final = {
    libvirt.VIR_DOMAIN_RUNNING: "running",
    libvirt.VIR_DOMAIN_BLOCKED: "running",
    libvirt.VIR_DOMAIN_SHUTDOWN: "running",
    libvirt.VIR_DOMAIN_PAUSED: "paused",
    libvirt.VIR_DOMAIN_PMSUSPENDED: "paused",
    # Its guest panicked, and its definition has QEMU kept with all that it holds (on_crash).
    libvirt.VIR_DOMAIN_CRASHED: "paused",
}


def affected(domain: Any) -> int:
    """What of a domain can be changed: what runs, where it does, and its definition, where it has one.

    One that its owner undefines while it runs goes on without.
    """
    live = libvirt.VIR_DOMAIN_AFFECT_LIVE if domain.isActive() else 0
    return int(live | (libvirt.VIR_DOMAIN_AFFECT_CONFIG if domain.isPersistent() else 0))


def quota_parameters(cores_per_cpu: float | None) -> dict[str, int]:
    """libvirt's scheduler parameters for a limit per vCPU thread; None and a whole core lift the limit.

    libvirt refuses a quota under 1000 us and silently ignores 0, so small shares get a longer period.
    """
    if cores_per_cpu is None or cores_per_cpu >= 1.0:
        return {"vcpu_period": PERIODS_US[0], "vcpu_quota": -1}
    for period in PERIODS_US:
        quota = int(cores_per_cpu * period)
        if quota >= LEAST_QUOTA_US:
            break
    return {"vcpu_period": period, "vcpu_quota": max(quota, LEAST_QUOTA_US)}


def cap_parameters(cap_cores: float | None) -> dict[str, int]:
    """libvirt's scheduler parameters for a cap of the whole domain; None lifts it."""
    if cap_cores is None:
        return {"global_period": PERIODS_US[0], "global_quota": -1}
    return {"global_period": PERIODS_US[0], "global_quota": max(round(cap_cores * PERIODS_US[0]), LEAST_QUOTA_US)}


def limit_cpu(domain: Any, cores_per_cpu: float | None, cap_cores: float | None, flag: int) -> None:
    """Set the quota of each vCPU and the cap of the domain, which is never lifted meanwhile.

    cgroup v1 refuses a child's quota above its parent's, so that a larger cap comes first and a smaller one last. One
    that stays is not written: the kernel fills up what is left of a period at each write.
    """
    now, cap = limit_cores(domain.schedulerParametersFlags(flag), "global"), cap_parameters(cap_cores)
    steps = [quota_parameters(cores_per_cpu)]
    if limit_cores(cap, "global") != now:
        steps.insert(0 if now is not None and (cap_cores is None or cap_cores > now) else 1, cap)
    for step in steps:
        domain.setSchedulerParametersFlags(step, flag)


def periods_of(scheduler: dict[str, Any]) -> dict[str, int | None]:
    """The periods of an owner's limits, as `CpuLimits` has them: None where they are the usual ones."""
    given = {f"{whose}_period_us": scheduler.get(f"{whose}_period", 0) for whose in ("vcpu", "global")}
    return {field: us if us > 0 and us != PERIODS_US[0] else None for field, us in given.items()}


def restore_periods(domain: Any, was: CpuLimits, flag: int) -> None:
    """Write an owner's limits in the periods that they had, where these are not the usual ones.

    cgroup v1 refuses a child's quota above its parent's: on the way a vCPU's share falls, and the domain's rises.
    """
    now = domain.schedulerParametersFlags(flag)
    for whose, cores, period in (
        ("vcpu", was.quota_per_cpu, was.vcpu_period_us),
        ("global", was.cap_cores, was.global_period_us),
    ):
        if period is None:
            continue
        steps = [{f"{whose}_period": period}]
        if cores is not None:
            quota_first = (period < now.get(f"{whose}_period", 0)) == (whose == "vcpu")
            steps.insert(0 if quota_first else 1, {f"{whose}_quota": round(cores * period)})
        for step in steps:
            domain.setSchedulerParametersFlags(step, flag)


def reading_of(domain: Any) -> tuple[HostSideReading, ElementTree.Element]:
    """What libvirt knows, and the domain's XML; limits on interfaces are read by ``tc``."""
    root = ElementTree.fromstring(domain.XMLDesc())
    memory = plugged.Plugged.of(root)
    vcpu = root.find("vcpu")
    scheduler = domain.schedulerParametersFlags(libvirt.VIR_DOMAIN_AFFECT_LIVE)
    stats = domain.memoryStats()
    read_at = time.time()
    takeable_mib = _takeable_mib(domain, root) if memory.dimms else ()
    # What is dated ahead is of before the clock was set back.
    fresh = abs(read_at - stats.get("last_update", 0)) <= FRESH_S
    reading = HostSideReading(
        vcpus=int(vcpu.get("current") or vcpu.text or 0) if vcpu is not None else 0,
        quota_per_cpu=limit_cores(scheduler, "vcpu"),
        cap_cores=limit_cores(scheduler, "global"),
        balloon_mib=_balloon_mib(stats, root, memory),
        # What a booting guest has been given and not taken yet is its own already.
        plugged_mib=memory.allowed_mib,
        dimms_mib=takeable_mib,
        fixed_mib=sum(memory.dimms_mib) - sum(takeable_mib),
        cpu_shares=scheduler.get("cpu_shares"),
        disk_mib_s=bandwidth.disk_limit(domain, root),
        limit_mib=read_limit_mib(domain, root),
        usable_mib=stats["usable"] / 1024 if fresh and "usable" in stats else None,
        usable_at=stats.get("last_update", 0),
        statement=statement_of(stats),
        read_at=read_at,
        stats_period_s=stats_period_s(root),
        qemu_agent=has_qemu_agent(root),
        # QEMU tells libvirt of virtio-mem once a second at most, and libvirt asks for nothing itself.
        plugged_lags=memory.device is not None and not memory.dimms,
    )
    return reading, root


def _balloon_mib(stats: dict[str, Any], root: ElementTree.Element, memory: plugged.Plugged) -> float:
    """What the balloon leaves of the boot memory; without a balloon, all of it."""
    if "actual" not in stats:
        return memory_of(root)[0]
    # QEMU counts DIMMs among what the balloon could take, virtio-mem not.
    return float(stats["actual"]) / 1024 - sum(memory.dimms_mib)


def has_qemu_agent(root: ElementTree.Element) -> bool:
    """Whether a qemu-guest-agent has opened the channel of a running domain."""
    return root.find(f"./devices/channel/target[@name='{QEMU_AGENT}'][@state='connected']") is not None


def stats_period_s(root: ElementTree.Element) -> int | None:
    """How often the balloon driver is asked for statistics, seconds; 0: never; None: there is no balloon."""
    device = root.find("./devices/memballoon")
    if device is None or device.get("model") == "none":
        return None
    stats = device.find("stats")
    return int(stats.get("period") or 0) if stats is not None else 0


def statement_of(stats: dict[str, Any]) -> Statement | None:
    """What a domain's balloon driver said last, from its ``memoryStats``; None: nothing that counts."""
    return _statement(stats | {"last-update": stats.get("last_update")})


def _statement(stats: dict[str, Any], prefix: str = "") -> Statement | None:
    """What a balloon driver said, from either of libvirt's dictionaries; None: it has not said what counts."""
    usable_kib, said_at = stats.get(f"{prefix}usable", stats.get(f"{prefix}unused")), stats.get(f"{prefix}last-update")
    if usable_kib is None or not said_at:
        return None
    total_kib, swapped_kib = stats.get(f"{prefix}available"), stats.get(f"{prefix}swap_in")
    return Statement(
        said_at,
        usable_kib / 1024,
        total_kib / 1024 if total_kib is not None else None,
        stats.get(f"{prefix}major_fault"),
        swapped_kib / 1024 if swapped_kib is not None else None,
    )


def limit_cores(scheduler: dict[str, Any], whose: str) -> float | None:
    """A limit out of libvirt's scheduler parameters, "vcpu" or "global"; None: there is none."""
    quota, period = scheduler.get(f"{whose}_quota", -1), scheduler.get(f"{whose}_period", PERIODS_US[0])
    return quota / period if 0 < quota < NO_QUOTA_US and period > 0 else None


def cpu_seconds_of(domain: Any) -> float:
    """Host-side CPU time of all vCPU threads, seconds."""
    return float(sum(row[2] for row in domain.vcpus()[0]) / 1e9)


def _takeable_mib(domain: Any, root: ElementTree.Element) -> tuple[float, ...]:
    config = ElementTree.fromstring(domain.XMLDesc(libvirt.VIR_DOMAIN_XML_INACTIVE))
    return tuple(plugged.size_mib(dimm) for dimm in takeable_dimms(root, config))


def dimms_mib_of(domain: Any) -> float:
    """All DIMMs of a running domain, MiB."""
    return sum(plugged.Plugged.of(ElementTree.fromstring(domain.XMLDesc())).dimms_mib)


def balloon_mib_of(domain: Any, dimms_mib: float) -> float:
    """What the balloon leaves of the boot memory, and nothing else: for those who look often."""
    return float(domain.memoryStats()["actual"]) / 1024 - dimms_mib


def vcpu_seconds(stats: dict[str, Any]) -> tuple[float, ...]:
    """The CPU time of each vCPU that is plugged, in the order of libvirt's numbers, between which some may be free: the
    guest's order, but for one that was plugged into a gap since it booted. Empty where a busy domain says nothing.
    """
    plugged = sorted(int(key.split(".")[1]) for key in stats if key.startswith("vcpu.") and key.endswith(".time"))
    return tuple(stats[f"vcpu.{number}.time"] / 1e9 for number in plugged)


def summary_of(domain: Any, stats: dict[str, Any]) -> DomainSummary:
    """One row of virConnectGetAllDomainStats."""
    vcpus = int(stats.get("vcpu.current", 0))
    state = stats.get("state.state", libvirt.VIR_DOMAIN_NOSTATE)
    return DomainSummary(
        domain.UUIDString(),
        STATES.get(state, "stopped"),
        vcpus,
        vcpu_seconds(stats) or (0.0,) * vcpus,
        stats.get("balloon.current", 0) / 1024,
        stats["balloon.usable"] / 1024 if "balloon.usable" in stats else None,
        stats.get("balloon.major_fault"),
        stats.get("balloon.last-update"),
        _statement(stats, "balloon."),
    )


def state_of(domain: Any) -> str:
    """Running, paused or stopped, in these words."""
    return STATES.get(domain.state()[0], "stopped")
