"""That the manager's certificate, or the CA's, ends soon: neither renews itself."""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import Callable, Iterable
from typing import Final

import structlog

from cluster_manager.store.periodic import Periodic
from cluster_manager.store.store import Store
from cluster_manager.store.tasks import TaskNote
from ebbtide.rest.tls import first_end

log = structlog.get_logger()

#: Before a certificate ends; the alert EbbtideCertificateEnds has the same.
WARNED_BEFORE: Final = datetime.timedelta(days=30)
#: Seconds between two looks at when it ends.
LOOKED_EVERY_S: Final = 86_400.0
_THEN: Final = "then no host and no client reaches it any more"


class CertificateEnd:
    """Tells webhooks of it, too, while this manager leads: from the beginning of a term on. From `start` to `stop`.

    :param certificates: those in force, PEM.
    :param clock: seconds since the epoch.
    """

    def __init__(self, store: Store, certificates: Callable[[], Iterable[bytes]], clock: Callable[[], float]) -> None:
        self._store = store
        self._certificates = certificates
        self._clock = clock
        failed = "that a certificate ends was not told"
        self._task = Periodic("tells that a certificate ends", self.tell, LOOKED_EVERY_S, failed)
        self.start, self.stop = self._task.start, self._task.stop

    async def tell(self) -> None:
        """Write the event, if there is reason for one. Raises `StoreError`."""
        now = datetime.datetime.fromtimestamp(self._clock(), datetime.UTC)
        end = await asyncio.to_thread(end_soon, self._certificates(), now)
        if end is not None:
            ends = end.isoformat(timespec="seconds")
            told = f"the manager's certificate, or the CA's, ends at {ends}: {_THEN}"
            await self._store.save_tasks((), [TaskNote("certificate-ends", None, told)])


def warn_of_end(certificates: Iterable[bytes], now: datetime.datetime) -> None:
    """Say so in the log, which a manager that stands by does as well."""
    if (end := end_soon(certificates, now)) is not None:
        days = round((end - now).total_seconds() / 86_400, 1)
        ends = end.isoformat(timespec="seconds")
        log.warning(f"the manager's certificate, or the CA's, ends soon: {_THEN}", ends=ends, days=days)


def end_soon(certificates: Iterable[bytes], now: datetime.datetime) -> datetime.datetime | None:
    """When the first of them ends; None: not soon, or there is none."""
    end = first_end(certificates)
    return end if end is not None and end - now < WARNED_BEFORE else None
