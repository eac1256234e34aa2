"""Plan of the settings by which a heap gets a size. Pure: figures in, settings in their order out.

Shenandoah and ZGC have a soft limit (SoftMaxHeapSize). G1 and Serial have none that works: they give back what is free
beyond MaxHeapFreeRatio when they collect everything. Parallel keeps what it has.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Mapping, Tuple

from app_adapters.adapter import FULL_SHARE
from app_adapters.jvm.flags import MIB, Flags, collector, is_on, number, size_mib

SOFT = "SoftMaxHeapSize"
MINIMUM_FREE = "MinHeapFreeRatio"
MAXIMUM_FREE = "MaxHeapFreeRatio"
PERIOD = "G1PeriodicGCInterval"
#: All that is ever set; their original values are kept.
MANAGED = (SOFT, MINIMUM_FREE, MAXIMUM_FREE, PERIOD)
#: Of the live set. A concurrent collector without room above it never stops collecting.
CONCURRENT_ROOM = 1.2
LOWEST_RATIO = 5
PERIOD_MS = 3000
#: ShrinkHeapInSteps gives 0, 10, 40 and 100 % in four collections in a row (serial: cardGeneration.cpp).
SHRINK_STEPS = 4
#: Without a collection so far nothing is known about the live set.
SMALLEST_HEAP_MIB = 16.0
SETTLE_S = {"Shenandoah": 1.5, "ZGC": 4.0, "G1": 2.0, "Serial": 0.5}

Setting = Tuple[str, str]


@dataclass(frozen=True)
class Plan:
    """Flags to set, in this order, and how many collections are needed then."""

    settings: tuple[Setting, ...]
    collections: int
    notes: tuple[str, ...] = field(default=())


@dataclass(frozen=True)
class Unsupported:
    """This JVM cannot give memory back, or not in time; one sentence why."""

    reason: str


def obstacle(flags: Flags, deadline_s: float = math.inf) -> str:
    """Why this JVM gives nothing within the time, empty where it can."""
    name = collector(flags)
    if name not in SETTLE_S:
        return f"the {name or 'unknown'} collector gives no memory back while the JVM runs"
    if size_mib(flags, "MinHeapSize") >= size_mib(flags, "MaxHeapSize") or (
        "MinHeapSize" not in flags and size_mib(flags, "InitialHeapSize") >= size_mib(flags, "MaxHeapSize")
    ):
        return "the heap is frozen at one size (-Xms as large as -Xmx)"
    needed = (SOFT,) if name in ("Shenandoah", "ZGC") else (MINIMUM_FREE, MAXIMUM_FREE)
    for flag in needed:
        if flag not in flags or not flags[flag].manageable:
            return f"this JVM's {flag} cannot be set while it runs"
    if name == "Shenandoah" and not is_on(flags, "ShenandoahUncommit"):
        # It is also switched off by the JVM itself.
        cause = "-XX:-ShenandoahUncommit, -XX:+AlwaysPreTouch, or a heap that begins as large as -Xmx: set a small -Xms"
        return f"Shenandoah gives nothing back ({cause})"
    if name == "ZGC" and not is_on(flags, "ZUncommit"):
        return "ZGC runs with -XX:-ZUncommit, so it gives nothing back"
    if name in ("G1", "Serial") and is_on(flags, "DisableExplicitGC"):
        return f"{name} gives memory back when it is told to collect, which -XX:+DisableExplicitGC forbids"
    delay_s = uncommit_delay_s(flags)
    if delay_s > 0 and delay_s >= deadline_s:
        return (
            f"ZGC gives memory back only {delay_s:g} s after its use (-XX:ZUncommitDelay), too late for this deadline"
        )
    return ""


def uncommit_delay_s(flags: Flags) -> float:
    """Seconds that free memory stays. Shenandoah's own delay does not hold for a collection that was asked for."""
    return number(flags, "ZUncommitDelay") if collector(flags) == "ZGC" else 0.0


