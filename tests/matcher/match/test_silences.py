"""How long a command is silent: a date alone says nothing, only what was looked at counts."""

from __future__ import annotations

import math
from dataclasses import replace

from ebbtide.matcher.match.attempts import AttemptState, Claim, Look, Seen
from ebbtide.matcher.match.silences import MOST_STEP_S, Silences, measured
from ebbtide.matcher.match.tasks import HEARTBEAT_LIMIT_S, SILENCE_LIMIT_S

NAME = "ebb.train.0a.1"
SEEN = Seen(AttemptState.RUNNING, "n1", Claim.BEGUN, 6.0, silent_s=602.0, touched_at=100.0)


class Looks:
    """One after another, each some seconds after the one before."""

    def __init__(self) -> None:
        self.silences: Silences = {}
        self.now = 0.0

    def next(self, seen: Seen = SEEN, after_s: float = 1.0, paused: frozenset[str] = frozenset()) -> float:
        self.now += after_s
        look, self.silences = measured(Look({}, {NAME: seen}), self.silences, self.now, paused)
        silent_s = look.attempts[NAME].silent_s
        assert silent_s is not None
        return silent_s


def test_a_date_that_is_far_off_in_one_look_is_no_silence() -> None:
    looks = Looks()
    beats = [(1.0, 700.0), (602.0, 701.0), (math.inf, 2000.0), (1.0, 1301.0)]
    assert [looks.next(replace(SEEN, silent_s=silent_s, touched_at=at)) for silent_s, at in beats] == [0.0] * 4


def test_what_is_looked_at_again_and_again_and_not_touched_is_silent() -> None:
    for silent_s in (602.0, math.inf):
        looks, seen = Looks(), replace(SEEN, silent_s=silent_s)
        found = [looks.next(seen) for _ in range(int(SILENCE_LIMIT_S) + 2)]
        assert found == [float(n) for n in range(int(SILENCE_LIMIT_S) + 2)]


def test_a_silence_is_no_longer_than_its_date_says() -> None:
    looks = Looks()
    assert [looks.next(replace(SEEN, silent_s=0.5)) for _ in range(3)] == [0.0, 0.5, 0.5]


def test_an_outage_between_two_looks_counts_as_one_step() -> None:
    looks = Looks()
    looks.next()
    assert looks.next(after_s=3600.0) == MOST_STEP_S < HEARTBEAT_LIMIT_S / 2


def test_what_stood_still_is_silent_from_when_it_goes_on() -> None:
    for seen, paused in ((replace(SEEN, suspended=True), frozenset[str]()), (SEEN, frozenset({"n1"}))):
        looks = Looks()
        looks.next()
        assert [looks.next(seen, paused=paused) for _ in range(3)] == [0.0] * 3
        assert looks.next() == 1.0


def test_what_has_never_touched_a_record_is_not_measured() -> None:
    seen = replace(SEEN, silent_s=None)
    look, silences = measured(Look({}, {NAME: seen}), {}, 1.0)
    assert (look.attempts[NAME], silences) == (seen, {})
