"""Moves instead of preemptions, and moves that rebalance: by hand-worked figures."""

from __future__ import annotations

import numpy as np
import pytest

from ebbtide.deflation.allocations import Allocation, Priority
from ebbtide.deflation.placement.rebalance_pace import RebalancePace
from ebbtide.deflation.placement.rebalancing import HostRows, Rebalancer, Rooms, is_deflated, move_instead
from ebbtide.deflation.resources import ResourceVector
from ebbtide.deflation.sharing.proportional import share_room

OVERHEAD_MIB = 100.0


def size(cores: float) -> ResourceVector:
    return ResourceVector(cores, cores * 1024)


def row(name: str, nominal: float, current: float | None = None, minimum: float = 1.0) -> Allocation:
    """A deflatable VM; a GiB for every core."""
    has = size(nominal if current is None else current)
    return Allocation(name, Priority.DEFLATABLE, size(nominal), size(minimum), has, overhead_mib=OVERHEAD_MIB)


def host(name: str, free: float, *rows: Allocation) -> HostRows:
    return HostRows.of(name, ResourceVector(free, free * 1024 + OVERHEAD_MIB), rows, OVERHEAD_MIB)


# --- instead of a preemption -----------------------------------------------------------------------------------------


def test_the_vm_with_the_least_memory_to_copy_goes() -> None:
    source = host("a", 0, row("big", 4, 2, minimum=2), row("small", 4, 2, minimum=1), row("third", 4, 1))
    move = move_instead(source, Rooms.of([source, host("b", 1.5)]), size(2))
    assert move is not None
    # It gives what it has above its minimum before it goes; what the others have above theirs is given, too.
    assert (move.vm, move.target, move.memory_mib) == ("small", "b", 1024)


def test_a_vm_whose_leaving_would_not_do_stays() -> None:
    source = host("a", 0, row("low-1", 4, 1), row("low-2", 4, 2, minimum=2))
    move = move_instead(source, Rooms.of([host("b", 3)]), size(2))
    assert move is not None
    assert move.vm == "low-2"
    assert move_instead(source, Rooms.of([host("b", 3)]), size(2.5)) is None


def test_no_vm_goes_where_its_minimum_does_not_fit_or_it_cannot_be_copied_in_time() -> None:
    source = host("a", 0, row("low-1", 4, 2, minimum=2))
    assert move_instead(source, Rooms.of([source]), size(2)) is None
    assert move_instead(source, Rooms.of([host("b", 1.9)]), size(2)) is None
    assert move_instead(source, Rooms.of([host("b", 2)]), size(2), most_mib=2000) is None
    # Those there give.
    assert move_instead(source, Rooms.of([host("b", 0, row("low-2", 4, 3))]), size(2), most_mib=2048) is not None


def test_it_goes_where_most_is_left_and_ties_go_by_name() -> None:
    source = host("a", 0, row("low-1", 4, 2, minimum=2))
    for hosts, target in (((2.0, 5.0, 3.0), "c"), ((3.0, 3.0, 3.0), "b")):
        others = [host(name, free) for name, free in zip("bcd", hosts, strict=True)]
        move = move_instead(source, Rooms.of(list(reversed(others))), size(2))
        assert move is not None
        assert move.target == target


def test_nobody_moves_a_fixed_vm() -> None:
    fixed = Allocation("high", Priority.FIXED, size(2), size(2), size(2), overhead_mib=OVERHEAD_MIB)
    assert move_instead(host("a", 0, fixed), Rooms.of([host("b", 9)]), size(1)) is None


def test_a_vm_that_cannot_move_stays() -> None:
    one, other = row("low-1", 4, 2, minimum=2), row("low-2", 4, 2, minimum=3)
    room = ResourceVector(0, OVERHEAD_MIB)
    source = HostRows.of("a", room, (one, other), OVERHEAD_MIB, staying={"low-1"})
    move = move_instead(source, Rooms.of([host("b", 9)]), size(2))
    assert move is not None
    assert move.vm == "low-2"
    hosts = [source, host("b", 4)]
    move = watched(hosts, RebalancePace(), 3600).due(3600, hosts)
    assert move is not None
    assert move.vm == "low-2"
    hosts[0] = HostRows.of("a", room, (one, other), OVERHEAD_MIB, staying={"low-1", "low-2"})
    assert move_instead(hosts[0], Rooms.of([host("b", 9)]), size(2)) is None
    assert watched(hosts, RebalancePace(), 3600).due(3600, hosts) is None


# --- to rebalance ----------------------------------------------------------------------------------------------------


def pool() -> list[HostRows]:
    """Two VMs of 4 cores share 4 on a; b has 4 free."""
    return [host("a", 0, row("low-1", 4, 2), row("low-2", 4, 2)), host("b", 4)]