def is_concurrent(flags: Flags) -> bool:
    """Whether it collects beside the application, and all the time where its limit is too low."""
    return collector(flags) in ("Shenandoah", "ZGC")


def settles_first(flags: Flags) -> bool:
    """Whether memory must be back before the limit is set: at a new one Shenandoah 25 breaks off giving back."""
    return collector(flags) == "Shenandoah"


def settle_s(flags: Flags) -> float:
    """How long nothing comes back before it is clear that nothing more will."""
    return SETTLE_S.get(collector(flags), 0.0) + uncommit_delay_s(flags)


def expected_s(flags: Flags) -> float:
    """A guess at the seconds of a deflation, before one was measured."""
    delay_s = uncommit_delay_s(flags)
    steps = SHRINK_STEPS if collector(flags) == "Serial" and is_on(flags, "ShrinkHeapInSteps") else 1
    return 2.0 * delay_s + SETTLE_S.get(collector(flags), 0.0) + 0.5 * steps


def heap_floor_mib(flags: Flags, live_mib: float) -> float:
    """The smallest heap that the JVM can be brought to with such a live set."""
    name = collector(flags)
    floor_mib = live_mib * (CONCURRENT_ROOM if name in ("Shenandoah", "ZGC") else 1 / (1 - LOWEST_RATIO / 100))
    if name == "Serial":
        # Its old generation never becomes smaller than it was at first (-Xms, or a part of the machine's memory).
        first_mib = size_mib(flags, "InitialHeapSize") - size_mib(flags, "NewSize")
        old_mib = max(floor_mib, first_mib)
        floor_mib = old_mib + _young_mib(flags, old_mib)
    return max(floor_mib, size_mib(flags, "MinHeapSize"), SMALLEST_HEAP_MIB)


def heap_ceiling_mib(flags: Flags, originals: Mapping[str, str]) -> float:
    """The heap that the JVM was set up for: a soft limit of its own counts."""
    is_soft = SOFT in flags and collector(flags) in ("Shenandoah", "ZGC")
    soft_mib = float(originals.get(SOFT, flags[SOFT].value)) / MIB if is_soft else 0.0
    return min(soft_mib or math.inf, size_mib(flags, "MaxHeapSize"))


