"""Which waiting task goes to which machine now, and which waits for which (seed 000 §3.1.2, Algorithm 1). Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from task_matcher.expectation import Expectation, Predictor

#: How long a task of which nobody says how long it runs is taken to run, seconds.
UNKNOWN_DURATION_S: Final = 600.0
#: A task that runs longer than expected is taken to run on for this part of what it has run already.
OVERRUN: Final = 0.1
#: Cores that somebody still holds are not free, however soon they will be.
LEAST_WAIT_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class Waiting:
    """A task that waits for a machine."""

    name: str
    cores: int
    duration_s: float | None = None


@dataclass(frozen=True, slots=True)
class Busy:
    """Cores of a machine that somebody holds."""

    cores: int
    #: Infinite where nobody knows.
    remaining_s: float = math.inf


@dataclass(frozen=True, slots=True)
class Room:
    """A machine that takes tasks."""

    name: str
    #: Usable now, whole.
    cores: int
    busy: tuple[Busy, ...] = ()

    @property
    def free_cores(self) -> int:
        """Below 0 where more is held, or promised, than there is."""
        return self.cores - sum(busy.cores for busy in self.busy)


@dataclass(frozen=True, slots=True)
class Offer:
    """What one machine offers one task."""

    machine: str
    #: Until it has room: ``a``.
    wait_s: float
    expectation: Expectation

    @property
    def in_words(self) -> str:
        probability = self.expectation.completion_probability
        kept = "nothing is known of its cores" if probability is None else f"it keeps its cores with {probability:.0%}"
        return f"expected to be done in {self.expectation.seconds:.0f} s ({kept})"


@dataclass(frozen=True, slots=True)
class Choice:
    """What becomes of a task now.

    :param machine: where it is to begin now; None: it waits.
    :param waits_for: the machine it waits for; None: no machine has enough cores, or it does not wait.
    :param offers: of all machines that are large enough, best first.
    """

    machine: str | None
    waits_for: str | None
    sentence: str
    offers: tuple[Offer, ...] = field(default=())


def remaining_s(duration_s: float | None, elapsed_s: float) -> float:
    """How long a running task still runs, as far as anybody can tell.

    :param duration_s: as it was estimated; None: not at all. Wrong estimates are met with :data:`OVERRUN`.
    """
    elapsed_s = max(elapsed_s, 0.0)
    left_s = (UNKNOWN_DURATION_S if duration_s is None else duration_s) - elapsed_s
    return max(left_s, OVERRUN * elapsed_s)


def available_in_s(room: Room, cores: int) -> float:
    """``a``: seconds until a machine has so many cores free, by what its tasks still need; infinite: never."""
    free = room.free_cores
    if free >= cores:
        return 0.0
    for busy in sorted(room.busy, key=lambda busy: busy.remaining_s):
        free += busy.cores
        if free >= cores:
            return max(busy.remaining_s, LEAST_WAIT_S)
    return math.inf


def choose(tasks: Sequence[Waiting], machines: Iterable[Room], predictor: Predictor) -> dict[str, Choice]:
    """For each waiting task, in their order: begin there, or wait.

    Each goes where it is expected to be done first, also where that machine has no room yet (delayed scheduling). What
    is promised to one counts as taken for those behind it.

    :param predictor: knows what time it is.
    """
    rooms = {room.name: room for room in machines}
    choices = {}
    for task in tasks:
        choice = _choice(task, rooms, predictor)
        choices[task.name] = choice
        promised = choice.machine or choice.waits_for
        if promised is not None:
            held_s = choice.offers[0].wait_s + remaining_s(task.duration_s, 0.0)
            room = rooms[promised]
            rooms[promised] = Room(room.name, room.cores, (*room.busy, Busy(task.cores, held_s)))
    return choices


def _choice(task: Waiting, rooms: dict[str, Room], predictor: Predictor) -> Choice:
    duration_s = UNKNOWN_DURATION_S if task.duration_s is None else max(task.duration_s, 0.0)
    offers = []
    for room in rooms.values():
        wait_s = available_in_s(room, task.cores) if room.cores >= task.cores else math.inf
        if wait_s < math.inf:
            offers.append(Offer(room.name, wait_s, predictor.expect(room.name, wait_s, duration_s)))
    if not offers:
        if not rooms:
            return Choice(None, None, "no machine takes tasks now: all are down, or drained")
        most = max((room.cores for room in rooms.values()), default=0)
        if most < task.cores:
            return Choice(None, None, f"no machine has {task.cores} usable cores; the largest has {most}")
        return Choice(None, None, f"nobody knows when {task.cores} cores become free")
    offers.sort(key=lambda offer: _rank(offer, rooms))
    best = offers[0]
    if best.wait_s <= 0:
        return Choice(best.machine, None, f"{best.machine}: {best.in_words}", tuple(offers))
    sentence = f"it waits for {best.machine}, free in {best.wait_s:.0f} s: {best.in_words}"
    now = next((offer for offer in offers if offer.wait_s <= 0), None)
    if now is not None:
        sentence += f"; {now.machine} has room now, but there it is {now.in_words}"
    return Choice(None, best.machine, sentence, tuple(offers))


def _rank(offer: Offer, rooms: dict[str, Room]) -> tuple[float, float, float, int, str]:
    """Soonest done; among equals whichever begins now, is likelier to keep its cores, has more of them free."""
    probability = offer.expectation.completion_probability or 0.0
    return (
        round(offer.expectation.seconds, 6),
        offer.wait_s,
        -probability,
        -rooms[offer.machine].free_cores,
        offer.machine,
    )
