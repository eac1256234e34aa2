"""Client of the history: how hosts and VMs were over hours and days."""

from __future__ import annotations

from ebbtide.client.connection import Connection, query_of
from ebbtide.messages.history import HostHistory, VMHistory


class HistoryCalls(Connection):
    """Methods of `ebbtide.client.ManagerClient`."""

    async def host_history(
        self, host: str, *, begin: float | None = None, end: float | None = None, points: int | None = None
    ) -> HostHistory:
        """How a host was, in at most ``points`` equal steps.

        ``begin``, ``end``: seconds since the epoch; default: the six hours before ``end``, and now.
        """
        query = query_of({"from": begin, "to": end, "points": points})
        return await self._one("GET", f"/v1/hosts/{host}/history", HostHistory, query=query)

    async def vm_history(
        self, name: str, *, begin: float | None = None, end: float | None = None, points: int | None = None
    ) -> VMHistory:
        """How a VM was, on whatever hosts. As `host_history`."""
        query = query_of({"from": begin, "to": end, "points": points})
        return await self._one("GET", f"/v1/vms/{name}/history", VMHistory, query=query)
