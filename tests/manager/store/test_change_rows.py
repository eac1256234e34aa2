"""When a core change was that a host tells of: by its clock as far as that can be."""

from __future__ import annotations

import pytest

from cluster_manager.store.change_rows import CLOCKS_S, dated
from ebbtide.messages.machines import CoreChange

NOW_S = 1e9
DAY_S = 86_400.0


def changes(*moments: float) -> list[CoreChange]:
    of = {"machine": "m", "host": "h", "cores_before": 2.0, "cores_after": 1.0, "cause": "test"}
    return [CoreChange(sequence=number, at=at, **of) for number, at in enumerate(moments, 1)]


@pytest.mark.parametrize(
    ("moments", "last", "expected"),
    [
        # As the host says, however long ago, and without any before.
        ((NOW_S - 3e6, NOW_S - 5.0), None, (NOW_S - 3e6, NOW_S - 5.0)),
        ((NOW_S - 5.0, NOW_S + 5.0), NOW_S - 9.0, (NOW_S - 5.0, NOW_S + 5.0)),
        # A moment to come is no news.
        ((NOW_S + 3000.0,), None, (NOW_S + CLOCKS_S,)),
        # Its clock was set right meanwhile, by a little or by a time zone.
        ((NOW_S - 5.0,), NOW_S + 50.0, (NOW_S + 50.0,)),
        ((NOW_S - 7000.0, NOW_S - 9000.0, NOW_S - 6000.0), None, (NOW_S - 7000.0, NOW_S - 7000.0, NOW_S - 6000.0)),
        # It has begun anew at 1970, or a month ago.
        ((90.0, 95.0), NOW_S - 10 * DAY_S, (NOW_S, NOW_S)),
        ((NOW_S - 30 * DAY_S,), NOW_S - 10.0, (NOW_S,)),
        # An earlier version has dated its last one ahead.
        ((NOW_S - 5.0, NOW_S + 9.0), NOW_S + 3000.0, (NOW_S + 3000.0, NOW_S + 3000.0)),
        # So had the manager's own clock, which was ahead for a while: it does not hold all that comes after.
        ((NOW_S - 5.0, NOW_S + 9.0), NOW_S + 2 * DAY_S, (NOW_S - 5.0, NOW_S + 9.0)),
        ((NOW_S - 5.0,), NOW_S + 3000 * DAY_S, (NOW_S - 5.0,)),
    ],
)
def test_a_change_is_dated_by_its_hosts_clock_but_neither_ahead_nor_before_what_came_first(
    moments: tuple[float, ...], last: float | None, expected: tuple[float, ...]
) -> None:
    assert dated(changes(*moments), last, NOW_S) == list(expected)
