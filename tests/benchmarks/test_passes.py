"""Work that begins again where the kernel killed the confined process."""

from __future__ import annotations

import pytest

from benchmarks.passes import TRIES, Killed, Pass, begun_again_when_killed


def test_work_whose_process_was_killed_begins_again_and_says_so() -> None:
    left, said = iter([Killed("gone"), None]), list[str]()

    def measure() -> str:
        if error := next(left):
            raise error
        return "measured"

    assert begun_again_when_killed(measure, "run 1 of 5", Pass(report=said.append)) == ("measured", 1)
    assert said == ["run 1 of 5 begins again: gone"]


def test_work_that_is_killed_each_time_fails() -> None:
    tries = []

    def measure() -> None:
        tries.append(1)
        raise Killed("gone")

    with pytest.raises(Killed, match="gone"):
        begun_again_when_killed(measure, "run 1 of 5", Pass())
    assert len(tries) == TRIES
