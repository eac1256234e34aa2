"""Growth with patience: sizes follow room that stays, and do not flap with room that comes and goes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbtide.deflation.allocations import Allocation, Priority
from ebbtide.deflation.resources import ZERO, ResourceVector
from ebbtide.deflation.sharing.hysteresis import LONGEST_GAP_S, Pace, RoomWatch
from ebbtide.deflation.sharing.proportional import share_room, split_need
from tests.unit.deflation.strategies import hosts, needs, runs

PACE = Pace(hold_s=20.0, rest_s=30.0, large_share=0.25)
NOMINAL, MINIMUM = ResourceVector(4, 4096), ResourceVector(0.5, 512)


def vm(name: str, cores: float, memory_mib: float = 4096.0) -> Allocation:
    return Allocation(name, Priority.DEFLATABLE, NOMINAL, MINIMUM, ResourceVector(cores, memory_mib))


def watched(until: float, rows: list[Allocation], room: ResourceVector, every: float = 2.0) -> RoomWatch:
    watch, now = RoomWatch(PACE), 0.0
    while now <= until:
        watch.observe(now, rows, room)
        now += every
    return watch


def test_little_room_is_given_when_it_has_been_there_for_the_hold_time() -> None:
    rows, room = [vm("a", 3)], ResourceVector(0.5)
    assert watched(18.0, rows, room).grown(18.0, rows, room) == {}
    assert watched(20.0, rows, room).grown(20.0, rows, room) == {"a": ResourceVector(3.5, 4096)}


def test_much_room_is_given_at_once() -> None:
    rows, room = [vm("a", 2)], ResourceVector(1.0)
    assert watched(0.0, rows, room).grown(0.0, rows, room) == {"a": ResourceVector(3, 4096)}


def test_a_vm_that_was_shrunk_lately_rests_unless_it_is_under_pressure() -> None:
    watch = watched(60.0, [vm("a", 4)], ZERO)
    rows, room = [vm("a", 2)], ResourceVector(2)
    watch.observe(62.0, rows, room)
    assert watch.grown(62.0, rows, room) == {}
    assert watch.grown(62.0, rows, room, pressed={"a"}) == {"a": NOMINAL}
    for now in range(64, 94, 2):
        watch.observe(now, rows, room)
    assert watch.grown(92.0, rows, room) == {"a": NOMINAL}


def test_of_what_comes_and_goes_only_the_least_is_given() -> None:
    rows = [vm("a", 3.5, 2000)]
    watch = RoomWatch(PACE)
    for step in range(16):
        watch.observe(step * 2.0, rows, ResourceVector(memory_mib=100.0 + 300.0 * (step % 2)))
    assert watch.grown(30.0, rows, ResourceVector(memory_mib=400)) == {"a": ResourceVector(3.5, 2100)}


def test_room_that_was_given_is_not_given_again() -> None:
    watch, rows = RoomWatch(PACE), [vm("a", 4, 2000)]
    for now, free in ((0, 1000), (10, 100), (20, 1000)):
        watch.observe(now, rows, ResourceVector(memory_mib=free))
    assert watch.grown(20.0, rows, ResourceVector(memory_mib=1000)) == {"a": ResourceVector(4, 2100)}
    grown, left = [vm("a", 4, 2100)], ResourceVector(memory_mib=900)
    watch.observe(22.0, grown, left)
    assert watch.steady(22.0).is_zero()
    assert watch.grown(22.0, grown, left) == {}


def test_a_vm_that_grew_a_little_waits_for_the_hold_time() -> None:
    watch = RoomWatch(PACE)
    for step in range(30):
        rows = [vm("a", 4, 2000 if step < 12 else 2100)]
        watch.observe(step * 2.0, rows, ResourceVector(memory_mib=20 * step))
        grown = watch.grown(step * 2.0, rows, ResourceVector(memory_mib=20 * step))
        assert (grown != {}) == (step in (11, *range(22, 30))), step


def test_a_flutter_is_no_growth_but_the_last_bit_is() -> None:
    room = ResourceVector(0.02, 10)
    assert watched(30.0, [vm("a", 3, 4000)], room).grown(30.0, [vm("a", 3, 4000)], room) == {}
    nearly = [vm("a", 3.99, 4090)]
    assert watched(30.0, nearly, room).grown(30.0, nearly, room) == {"a": NOMINAL}


def test_a_gap_in_the_readings_says_nothing_of_the_time_between() -> None:
    rows, room = [vm("a", 3.5)], ResourceVector(0.4)
    watch = watched(30.0, rows, room)
    assert watch.grown(30.0, rows, room)
    later = 30.0 + LONGEST_GAP_S + 1
    watch.observe(later, rows, room)
    assert watch.grown(later, rows, room) == {}


def test_those_under_pressure_come_first() -> None:
    rows, room = [vm("a", 2), vm("b", 2)], ResourceVector(2.5)
    watch = watched(30.0, rows, room)
    grown = watch.grown(30.0, rows, room, pressed={"b"})
    assert grown["b"] == NOMINAL
    assert grown["a"].cpu_cores == pytest.approx(2.5)


@runs(150)
@given(hosts(on_grid=True), needs, st.sets(st.integers(0, 6)), st.sampled_from([0.0, 10.0, 40.0]))
def test_no_growth_hands_out_more_than_the_room(
    rows: list[Allocation], room: ResourceVector, pressed: set[int], seconds: float
) -> None:
    watch = watched(seconds, rows, room * 0.7)
    watch.observe(seconds + 1, rows, room)
    grown = watch.grown(seconds + 1, rows, room, {f"vm-{number}" for number in pressed})
    given_out = ZERO
    for row in rows:
        size = grown.get(row.name, row.current)
        assert row.current.fits_in(size)
        assert size.fits_in(row.upper)
        given_out += size.less(row.current)
    assert all(out <= has + 1e-5 for out, has in zip(given_out, room, strict=True))


class Host:
    """One host in simulated time: fixed VMs come and go, other processes take and leave memory, low VMs follow."""

    capacity = ResourceVector(16, 16_384)

    def __init__(self) -> None:
        self.low = {name: vm(name, 4) for name in ("a", "b", "c", "d")}
        self.fixed: list[ResourceVector] = []
        self.strangers = ZERO
        self.watch = RoomWatch(PACE)
        #: (time, VM, grown or not, whether an arrival or departure was the cause).
        self.resizes: list[tuple[float, str, bool, bool]] = []
        self.cold: dict[str, float] = {}

    def free(self) -> ResourceVector:
        taken = sum((row.current for row in self.low.values()), sum(self.fixed, self.strangers))
        return self.capacity.less(taken)

    def resize(self, now: float, targets: dict[str, ResourceVector], caused: bool) -> None:
        for name, size in targets.items():
            grows = not size.fits_in(self.low[name].current)
            self.resizes.append((now, name, grows, caused))
            row = self.low[name]
            self.low[name] = Allocation(name, row.priority, row.nominal, row.minimum, size)

    def arrive(self, now: float, size: ResourceVector) -> None:
        split = split_need(list(self.low.values()), size.less(self.free()))
        if split.shortfall.is_zero():
            self.resize(now, dict(split.targets), caused=True)
            self.fixed.append(size)

    def leave(self, now: float) -> None:
        if self.fixed:
            self.fixed.pop(0)
            self.resize(now, share_room(list(self.low.values()), self.free()), caused=True)

    def report(self, now: float) -> None:
        rows = list(self.low.values())
        self.watch.observe(now, rows, self.free())
        self.resize(now, self.watch.grown(now, rows, self.free()), caused=False)


@runs(100)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["arrive", "leave", "noise", "noise", "noise", "wait"]),
            st.integers(1, 6),
            st.integers(0, 8000),
        ),
        max_size=120,
    )
)
def test_with_random_arrivals_and_departures_nobody_flaps(events: list[tuple[str, int, int]]) -> None:
    host, causes = Host(), 0
    host.arrive(0.0, ResourceVector(4, 4096))
    for number, (what, cores, mib) in enumerate(events):
        now = number * 2.0
        match what:
            case "arrive":
                causes += 1
                host.arrive(now, ResourceVector(cores, 512.0 * cores))
            case "leave":
                causes += 1
                host.leave(now)
            case "noise":
                # What is not ours comes and goes beside us; it takes nothing from the VMs.
                free = (host.free() + host.strangers).memory_mib
                host.strangers = ResourceVector(memory_mib=min(float(mib), free))
        host.report(now)
    patient = [(at, name) for at, name, _, caused in host.resizes if not caused]
    shrinks = [(at, name) for at, name, grows, _ in host.resizes if not grows]
    # Each arrival and departure moves a VM once at the most.
    assert sum(caused for *_, caused in host.resizes) <= (causes + 1) * len(host.low)
    # Nobody grows by itself soon after it was shrunk, and nobody is shrunk without a cause.
    for at, name in patient:
        assert not any(name == other and at - PACE.rest_s < since < at for since, other in shrinks)
    assert all(caused for _, _, grows, caused in host.resizes if not grows)
    # A large growth is a quarter of the VM in one component, so few of them fit between two shrinks; of the others
    # there is one in a hold time.
    seconds = 2.0 * len(events)
    for name in host.low:
        large = 2 * (1 / PACE.large_share) * (1 + sum(other == name for _, other in shrinks))
        assert sum(other == name for _, other in patient) <= seconds / PACE.hold_s + 1 + large
