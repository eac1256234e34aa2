"""How fast cold memory goes: a state machine, events in, instructions out; it has no clock and does nothing itself.

Senpai's rule (Weiner et al., TMO, ASPLOS 2022, §3.3): a step is `size * share * max(0, 1 - pressure / threshold)`,
where pressure is the part of the time since the last step in which some task waited for memory. Senpai has all day and
takes some ten-thousandths every six seconds; here a deflation waits, so that steps are larger and nearer to each other,
and too much pressure for some time, or memory that is read back, ends it. Steps are written between two rests, and
pressure is that of the rests alone: the kernel counts who reclaims as waiting for memory, too.

Which pages go is the kernel's choice: page cache and, with swap, anonymous pages, the coldest first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Mapping

MIB = 2**20
#: One step takes this share of what a group can give, within these limits.
STEP_SHARE = 0.1
LARGEST_STEP = 32 * MIB
SMALLEST_STEP = MIB
#: A rest takes this, or so many times as long as the step before it.
REST_S = 0.1
REST_TO_STEP = 1.0
#: From this part of the time on nothing is taken: half of what the host calls pressure.
THRESHOLD = 0.1
#: So many rests in a row with more than that end it.
PATIENCE = 8
#: A group that gives less than this share of a step has no more that is cold.
WORTH = 0.25
#: What was reclaimed may be read back up to this share; what is below that of all is noise.
REFAULTED_SHARE = 0.2
REFAULTED_NOISE = 8 * MIB


@dataclass(frozen=True)
class Reclaim:
    """Have the kernel reclaim so much of a group, and say what came of it. Answer: `Reclaimed`."""

    group: str
    size: int


@dataclass(frozen=True)
class Rest:
    """Wait, and say what was felt meanwhile. Answer: `Rested`."""

    seconds: float


@dataclass(frozen=True)
class End:
    """Nothing more is to be done. `done`: more than this is not to be had now."""

    freed: int
    done: bool
    reason: str = ""


@dataclass(frozen=True)
class Reclaimed:
    """Bytes that were reclaimed of the group, and how long it took."""

    now: float
    freed: int
    seconds: float


@dataclass(frozen=True)
class Rested:
    """The part of the rest in which some task waited for memory; bytes read back since the beginning."""

    now: float
    pressure: float
    refaulted: int


@dataclass(frozen=True)
class Stop:
    """Called off."""

    reason: str


class ColdReclaim:
    """One request. `groups`: what each can give, in bytes, which is what its protection leaves; never more is taken.

    Nothing is begun at `until` or later, by the clock of the events.
    """

    def __init__(self, wanted: int, groups: Mapping[str, int], until: float) -> None:
        self.freed = 0
        self._wanted = wanted
        self._left = dict(groups)
        self._share = {name: size * STEP_SHARE for name, size in groups.items()}
        self._until = until
        self._asked = Reclaim("", 0)
        self._pressed = 0
        self._ended = False

    def start(self, now: float) -> Reclaim | Rest | End:
        """The first instruction."""
        return self._next(now, 0.0)

    def handle(self, event: Reclaimed | Rested | Stop) -> Reclaim | Rest | End:
        """What is to be done next. After the end nothing is."""
        if self._ended:
            return End(self.freed, True)
        if isinstance(event, Stop):
            return self._end(event.reason)
        if isinstance(event, Reclaimed):
            return self._take(event)
        if event.refaulted > max(REFAULTED_NOISE, REFAULTED_SHARE * self.freed):
            return self._end(f"{event.refaulted // MIB} MiB were read back: the rest is not cold")
        return self._next(event.now, event.pressure)

    def _take(self, event: Reclaimed) -> Reclaim | Rest | End:
        group = self._asked.group
        self.freed += event.freed
        # The kernel may reclaim more than it was asked for; what is left is never more than before.
        self._left[group] -= max(event.freed, self._asked.size)
        if event.freed < WORTH * self._asked.size:
            self._left[group] = 0
        return Rest(max(REST_S, REST_TO_STEP * event.seconds))

    def _next(self, now: float, pressure: float) -> Reclaim | Rest | End:
        missing = self._wanted - self.freed
        if missing < SMALLEST_STEP:
            return self._end("", done=False)
        if now >= self._until:
            return self._end("", done=False)
        group = max(self._left, key=lambda name: self._left[name], default="")
        if not group or self._left[group] < SMALLEST_STEP:
            return self._end("the rest of the guest's memory is in use or protected")
        calm = max(0.0, 1.0 - pressure / THRESHOLD)
        self._pressed = 0 if calm else self._pressed + 1
        if self._pressed > PATIENCE:
            return self._end(f"tasks wait for memory {pressure:.0%} of the time")
        if not calm:
            return Rest(REST_S)
        step = min(self._share[group] * calm, LARGEST_STEP)
        self._asked = Reclaim(group, int(min(max(step, SMALLEST_STEP), missing, self._left[group])))
        return self._asked

    def _end(self, reason: str, done: bool = True) -> End:
        self._ended = True
        return End(self.freed, done, reason)
