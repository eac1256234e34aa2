"""What the matcher's policy keeps beside the engine's state."""

from __future__ import annotations

from typing import Final, NamedTuple

from task_matcher.ages import Floats
from task_matcher.knowledge import Knowledge
from task_matcher.landmarks import Landmarks
from task_matcher.period import Period
from task_matcher.rolling import Integers, Rolling

#: Switches.
K_FORM: Final = 0
K_SIZED: Final = 1
K_CENSORED: Final = 2
K_DELAY: Final = 3
K_PROMISES: Final = 4
#: Changes since the curves were brought up to date, looks that are in the table of landmarks.
K_NEWS: Final = 5
#: Whether outcomes of tasks are held against predictions.
K_CHECK: Final = 6
#: Landmarks count step by step (:mod:`task_matcher.period`).
K_PERIOD: Final = 7
SWITCHES: Final = 8

#: Numbers.
N_SPARE: Final = 0
N_ESCALATION: Final = 1
N_UNKNOWN: Final = 2
N_FALLBACK_S: Final = 3
N_FRESH_S: Final = 4
N_FRESH_SHARE: Final = 5
N_FRESH_UNTIL: Final = 6
N_LOOKED: Final = 7
N_DISLIKE: Final = 8
#: Sum of the squares of what predictions of started tasks were off.
N_SQUARES: Final = 9
N_SPREAD: Final = 10
NUMBERS: Final = 11

#: Promises that a machine can have in one round.
PROMISES: Final = 64
#: Columns of a promise.
R_ENDS: Final = 0
R_CORES: Final = 1
R_MEMORY: Final = 2


class Matching(NamedTuple):
    """Arrays of one run; rows per machine are the engine's."""

    switches: Integers
    numbers: Floats
    rolling: Rolling
    marks: Landmarks
    period: Period
    knowledge: Knowledge
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
