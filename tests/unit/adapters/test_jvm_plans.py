"""What a JVM is told: pure decisions, applied to flags that refuse what a real JVM refuses."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app_adapters.jvm import plans
from app_adapters.jvm.flags import MIB, Flag, Flags, with_value
from app_adapters.jvm.plans import Plan, Setting, Unsupported


def flags(collector: str, **values: object) -> Flags:
    """Flags of a JVM with -Xmx1g."""
    defaults: dict[str, object] = {
        "MaxHeapSize": 1024 * MIB,
        "MinHeapSize": 8 * MIB,
        "InitialHeapSize": 32 * MIB,
        "NewSize": 10 * MIB,
        "MaxNewSize": 341 * MIB,
        "NewRatio": 2,
        "SoftMaxHeapSize": 1024 * MIB,
        "MinHeapFreeRatio": 40,
        "MaxHeapFreeRatio": 70,
        "G1PeriodicGCInterval": 0,
        "ShenandoahUncommit": "true",
        "ShenandoahGCMode": "satb",
        "ZUncommit": "true",
        "ZUncommitDelay": 300,
        "ShrinkHeapInSteps": "true",
        "DisableExplicitGC": "false",
        f"Use{'ZGC' if collector == 'ZGC' else collector + 'GC'}": "true",
    }
    return {
        name: Flag(name, str(value), name in plans.MANAGED)
        for name, value in {**defaults, **values}.items()
        if value is not None
    }


def applied(now: Flags, settings: tuple[Setting, ...]) -> Flags:
    """The flags after the settings; each one must be taken by a JVM."""
    for name, value in settings:
        assert now[name].manageable
        now = with_value(now, name, value)
        assert 0 <= int(now["MinHeapFreeRatio"].value) <= int(now["MaxHeapFreeRatio"].value) <= 100, settings
        assert int(now["SoftMaxHeapSize"].value) <= int(now["MaxHeapSize"].value)
    return now


def planned(now: Flags, live_mib: float, heap_mib: float, deadline_s: float = math.inf) -> Plan:
    made = plans.plan(now, live_mib, heap_mib, deadline_s)
    assert isinstance(made, Plan), made
    return made


def test_concurrent_collectors_get_a_soft_limit() -> None:
    assert planned(flags("Shenandoah"), 100, 256) == Plan((("SoftMaxHeapSize", str(256 * MIB)),), 1, ())
    assert planned(flags("ZGC"), 100, 256, 400).settings == (("SoftMaxHeapSize", str(256 * MIB)),)


def test_a_soft_limit_leaves_room_above_what_lives() -> None:
    made = planned(flags("Shenandoah"), 100, 50)
    assert made.settings == (("SoftMaxHeapSize", str(120 * MIB)),)
    assert "needs 120 MiB for 100 MiB that live" in made.notes[0]


def test_no_heap_goes_below_the_size_it_was_given() -> None:
    assert planned(flags("Shenandoah", MinHeapSize=300 * MIB), 100, 50).settings == (
        ("SoftMaxHeapSize", str(300 * MIB)),
    )
    serial = flags("Serial", InitialHeapSize=378 * MIB, NewSize=126 * MIB)
    assert plans.heap_floor_mib(serial, 60) == 252 + 126


def test_g1_gets_both_ratios_the_lower_first_and_collects_by_itself_from_then_on() -> None:
    made = planned(flags("G1"), 100, 125)
    assert made.settings == (("MinHeapFreeRatio", "10"), ("MaxHeapFreeRatio", "20"), ("G1PeriodicGCInterval", "3000"))
    often = planned(flags("G1", G1PeriodicGCInterval=500), 100, 125).settings
    assert "G1PeriodicGCInterval" not in dict(often)


def test_serial_needs_one_collection_or_several() -> None:
    assert planned(flags("Serial"), 100, 256).collections == plans.SHRINK_STEPS
    made = planned(flags("Serial", ShrinkHeapInSteps="false"), 100, 256)
    assert made.collections == 1
    # 256 MiB: 171 of old generation, of which 100 live.
    assert dict(made.settings)["MaxHeapFreeRatio"] == "41"


@pytest.mark.parametrize(
    ("now", "reason"),
    [
        (flags("Parallel"), "the Parallel collector"),
        (flags("Epsilon"), "the Epsilon collector"),
        (flags("New"), "the unknown collector"),
        (flags("G1", MinHeapSize=1024 * MIB), "frozen"),
        (flags("G1", MinHeapSize=None, InitialHeapSize=1024 * MIB), "frozen"),
        (flags("ZGC", SoftMaxHeapSize=None), "SoftMaxHeapSize cannot be set"),
        (flags("G1", MaxHeapFreeRatio=None), "MaxHeapFreeRatio cannot be set"),
        (flags("Shenandoah", ShenandoahUncommit="false"), "ShenandoahUncommit"),
        (flags("ZGC", ZUncommit="false"), "-XX:-ZUncommit"),
        (flags("ZGC"), "only 300 s after"),
        (flags("Serial", DisableExplicitGC="true"), "DisableExplicitGC"),
    ],
)
def test_what_cannot_be_done_is_said(now: Flags, reason: str) -> None:
    made = plans.plan(now, 100, 256, 60)
    assert isinstance(made, Unsupported)
    assert reason in made.reason


def test_zgc_in_time_is_expected_to_take_its_delay() -> None:
    assert plans.expected_s(flags("ZGC")) > 300
    assert plans.settle_s(flags("ZGC", ZUncommitDelay=2)) > 2
    assert plans.obstacle(flags("ZGC"), 301) == ""


def test_without_explicit_collections_the_soft_limit_works_alone() -> None:
    assert planned(flags("Shenandoah", DisableExplicitGC="true"), 100, 256).collections == 0


def test_generational_shenandoah_is_marked() -> None:
    assert "JDK-8358529" in planned(flags("Shenandoah", ShenandoahGCMode="generational"), 100, 256).notes[0]


RATIOS = st.tuples(st.integers(0, 100), st.integers(0, 100)).map(sorted)
SIZES = st.floats(0, 1200)
COLLECTORS = st.sampled_from(["Shenandoah", "ZGC", "G1", "Serial"])


@given(collector=COLLECTORS, ratios=RATIOS, soft=st.integers(8, 1024), moves=st.lists(st.tuples(SIZES, SIZES)))
def test_every_step_is_one_that_a_jvm_takes_and_the_end_is_the_beginning(
    collector: str, ratios: list[int], soft: int, moves: list[tuple[float, float]]
) -> None:
    """Deflated and reinflated to any sizes with any live sets, then to the full size: all values are as they were."""
    first = now = flags(
        collector, MinHeapFreeRatio=ratios[0], MaxHeapFreeRatio=ratios[1], SoftMaxHeapSize=soft * MIB, ZUncommitDelay=1
    )
    originals: dict[str, str] = {}
    for i, (live_mib, heap_mib) in enumerate(moves):
        before = now
        if i % 3 < 2:
            settings = planned(now, live_mib, heap_mib).settings
            originals = {**{name: now[name].value for name, _ in settings}, **originals}
            now = applied(now, settings)
            for name in ("SoftMaxHeapSize", "MinHeapFreeRatio", "MaxHeapFreeRatio"):
                assert int(now[name].value) <= int(before[name].value), "a deflation raises nothing"
        else:
            now = applied(now, plans.growth(now, originals, live_mib, heap_mib))
            for name in ("SoftMaxHeapSize", "MinHeapFreeRatio", "MaxHeapFreeRatio"):
                assert int(before[name].value) <= int(now[name].value) <= int(first[name].value)
    ceiling_mib = plans.heap_ceiling_mib(now, originals)
    assert applied(now, plans.growth(now, originals, 0, ceiling_mib)) == first


@given(now=RATIOS, wanted=RATIOS)
def test_the_ratios_never_cross(now: list[int], wanted: list[int]) -> None:
    before = flags("G1", MinHeapFreeRatio=now[0], MaxHeapFreeRatio=now[1])
    after = applied(before, plans.pair(before, wanted[0], wanted[1]))
    assert [int(after[name].value) for name in (plans.MINIMUM_FREE, plans.MAXIMUM_FREE)] == wanted


@given(live_mib=st.floats(1, 900), heap_mib=st.floats(1, 1200))
def test_a_ratio_ends_at_the_size_or_below_it(live_mib: float, heap_mib: float) -> None:
    ratio = plans.free_ratio(flags("G1"), live_mib, heap_mib)
    if ratio > plans.LOWEST_RATIO:
        assert live_mib / (1 - ratio / 100) <= heap_mib + 0.001


def test_a_passed_deadline_is_no_uncommit_delay() -> None:
    assert plans.obstacle(flags("Shenandoah"), 0.0) == ""
    assert plans.obstacle(flags("Serial"), 0.0) == ""
    assert "ZUncommitDelay" in plans.obstacle(flags("ZGC"), 0.0)


def test_g1_stops_collecting_by_itself_once_it_is_nearly_full_and_not_before() -> None:
    """Full size may never be offered in full: the guest keeps a reserve."""
    now = flags("G1")
    small = applied(now, planned(now, 50, 150).settings)
    assert small["G1PeriodicGCInterval"].value != "0"
    originals = {name: now[name].value for name in ("MinHeapFreeRatio", "MaxHeapFreeRatio", "G1PeriodicGCInterval")}
    half = applied(small, plans.growth(small, originals, 0, 512))
    assert half["G1PeriodicGCInterval"].value == small["G1PeriodicGCInterval"].value
    large = applied(small, plans.growth(small, originals, 50, 1000))
    assert large["MaxHeapFreeRatio"].value == originals["MaxHeapFreeRatio"]
    assert large["G1PeriodicGCInterval"].value == originals["G1PeriodicGCInterval"]
