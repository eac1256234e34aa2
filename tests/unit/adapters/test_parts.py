"""How a target is split among the processes of one service."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app_adapters.adapter import SizeRange
from app_adapters.shared import parts, parts_of_those_heard

RANGES = {"a": SizeRange(100, 40, 200, 1), "b": SizeRange(60, 40, 100, 1)}


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (160, {"a": 100, "b": 60}),
        (120, {"a": 70, "b": 50}),  # 60 and 20 above the minimums: 30 and 10 of them
        (80, {"a": 40, "b": 40}),
        (40, {"a": 20, "b": 20}),  # less than the minimums: for each to refuse
        (230, {"a": 150, "b": 80}),  # half of what each lacks
        (600, {"a": 400, "b": 200}),
    ],
)
def test_each_gives_or_grows_in_proportion(target: float, expected: dict[str, float]) -> None:
    assert parts(target, RANGES) == expected


def test_without_any_room_all_is_as_asked() -> None:
    assert parts(0, {"a": SizeRange(0, 0, 0, 1), "b": SizeRange(0, 0, 0, 1)}) == {"a": 0, "b": 0}
    assert parts(10, {"a": SizeRange(0, 0, 0, 1), "b": SizeRange(0, 0, 0, 1)}) == {"a": 5, "b": 5}


@pytest.mark.parametrize(
    ("direction", "target", "expected"),
    [
        ("deflate", 220, {"a": 70, "b": 50}),  # the silent one keeps its 100
        ("deflate", 170, {"a": 40, "b": 40}),  # nobody goes below its minimum for it
        ("deflate", 40, {"a": 20, "b": 20}),  # but where the target itself is less than the minimums
        ("reinflate", 380, {"a": 150, "b": 80}),  # its part is kept for it: half of what each lacks
        ("reinflate", 500, {"a": 200, "b": 100}),
    ],
)
def test_who_does_not_answer_is_counted(direction: str, target: float, expected: dict[str, float]) -> None:
    split = parts_of_those_heard(target, RANGES, {"c": SizeRange(100, 20, 200, 1)}, direction)
    assert {name: split[name] for name in RANGES} == expected


sizes = st.floats(0, 1e5)
ranges = st.builds(lambda one: SizeRange(sorted(one)[1], min(one), max(one), 1), st.tuples(sizes, sizes, sizes))


@given(st.floats(0, 1e6), st.dictionaries(st.text("abc", min_size=1), ranges, min_size=1))
def test_the_parts_are_the_target_and_within_the_ranges_where_those_allow_it(
    target: float, those: dict[str, SizeRange]
) -> None:
    split = parts(target, those)
    least, most = sum(one.minimum for one in those.values()), sum(one.maximum for one in those.values())
    assert sum(split.values()) == pytest.approx(target, abs=0.01 * len(those), rel=1e-6)
    if least <= target <= most:
        assert all(one.minimum - 0.01 <= split[pid] <= one.maximum + 0.01 for pid, one in those.items())