def plan(flags: Flags, live_mib: float, heap_mib: float, deadline_s: float = math.inf) -> Plan | Unsupported:
    """How the heap comes down to `heap_mib`, or to as little as the live set allows. Never raises a limit."""
    problem = obstacle(flags, deadline_s)
    if problem:
        return Unsupported(problem)
    name = collector(flags)
    floor_mib = heap_floor_mib(flags, live_mib)
    notes = []
    if heap_mib < floor_mib:
        notes.append(f"the heap needs {floor_mib:.0f} MiB for {live_mib:.0f} MiB that live")
    size = max(heap_mib, floor_mib)
    collections = 0 if is_on(flags, "DisableExplicitGC") else 1
    if name in ("Shenandoah", "ZGC"):
        if "ShenandoahGCMode" in flags and name == "Shenandoah" and flags["ShenandoahGCMode"].value == "generational":
            notes.append("generational Shenandoah may not heed SoftMaxHeapSize (JDK-8358529)")
        limit = min(int(size * MIB), int(number(flags, SOFT)) or int(size * MIB))
        return Plan(_changes(flags, [(SOFT, str(limit))]), collections, tuple(notes))
    ratio = min(free_ratio(flags, live_mib, size), int(number(flags, MAXIMUM_FREE, 100)))
    settings = pair(flags, min(int(number(flags, MINIMUM_FREE)), ratio // 2), ratio)
    if name == "G1":
        if PERIOD in flags and flags[PERIOD].manageable:
            now_ms = int(number(flags, PERIOD))
            settings += _changes(flags, [(PERIOD, str(min(now_ms or PERIOD_MS, PERIOD_MS)))])
        else:
            notes.append("G1 here has no periodic collection, so the heap may grow again")
    elif is_on(flags, "ShrinkHeapInSteps"):
        collections = SHRINK_STEPS
        notes.append("Serial shrinks in steps, each a full collection; -XX:-ShrinkHeapInSteps needs one")
    return Plan(settings, collections, tuple(notes))


def free_ratio(flags: Flags, live_mib: float, heap_mib: float) -> int:
    """MaxHeapFreeRatio, in percent, by which a heap with such a live set ends at such a size, or below."""
    old_mib = heap_mib
    if collector(flags) == "Serial":
        # The ratio holds for the old generation; the young one follows it (NewRatio), within bounds of its own.
        old_mib = max(heap_mib * (1 - 1 / (1 + _new_ratio(flags))), 0.0)
        old_mib = min(old_mib, heap_mib - size_mib(flags, "NewSize"))
    ratio = math.floor(100 * (old_mib - live_mib) / old_mib) if old_mib > live_mib else 0
    return max(min(ratio, 100), LOWEST_RATIO)


def growth(flags: Flags, originals: Mapping[str, str], live_mib: float, heap_mib: float) -> tuple[Setting, ...]:
    """Settings for a heap that may be `heap_mib` again: the original ones where it is as large as ever.

    `originals` are those of the flags that a deflation has changed. Never lowers a limit.
    """
    if heap_mib >= heap_ceiling_mib(flags, originals):
        return restoration(flags, originals)
    settings: tuple[Setting, ...] = ()
    if SOFT in originals:
        limit = max(int(number(flags, SOFT)), int(heap_mib * MIB))
        settings += _changes(flags, [(SOFT, str(limit))])
    if MAXIMUM_FREE in originals:
        lowest, highest = (int(float(originals.get(name, flags[name].value))) for name in (MINIMUM_FREE, MAXIMUM_FREE))
        ratio = min(max(free_ratio(flags, live_mib, heap_mib), int(number(flags, MAXIMUM_FREE))), highest)
        settings += pair(flags, max(min(lowest, ratio // 2), int(number(flags, MINIMUM_FREE))), ratio)
    if PERIOD in originals and heap_mib >= FULL_SHARE * heap_ceiling_mib(flags, originals):
        settings += _changes(flags, [(PERIOD, originals[PERIOD])])
    return settings


def restoration(flags: Flags, originals: Mapping[str, str]) -> tuple[Setting, ...]:
    """Settings that bring every changed flag back to its very original value, in an order that the JVM takes."""
    settings: tuple[Setting, ...] = ()
    if MINIMUM_FREE in originals or MAXIMUM_FREE in originals:
        lowest, highest = (int(float(originals.get(name, flags[name].value))) for name in (MINIMUM_FREE, MAXIMUM_FREE))
        settings += pair(flags, lowest, highest)
    others = [(name, originals[name]) for name in (SOFT, PERIOD) if name in originals]
    return settings + _changes(flags, others)


def pair(flags: Flags, lowest: int, highest: int) -> tuple[Setting, ...]:
    """Both free ratios, in an order in which the lower one never exceeds the upper one: the JVM refuses that."""
    settings: list[Setting] = [(MINIMUM_FREE, str(lowest)), (MAXIMUM_FREE, str(highest))]
    if lowest > number(flags, MAXIMUM_FREE, 100):
        settings.reverse()
    return _changes(flags, settings)


def _changes(flags: Flags, settings: list[Setting]) -> tuple[Setting, ...]:
    return tuple((name, value) for name, value in settings if name in flags and flags[name].value != value)


def _new_ratio(flags: Flags) -> float:
    return max(number(flags, "NewRatio", 2.0), 1.0)


def _young_mib(flags: Flags, old_mib: float) -> float:
    largest_mib = size_mib(flags, "MaxNewSize") or math.inf
    return min(max(old_mib / _new_ratio(flags), size_mib(flags, "NewSize")), largest_mib)
