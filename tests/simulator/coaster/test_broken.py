"""States that are broken on purpose, each found by its rule; interpreted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ebbtide.simulator.coaster import arrays as a
from ebbtide.simulator.coaster import loop
from ebbtide.simulator.coaster.arrays import Coaster
from ebbtide.simulator.coaster.checking import check
from ebbtide.simulator.coaster.running import Terms, run
from ebbtide.simulator.errors import ConservationBroken
from tests.simulator.jobs.scenes import batches, job

FIXED, SHORT, MOST = 3, 1, 2


def sound() -> Coaster:
    """Server 1 runs a long task and another one waits for it; of two transient servers one drains."""
    servers, entries, waited_s, ran_on = a.empty(FIXED + MOST, 4, 2, 2)
    knobs = np.zeros(a.KNOBS, np.int64)
    knobs[[a.KNOB.fixed, a.KNOB.short, a.KNOB.most, a.KNOB.have, a.KNOB.on, a.KNOB.long]] = FIXED, SHORT, MOST, 1, 2, 1
    knobs[a.KNOB.jobs] = 2
    servers[:, a.SERVER.state] = [a.ON, a.ON, a.ON, a.ON, a.DRAINING]
    servers[1, [a.SERVER.job, a.SERVER.runs_long, a.SERVER.long, a.SERVER.first, a.SERVER.last]] = 0, 1, 2, 0, 0
    servers[4, a.SERVER.job] = 1
    entries[0, [a.ENTRY.job, a.ENTRY.next, a.ENTRY.long]] = 0, -1, 1
    opened = np.array([0, 2, 3, 0, 0])
    servers[[0, 2, 3], a.SERVER.open] = [0, 1, 2]
    knobs[a.KNOB.open] = 3
    numbers = np.zeros(a.NUMBERS)
    numbers[[a.NUMBER.cutoff_s, a.NUMBER.backlog_s]] = 100.0, 5.0
    queued_s = np.zeros(FIXED + MOST)
    queued_s[1] = 200.0
    return Coaster(
        knobs=knobs,
        numbers=numbers,
        draws=np.zeros(2, np.int64),
        at_s=np.zeros(2),
        mean_s=np.array([200.0, 5.0]),
        offsets=np.array([0, 2, 3]),
        runtime_s=np.array([200.0, 200.0, 5.0]),
        waited_s=waited_s,
        ran_on=ran_on,
        begun=np.array([1, 1]),
        done=np.zeros(2, np.int64),
        ended_s=np.zeros(2),
        servers=servers,
        queued_s=queued_s,
        expected_s=np.zeros(FIXED + MOST),
        since_s=np.zeros(FIXED + MOST),
        open=opened,
        entries=entries,
        delayed_s=np.zeros(4),
    )


def _off(s: Coaster) -> None:
    s.servers[4, a.SERVER.state] = a.OFF


def _long(s: Coaster) -> None:
    s.servers[1, a.SERVER.long] = 1


def _misplaced(s: Coaster) -> None:
    s.servers[4, [a.SERVER.runs_long, a.SERVER.long]] = 1


def _over_budget(s: Coaster) -> None:
    s.knobs[a.KNOB.most] = 1


def _not_open(s: Coaster) -> None:
    s.servers[2, a.SERVER.open] = -1


def _idle(s: Coaster) -> None:
    s.servers[1, a.SERVER.job] = -1


def _uncounted(s: Coaster) -> None:
    s.knobs[a.KNOB.on] = 1


def _kept(s: Coaster) -> None:
    s.knobs[a.KNOB.have] = 2


def _asked(s: Coaster) -> None:
    s.knobs[a.KNOB.asked] = 1


def _backlog(s: Coaster) -> None:
    s.numbers[a.NUMBER.backlog_s] = 0.0


def _expected(s: Coaster) -> None:
    s.queued_s[1] = 0.0


@pytest.mark.parametrize(
    ("spoil", "rule"),
    [
        (_off, 1),
        (_long, 2),
        (_misplaced, 3),
        (_over_budget, 4),
        (_not_open, 6),
        (_idle, 7),
        (_uncounted, 8),
        (_kept, 8),
        (_asked, 8),
        (_expected, 9),
        (_backlog, 11),
    ],
)
def test_what_is_broken_on_purpose_is_found_by_its_rule(spoil: Callable[[Coaster], None], rule: int) -> None:
    state = sound()
    assert check(state) == 0
    spoil(state)
    assert check(state) == rule


@pytest.mark.parametrize("what", ["waited_s", "begun", "numbers"])
def test_a_run_whose_figures_contradict_each_other_ends_with_the_rule(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulate: Callable[[Coaster], float] = loop.simulate

    def forgets(state: Coaster) -> float:
        ended_s = simulate(state)
        values: Any = getattr(state, what)
        values[a.NUMBER.busy_s if what == "numbers" else 0] -= 1
        return ended_s

    monkeypatch.setattr(loop, "simulate", forgets)
    rule = a.RULES[10 if what == "numbers" else 5]
    with pytest.raises(ConservationBroken, match=rule):
        run(batches([job(0, 1, 9), job(1, 1, 2, 2)]), Terms(servers=3, short_servers=1), 1, compile=False)
