"""Which hosts have fallen silent, and which report again, for the log: nothing else happens at that moment."""

from __future__ import annotations

import time
from collections.abc import Callable

import structlog

from cluster_manager.inventory.hosts import Hosts

log = structlog.get_logger()


class Silence:
    """What was told of each host.

    :param monotonic: seconds.
    """

    def __init__(self, hosts: Hosts, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._hosts = hosts
        self._monotonic = monotonic
        #: Since when each was found silent.
        self._since: dict[str, float] = {}

    async def look(self) -> None:
        """Tell what has changed since the last look."""
        now, ids = self._monotonic(), self._hosts.ids()
        silent = {host_id for host_id in ids if self._hosts.is_silent(host_id)}
        for host_id in sorted(silent - self._since.keys()):
            log.warning("a host is silent", host=host_id, why="it has not reported for a while, or is revoked")
            self._since[host_id] = now
        for host_id in sorted(self._since.keys() - silent):
            since = self._since.pop(host_id)
            if host_id in ids:
                log.info("a host reports again", host=host_id, silent_s=round(now - since, 1))
