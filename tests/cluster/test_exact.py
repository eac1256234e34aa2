"""The exact search against trying every assignment there is."""

from __future__ import annotations

from itertools import product
from random import Random

from ebbtide.deflation.resources import ZERO, ResourceVector
from tests.cluster.exact import Least, fewest_moves


def size(cores: float) -> ResourceVector:
    return ResourceVector(cores, cores * 100)


def test_who_has_no_host_takes_room_without_a_move() -> None:
    room = {"a": size(4), "b": size(3)}
    assert fewest_moves(room, [Least(size(4), "a"), Least(size(3), None)], 2) == 0


def test_one_move_makes_room_that_two_hosts_have_together() -> None:
    room = {"a": size(4), "b": size(4)}
    there = [Least(size(2), "a"), Least(size(2), "b"), Least(size(3), None, movable=False)]
    assert fewest_moves(room, there, 2) == 1
    assert fewest_moves(room, there, 0) is None
    held = [Least(size(2), "a", movable=False), Least(size(2), "b", movable=False), there[2]]
    assert fewest_moves(room, held, 2) is None


def test_it_finds_what_trying_all_finds() -> None:
    chance, found = Random(1), set()
    for _ in range(300):
        room = {host: size(chance.choice((3, 4, 5))) for host in "ab"}
        vms = [Least(size(chance.choice((1, 1.5, 2))), chance.choice("ab")) for _ in range(4)]
        vms.append(Least(size(chance.choice((1, 2, 3))), None, movable=False))
        moves = fewest_moves(room, vms, 4)
        assert moves == _by_trying(room, vms)
        found.add(moves)
    assert {None, 0, 1, 2} <= found


def _by_trying(room: dict[str, ResourceVector], vms: list[Least]) -> int | None:
    fitting = [
        sum(vm.host is not None and vm.host != host for vm, host in zip(vms, places, strict=True))
        for places in product(room, repeat=len(vms))
        if all(
            sum((vm.size for vm, host in zip(vms, places, strict=True) if host == each), ZERO).fits_in(room[each])
            for each in room
        )
    ]
    return min(fitting, default=None)
