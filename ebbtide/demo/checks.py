"""Checks of the demo, each a pure function of the report's parts."""

from __future__ import annotations

from collections.abc import Sequence

from ebbtide.deflation.ledger import ENABLING, Layer
from ebbtide.demo.report import Check, VMReport
from ebbtide.lab.readings import Reading
from ebbtide.messages.machines import CoreChange
from ebbtide.messages.operations import VMOutcome

#: A balloon moves in pages and virtio-mem in blocks of 2 MiB: one block is rounding.
BLOCK_MIB = 2.0
CPU_TOLERANCE = 0.011
LAYER_SHARE = 0.1
RESIDENT_EXCESS = 1.05
#: The least resident size of a filled cache, MiB: its guest memory was really touched.
FILLED_MIB = 250.0
#: Part of the hot keys that must answer: the crawler's dump can miss items that move between its lists.
HOT_SHARE = 0.9
RESOURCES = ("cpu_cores", "memory_mib")


def layers_gave(vms: Sequence[VMReport]) -> list[Check]:
    """Each layer gave at least a tenth of what some VM was asked for, in CPU or memory."""
    checks = []
    for layer in (one for one in Layer if one is not Layer.COLD):
        shares = []
        for vm in vms:
            for resource in RESOURCES:
                asked = max((row.asked for row in vm.ledger if row.resource == resource), default=0.0)
                given = sum(row.verified for row in vm.ledger if row.resource == resource and row.layer is layer)
                if asked > 0:
                    shares.append((given / asked, f"{given:g} of {asked:g} {resource} of {vm.name}"))
        best, words = max(shares, default=(0.0, "nothing was asked for"))
        checks.append(_check(f"the {layer.value} layer gave its part", best >= LAYER_SHARE, f"{words} ({best:.0%})"))
    return checks


def adds_up(vm: VMReport) -> Check:
    """What guest and hypervisor layer verified is the fall of the bound, by the independent readings."""
    before, deflated = vm.readings.before, vm.readings.deflated
    falls = {
        "cpu_cores": before.cpu_cores - deflated.cpu_cores,
        "memory_mib": before.memory_mib - deflated.memory_mib,
    }
    wrong, words = False, []
    for resource, tolerance in (("cpu_cores", CPU_TOLERANCE), ("memory_mib", BLOCK_MIB)):
        given = sum(row.verified for row in vm.ledger if row.resource == resource and row.layer not in ENABLING)
        wrong = wrong or abs(given - falls[resource]) > tolerance
        words.append(f"ledger {given:g}, bound fell by {falls[resource]:g} {resource}")
    return _check(f"the ledger of {vm.name} adds up to the fall of its bound", not wrong, "; ".join(words))


def was_filled(name: str, before: Reading) -> Check:
    """Its memory was really touched before anything was taken."""
    detail = f"memcached {before.memcached_rss_mib:g} MiB resident, guest memory {before.resident_mib:g} MiB"
    ok = before.memcached_rss_mib >= FILLED_MIB and before.resident_mib >= before.memcached_rss_mib
    return _check(f"the memory of {name} was really touched", ok, detail)


def resident_follows(name: str, deflated: Reading) -> Check:
    """The host has the memory back: what is resident is at most the bound and a twentieth."""
    limit_mib = deflated.memory_mib * RESIDENT_EXCESS
    detail = f"resident {deflated.resident_mib:g} MiB, bound {deflated.memory_mib:g} MiB"
    return _check(f"the resident memory of {name} fell with its bound", deflated.resident_mib <= limit_mib, detail)


def keys_answer(name: str, when: str, wanted: dict[str, str], found: dict[str, str]) -> Check:
    """The keys used last still answer, and whatever answers has the value that was stored."""
    wrong = [key for key, digest in found.items() if wanted.get(key) != digest]
    share = len(found) / len(wanted) if wanted else 0.0
    detail = f"{len(found)} of {len(wanted)} keys answer, {len(wrong)} with a wrong value"
    return _check(f"the cache of {name} still answers {when}", share >= HOT_SHARE and not wrong, detail)


def is_restored(vm: VMReport) -> Check:
    """All readings are back where they were, resident memory by refilling."""
    before, restored = vm.readings.before, vm.readings.restored
    differences = [
        f"{name}: {was} before, {now} now"
        for name, was, now, same in (
            ("CPUs on line", before.cpus_online, restored.cpus_online, before.cpus_online == restored.cpus_online),
            ("cores", before.cpu_cores, restored.cpu_cores, abs(before.cpu_cores - restored.cpu_cores) < CPU_TOLERANCE),
            _memory("virtio-mem", before.virtio_mem_current_mib, restored.virtio_mem_current_mib, BLOCK_MIB),
            _memory("balloon actual", before.balloon_actual_mib, restored.balloon_actual_mib, BLOCK_MIB),
            _memory("memcached's limit", before.memcached_limit_mib, restored.memcached_limit_mib, BLOCK_MIB),
            _memory("memcached's resident size", before.memcached_rss_mib, restored.memcached_rss_mib, 32.0),
        )
        if not same
    ]
    return _check(f"{vm.name} is back at its nominal size", not differences, "; ".join(differences) or "all readings")


def _memory(name: str, was: float, now: float, tolerance: float) -> tuple[str, float, float, bool]:
    return name, was, now, now >= was - tolerance


def cores_were_reported(name: str, changes: Sequence[CoreChange], outcome: VMOutcome) -> Check:
    """The matcher heard of the shrink and of the growth that followed."""
    steps = [(change.cores_before, change.cores_after) for change in sorted(changes, key=lambda c: c.sequence)]
    low = outcome.after.cpu_cores
    shrank = any(before > after and abs(after - low) < CPU_TOLERANCE for before, after in steps)
    grew = any(after > before and abs(before - low) < CPU_TOLERANCE for before, after in steps)
    words = ", ".join(f"{before:g} to {after:g}" for before, after in steps) or "none"
    return _check(f"the core changes of {name} were reported", shrank and grew, words)


def _check(name: str, ok: bool, detail: str) -> Check:
    return Check(name=name, ok=bool(ok), detail=detail)
