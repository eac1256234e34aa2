"""Whether the clock is believed so far that what is old by it may be deleted."""

from __future__ import annotations

from typing import Final

import structlog

from cluster_manager.defaults import DAY_S
from cluster_manager.store.knowledge import KnowledgeRows

log = structlog.get_logger()

#: A clock that goes on by more than this from one look to the next, seconds, has leapt.
LEAP_S: Final = DAY_S
#: So many looks it has to stand by that.
LOOKS: Final = 6


class Caution:
    """For one kind of deletion. A clock that is ahead is often right again soon, and what is deleted is gone for good.

    :param what: is kept meanwhile, for the log.
    """

    def __init__(self, store: KnowledgeRows, what: str) -> None:
        self._store = store
        self._what = what
        self._latest: float | None = None
        self._doubts = 0

    async def allows(self, now: float) -> bool:
        """At each look, once. Raises StoreError: what it knows of the time before this term cannot be read."""
        latest = self._latest
        if latest is None:
            latest = await self._store.known_before()
        self._latest = now
        if latest is not None and now - latest > LEAP_S:
            self._doubts = LOOKS
            why = f"the clock is {(now - latest) / DAY_S:.1f} days beyond what was known last; {LOOKS} looks are waited"
            log.warning(f"{self._what} is deleted for now", why=why)
        allowed = self._doubts == 0
        self._doubts = max(self._doubts - 1, 0)
        return allowed
