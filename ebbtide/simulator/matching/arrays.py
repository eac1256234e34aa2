"""Arrays of the matcher's policy beside the engine's state."""

from __future__ import annotations

from typing import Final, NamedTuple

from ebbtide.matcher.predict.ages import Floats
from ebbtide.matcher.predict.knowledge import Knowledge
from ebbtide.matcher.predict.period import Period
from ebbtide.matcher.predict.rolling import Integers, Rolling


class Switches(NamedTuple):
    """Places in `Matching.switches`."""

    #: Switches.
    form: int = 0
    sized: int = 1
    censored: int = 2
    delay: int = 3
    promises: int = 4
    #: Changes since the curves were brought up to date, looks that are in the table of landmarks.
    news: int = 5
    #: Whether outcomes of tasks are held against predictions.
    check: int = 6
    #: Tasks start as machines report (Algorithm 3).
    heartbeat: int = 7
    releases: int = 8


SWITCH: Final = Switches()
SWITCHES: Final = len(SWITCH)


class Numbers(NamedTuple):
    """Places in `Matching.numbers`."""

    #: Numbers.
    spare: int = 0
    escalation: int = 1
    unknown: int = 2
    fallback_s: int = 3
    fresh_s: int = 4
    fresh_share: int = 5
    fresh_until: int = 6
    looked: int = 7
    aversion: int = 8
    #: Sum of the squares of what predictions of started tasks were off.
    squares: int = 9
    spread: int = 10
    #: Algorithm 3.
    threshold: int = 11
    patience: int = 12
    #: `Matching.foreseen`: its part of what is said, and when its first row is of.
    known_share: int = 13
    known_from_s: int = 14


NUMBER: Final = Numbers()
NUMBERS: Final = len(NUMBER)

#: Promises that a machine can have in one round.
PROMISES: Final = 64


class PromiseColumns(NamedTuple):
    """Columns of `Matching.promises`."""

    #: Columns of a promise.
    ends: int = 0
    cores: int = 1
    memory: int = 2


PROMISE: Final = PromiseColumns()


class Matching(NamedTuple):
    """Arrays of one run; rows per machine are the engine's."""

    switches: Integers
    numbers: Floats
    rolling: Rolling
    period: Period
    knowledge: Knowledge
    #: What could be known of the VMs to come (`futures.Foreseen`); without rows: nothing is.
    foreseen: Floats
    #: Per machine, of the task that is looked at.
    expected: Floats
    waits: Floats
    probability: Floats
    #: Per machine: how many tasks are promised room there, and (machine, promise, R_*).
    promised: Integers
    promises: Floats
    #: Of tasks that were started: predictions and completions by decile, and completions.
    predicted: Floats
    observed: Floats
    outcomes: Floats
    #: Which machine reports first.
    draws: Integers
