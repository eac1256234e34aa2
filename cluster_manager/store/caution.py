"""Whether the clock is believed so far that what is old by it may be deleted."""

from __future__ import annotations

from typing import Final

import structlog

from cluster_manager.defaults import DAY_S
from cluster_manager.store.knowledge import KnowledgeRows

log = structlog.get_logger()

#: So many looks it has to stand by that.
LOOKS: Final = 6


class Caution:
    """For one kind of deletion. A clock that is ahead is often right again soon, and what is deleted is gone for good.

    :param what: is kept meanwhile, for the log.
    :param leap_s: a clock that goes on by more than this from one look to the next has leapt.
    """

    def __init__(self, store: KnowledgeRows, what: str, leap_s: float = DAY_S) -> None:
        self._store = store
        self._what = what
        self._leap_s = leap_s
        self._latest: float | None = None
        self._doubts = 0

    async def allows(self, now: float) -> bool:
        """At each look, once. Raises StoreError: what it knows of the time before this term cannot be read."""
        latest = self._latest
        if latest is None:
            latest = await self._store.known_before()
        self._latest = now
        if latest is not None and now - latest > self._leap_s:
            self._doubts = LOOKS
            why = f"the clock is {(now - latest) / 3600.0:.1f} h beyond what was known last; {LOOKS} looks are waited"
            log.warning(f"{self._what} is deleted for now", why=why)
        allowed = self._doubts == 0
        self._doubts = max(self._doubts - 1, 0)
        return allowed
