"""State machine of one webhook: events in, deliveries out, one at a time and in order. Pure: no clock, no network.

``now`` is of a clock that nobody sets: events are dated by another one, which may come from far behind.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Final, TypeVar

from cluster_manager.alerts.webhooks import Webhook
from ebbtide.messages.explanations import Event

KeyT = TypeVar("KeyT", bound=StrEnum)

#: Events that wait at a time; the oldest give way to newer ones.
MOST_WAITING: Final = 200
#: Pauses between tries: the first, doubled each time, up to the longest.
PAUSE_S: Final = 2.0
LONGEST_PAUSE_S: Final = 300.0
#: What is older is no news: it is given up.
OLDEST_S: Final = 3600.0


class Outcome(StrEnum):
    """What came of a try."""

    DELIVERED = "delivered"
    #: No answer, 408, 429 or 5xx: it is tried again.
    FAILED = "failed"
    #: Another answer, a redirection among them: trying again would not help.
    REFUSED = "refused"


class Drop(StrEnum):
    """Why an event was not delivered."""

    OVERFLOW = "overflow"
    EXPIRED = "expired"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Outbox:
    """What one webhook has still to be sent.

    :param waiting: oldest first; the first is the next to be delivered.
    :param since: by id, when each of them happened.
    :param seen: id of the last event that was offered.
    :param failures: of the first, in a row.
    :param due_at: when it may be tried again.
    :param tries: counted by outcome.
    :param drops: counted by reason.
    """

    webhook: Webhook
    seen: int
    waiting: tuple[Event, ...] = ()
    since: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({}))
    failures: int = 0
    due_at: float = -math.inf
    tries: Mapping[Outcome, int] = field(default_factory=lambda: MappingProxyType({}))
    drops: Mapping[Drop, int] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def position(self) -> int:
        """All events up to this id are done with: a later leader goes on behind it."""
        return self.waiting[0].id - 1 if self.waiting else self.seen

    def offered(self, events: Iterable[Event], now: float, beyond_s: float = 0.0) -> Outbox:
        """With what is news for it among these events, which come in the order of the log.

        :param beyond_s: by how much the clock of their dates is beyond ``now``.
        """
        news = [event for event in events if event.id > self.seen]
        if not news:
            return self
        wanted = [event for event in news if self.webhook.wants(event)]
        fresh = [event for event in wanted if now + beyond_s - event.at <= OLDEST_S]
        since = {**self.since, **{event.id: min(event.at - beyond_s, now) for event in fresh}}
        waiting = (*self.waiting, *fresh)
        kept = waiting[-MOST_WAITING:]
        dropped = self._dropping(Drop.EXPIRED, len(wanted) - len(fresh))
        dropped = dropped._dropping(Drop.OVERFLOW, len(waiting) - len(kept))
        first_stays = bool(self.waiting) and kept[0] is self.waiting[0]
        again = (self.failures, self.due_at) if first_stays else (0, self.due_at)
        dropped = replace(dropped, seen=news[-1].id, failures=again[0], due_at=again[1])
        return dropped._keeping(kept, since)

    def due(self, now: float) -> Event | None:
        """What is to be delivered now."""
        return self.waiting[0] if self.waiting and now >= self.due_at else None

    def answered(self, event: Event, outcome: Outcome, now: float, retry_after_s: float = 0.0) -> Outbox:
        """After a try. ``retry_after_s`` is what the receiver asked for."""
        tried = replace(self, tries=_one_more(self.tries, outcome, 1))
        if not self.waiting or self.waiting[0].id != event.id:
            return tried  # it has given way to newer ones meanwhile
        if outcome is not Outcome.FAILED:
            dropped = tried._dropping(Drop.REFUSED, 1) if outcome is Outcome.REFUSED else tried
            return replace(dropped, failures=0, due_at=now)._keeping(self.waiting[1:], self.since)
        pause_s = min(max(PAUSE_S * 2.0 ** min(self.failures, 20), retry_after_s), LONGEST_PAUSE_S)
        kept = tuple(waiting for waiting in self.waiting if now - self.since[waiting.id] <= OLDEST_S)
        failures = self.failures + 1 if kept and kept[0] is self.waiting[0] else 0
        dropped = tried._dropping(Drop.EXPIRED, len(self.waiting) - len(kept))
        return replace(dropped, failures=failures, due_at=now + pause_s)._keeping(kept, self.since)

    def _keeping(self, kept: tuple[Event, ...], since: Mapping[int, float]) -> Outbox:
        return replace(self, waiting=kept, since=MappingProxyType({event.id: since[event.id] for event in kept}))

    def _dropping(self, why: Drop, count: int) -> Outbox:
        return replace(self, drops=_one_more(self.drops, why, count)) if count else self


def _one_more(counts: Mapping[KeyT, int], key: KeyT, count: int) -> Mapping[KeyT, int]:
    return MappingProxyType({**counts, key: counts.get(key, 0) + count})
