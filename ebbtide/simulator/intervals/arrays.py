"""Arrays of the policy of machine intervals, and the names of what is in them."""

from __future__ import annotations

from typing import Final, NamedTuple

from ebbtide.simulator.jobs.columns import Floats, Ints

#: What is heeded: big jobs on the stable machines; small ones after changes; the mean of what is left; its chance.
H1: Final = 1
H2: Final = 2
H3: Final = 4
H4: Final = 8
#: By name, as the thesis compares them (Fig. 6.1 and 6.2).
HEURISTICS: Final = {
    "first-fit": 0,
    "h1": H1,
    "h2": H2,
    "h3": H3,
    "h4": H4,
    "h1-h2": H1 | H2,
    "h1-h3": H1 | H3,
    "h1-h4": H1 | H4,
    "h1-h2-h3": H1 | H2 | H3,
    "ias": H1 | H2 | H4,
}


class FactPlaces(NamedTuple):
    """Places in `Intervals.facts`."""

    heeds: int = 0
    #: Machines that are never switched off: the first so many.
    stable: int = 1
    #: 1 if intervals ended since the last look; 1 if it learns from those.
    news: int = 2
    learns: int = 3
    #: 1: whoever waits is asked about every machine in the next look.
    all: int = 4
    #: How many `Intervals.grown` there are; whose place in the order of all that wait is below it was asked before.
    grown: int = 5
    asked: int = 6
    #: COUNT.head when everybody was asked last.
    head: int = 7


FACT: Final = FactPlaces()


class NumberPlaces(NamedTuple):
    """Places in `Intervals.numbers`."""

    #: Time between two instants at which machines may be switched; s.
    every_s: int = 0
    #: Core-seconds from which a job is big; seconds from which it is long for H3; A.
    big_core_s: int = 1
    long_s: int = 2
    aggressiveness: int = 3
    #: When time alone may let somebody start who was refused; s.
    due_s: int = 4
    #: Runtime from which jobs of at most a step do not start in this look (H2); s.
    left_s: int = 5
    #: Runtime from which no machine at all takes a job under a condition, until `due_s`; s.
    never_s: int = 6


NUMBER: Final = NumberPlaces()

#: Machines that have grown since the last look are asked about one by one, if they are no more than this.
GROWN: Final = 16

#: Kills are also counted of jobs that run shorter; hours (Fig. 6.1b and 4.10b have such classes).
SHORTER_H: Final = (1.0, 5.0, 30.0)

#: Tasks that ask for the same in one look: on stable machines, on others, on others under a condition.
STABLE_ONES: Final = 0
OTHERS: Final = 1
ON_CONDITION: Final = 2


class Intervals(NamedTuple):
    """All that it keeps."""

    #: Places as `FACT` and `NUMBER`.
    facts: Ints
    numbers: Floats
    #: By band of machines and length in steps; see `fill_tails`.
    ended: Floats
    tails: Floats
    sums: Floats
    #: Of the intervals that ended in this run, how many had which length in steps, whether it learns from them or not.
    met: Floats
    #: The shortest runtime that found no machine in this look, by what was asked and by cores; s.
    hopeless: Floats
    tree: Ints
    known: Ints
    spare: Ints
    #: Kills within what is measured: all, and of jobs shorter than each of `SHORTER_H`.
    killed: Floats
    #: The band of each machine.
    bands: Ints
    #: Where each class of core-time begins (`intake.length_class`); one more than there are.
    edges: Floats
    #: Machines that have had more room at some time since the last look: shape (GROWN,).
    grown: Ints
    #: By machine, until all are asked again: a runtime from which it takes no task under a condition, s; and the first
    #: machine after those that were switched on together with it.
    refused_s: Floats
    after: Ints
