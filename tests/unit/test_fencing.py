"""Commands that come too late: of an old manager, or overtaken by a later one."""

from __future__ import annotations

import pytest

from ebbtide.deflation.fencing import Fence


@pytest.mark.parametrize(
    ("epoch", "order", "field"),
    [(2, 5, ""), (2, 6, ""), (3, 1, ""), (2, 0, ""), (2, 4, "order"), (1, 9, "epoch"), (1, 0, "epoch")],
)
def test_what_is_older_than_the_latest_command_is_refused(epoch: int, order: int, field: str) -> None:
    sentence, found = Fence(2, 5).refusal(epoch, order)
    assert (bool(sentence), found) == (bool(field), field)


def test_the_fence_only_rises_and_a_new_epoch_begins_to_count_anew() -> None:
    assert Fence(2, 5).after(2, 3) == Fence(2, 5)
    assert Fence(2, 5).after(1, 9) == Fence(2, 5)
    assert Fence(2, 5).after(3) == Fence(3, 0)
    assert Fence(2, 5).after(2) == Fence(2, 5)
