"""Records of tasks that the store has forgotten: removed once a day, with what their commands printed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import structlog

from cluster_manager.defaults import DAY_S
from cluster_manager.store.periodic import Periodic
from cluster_manager.store.tasks import TaskRows
from ebbtide.matcher.engines.records import Records
from ebbtide.matcher.engines.settings import EngineSettings
from ebbtide.matcher.errors import EngineUnreachable
from ebbtide.matcher.match.attempts import task_of

#: After the beginning of a term, which has other things to do.
FIRST_S: Final = 600.0
#: One directory may hold much, and nobody waits.
LIMIT_S: Final = 3600.0

log = structlog.get_logger()


class OldRecords:
    """Runs from `start` to `stop`.

    :param age_s: how long the store remembers tasks; younger records are left alone.
    :param clock: seconds since the epoch.
    """

    def __init__(self, store: TaskRows, settings: EngineSettings, age_s: float, clock: Callable[[], float]) -> None:
        self._store = store
        self._settings = settings
        self._age_s = age_s
        self._clock = clock
        self._task = Periodic(
            "removal of old tasks' records", self.remove, DAY_S, "the records of old tasks were not removed", FIRST_S
        )
        self.start, self.stop = self._task.start, self._task.stop

    async def remove(self) -> int:
        """Remove the records of each attempt whose task is not in the store. Returns of how many.

        One whose records cannot be removed keeps no other: it is tried again the next time.
        """
        if self._settings.directory is None:
            return 0
        records, gone = Records(self._settings.directory, LIMIT_S), 0
        try:
            untouched = await records.untouched_since(self._clock() - self._age_s)
        except EngineUnreachable as error:
            log.warning("records of old tasks were not removed", why=str(error))
            return 0
        for attempt in untouched:
            of = task_of(attempt, self._settings.label)
            if of is None:
                continue  # another manager's, or no attempt
            row = await self._store.task(name=of[0])
            if row is not None and (row.unread or row.task.key == of[1]):
                continue
            try:
                found = (await records.read([attempt]))[attempt]
                if found.silent_s is not None and found.ended_at is None and found.silent_s < self._age_s:
                    continue  # its command is at work: the store may be the wrong one
                await records.remove(attempt)
            except EngineUnreachable as error:
                log.warning("records of old tasks were not removed", attempt=attempt, why=str(error))
                continue
            gone += 1
        if gone:
            log.info("records of old tasks were removed", attempts=gone)
        return gone
