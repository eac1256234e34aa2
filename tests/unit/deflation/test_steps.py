from __future__ import annotations

import pytest

from deflation.bounds import Bound
from deflation.instructions import GuestReading
from deflation.reinflation import cpus_to_plug
from deflation.steps import balloon_to_keep, cpus_to_keep, memory_to_keep

FULL = Bound(4, None, 512, 512)


@pytest.mark.parametrize(
    ("bound", "online", "unpluggable", "target", "kept"),
    [
        (FULL, (0, 1, 2, 3), (3, 2, 1), 4, None),
        (FULL, (0, 1, 2, 3), (3, 2, 1), 3.01, None),
        (FULL, (0, 1, 2, 3), (3, 2, 1), 3, (0, 1, 2)),
        (FULL, (0, 1, 2, 3), (3, 2, 1), 2.5, (0, 1, 2)),
        (FULL, (0, 1, 2, 3), (3, 2, 1), 0.1, (0,)),
        # In the guest's order, and not what is busy.
        (FULL, (0, 1, 2, 3), (1, 3), 2, (0, 2)),
        (FULL, (0, 1, 2, 3), (2,), 1, (0, 1, 3)),
        (FULL, (0, 1, 2, 3), (), 1, None),
        # CPU 0 stays, whatever the guest says; so does one that is off line already.
        (FULL, (0, 1), (0, 7, 1), 1, (0,)),
        # A quota below the target: nothing has to be taken off.
        (Bound(4, 0.25, 512, 512), (0, 1, 2, 3), (3, 2, 1), 1, None),
        # A list with repetitions does not make more CPUs of it.
        (Bound(2, None, 512, 512), (0, 1, 1, 1), (1,), 2, None),
        (Bound(2, None, 512, 512), (0, 1, 1, 1), (1,), 1.5, None),
    ],
)
def test_which_cpus_stay_on_line(
    bound: Bound, online: tuple[int, ...], unpluggable: tuple[int, ...], target: float, kept: tuple[int, ...] | None
) -> None:
    assert cpus_to_keep(bound, GuestReading(online, unpluggable, 0), target) == kept


@pytest.mark.parametrize(
    ("need", "spare", "block", "kept"),
    [
        (100, 1000, 2, 412),
        (101, 1000, 2, 412),
        (100, 100, 2, 462),
        (100, 7.9, 2, None),
        (100, 8, 2, 508),
        (3.9, 1000, 2, None),
        (1000, 10_000, 2, 0),
        (100, 1000, 128, None),
        (200, 1000, 128, 384),
        (100, 1000, 0, None),
        (100, 0, 2, None),
        (100, -50, 2, None),
    ],
)
def test_how_much_plugged_memory_stays(need: float, spare: float, block: float, kept: float | None) -> None:
    assert memory_to_keep(FULL, GuestReading((0,), (), spare), need, block) == kept


@pytest.mark.parametrize(
    ("need", "spare", "kept"),
    [(100, 1000, 412), (100, 101, 462), (100, 7, None), (2.5, 1000, 509.5), (2.5, 5, None), (500, 1e9, 192)],
)
def test_how_much_boot_memory_stays(need: float, spare: float, kept: float | None) -> None:
    assert balloon_to_keep(FULL, GuestReading((0,), (), spare), need) == kept


def test_a_balloon_at_the_floor_is_left_there() -> None:
    assert balloon_to_keep(Bound(1, None, 192, 512), GuestReading((0,), (), 1000), 100) is None
    assert balloon_to_keep(Bound(1, None, 100, 512), GuestReading((0,), (), 1000), 100) is None


@pytest.mark.parametrize(
    ("online", "count", "plugged"),
    [((0,), 3, (0, 1, 2)), ((0, 3), 3, (0, 1, 3)), ((0, 1, 2), 2, (0, 1, 2)), ((0, 2), 2, (0, 2))],
)
def test_plugging_takes_no_cpu_off(online: tuple[int, ...], count: int, plugged: tuple[int, ...]) -> None:
    assert cpus_to_plug(GuestReading(online, (), 0), count) == plugged