def watched(hosts: list[HostRows], pace: RebalancePace, lasted_s: float) -> Rebalancer:
    rebalancer = Rebalancer(pace)
    for now in (0.0, lasted_s):
        rebalancer.observe(now, [one.id for one in hosts if is_deflated(one, size(0.05))])
    return rebalancer


def test_a_move_gives_back_what_both_had_lost() -> None:
    move = watched(pool(), RebalancePace(hold_s=3600), 3600).due(3600, pool())
    assert move is not None
    assert (move.vm, move.source, move.target, move.memory_mib) == ("low-1", "a", "b", 2048)
    # Both get back two cores and 2 GiB, for an hour more: 4 core-hours and 4 GiB-hours for 2 GiB copied.
    assert move.given_back == size(4)
    assert move.worth == pytest.approx((4 + 4 / 7.5) / 2)


def test_a_deflation_counts_when_it_has_lasted() -> None:
    pace = RebalancePace(hold_s=1800)
    assert watched(pool(), pace, 1799).due(1799, pool()) is None
    assert watched(pool(), pace, 1800).due(1800, pool()) is not None
    rebalancer = watched(pool(), pace, 1700)
    rebalancer.observe(1750, [])
    rebalancer.observe(1800, ["a"])
    assert rebalancer.due(1900, pool()) is None, "it began anew"


def test_what_is_known_of_a_host_that_does_not_answer_stands() -> None:
    rebalancer = Rebalancer(RebalancePace(longest_s=7200))
    rebalancer.observe(0, ["a", "b"])
    rebalancer.observe(600, ["b"], unseen=["a", "never-seen"])
    rebalancer.observe(3600, ["a", "b"])
    assert rebalancer.since == {"a": 0, "b": 0}
    assert [rebalancer.expected_h(now, "a") for now in (1799, 3600, 90_000)] == [0.0, 1.0, 2.0]


def test_a_move_has_to_be_worth_its_bytes_and_by_the_longest_that_is_expected() -> None:
    worth = (4 + 4 / 7.5) / 2
    for least, found in ((worth - 0.01, True), (worth + 0.01, False)):
        pace = RebalancePace(hold_s=60, longest_s=3600, least_worth=least)
        assert (watched(pool(), pace, 90_000).due(90_000, pool()) is not None) is found


def test_a_vm_that_was_moved_rests() -> None:
    pace = RebalancePace(hold_s=60, rest_s=600)
    rebalancer = watched(pool(), pace, 3600)
    for name in ("low-1", "low-2"):
        move = rebalancer.due(3600, pool())
        assert move is not None
        assert move.vm == name
        rebalancer.moved(3600, move)
    assert rebalancer.due(3600, pool()) is None
    rebalancer.observe(4201, ["a"])
    assert rebalancer.due(4201, pool()) is not None


def test_room_that_a_hosts_own_vms_lack_is_not_offered() -> None:
    hosts = [pool()[0], host("b", 4, row("low-3", 4, 2), row("low-4", 4, 2))]
    move = watched(hosts, RebalancePace(hold_s=60), 3600).due(3600, hosts)
    assert move is None


def test_random_moves_keep_their_promise() -> None:
    """After a move that is carried out by the live sharing, VMs have got back what it said, and none has less."""
    chance, moves = np.random.default_rng(3), 0
    for _ in range(200):
        rows = {
            name: [
                row(f"{name}{k}", nominal, max(round(nominal * float(chance.uniform(0.3, 1)), 2), 0.5), 0.3)
                for k, nominal in enumerate(chance.choice([1.0, 2.0, 4.0], 4).tolist())
            ]
            for name in "ab"
        }
        free = {"a": 0.0, "b": float(chance.choice([2.0, 8.0]))}
        hosts = [host(name, free[name], *rows[name]) for name in "ab"]
        move = watched(hosts, RebalancePace(hold_s=60, least_worth=0.0), 3600).due(3600, hosts)
        if move is None:
            continue
        moves += 1
        mover = next(one for one in rows[move.source] if one.name == move.vm)
        staying = [one for one in rows[move.source] if one is not mover]
        left = ResourceVector(free[move.source], free[move.source] * 1024 + OVERHEAD_MIB) + mover.charge
        there = ResourceVector(free[move.target], free[move.target] * 1024 + OVERHEAD_MIB).less(mover.charge)
        grown = {**share_room(staying, left), **share_room([*rows[move.target], mover], there)}
        before = {one.name: one.current for one in (*staying, *rows[move.target], mover)}
        given = sum((after.less(before[name]) for name, after in grown.items()), ResourceVector())
        assert all(before[name].fits_in(after) for name, after in grown.items())
        assert move.given_back.cpu_cores <= given.cpu_cores + 0.05
    assert moves > 50
