"""Client of tasks, of the engine that runs them and of the acquirer of their machines."""

from __future__ import annotations

from ebbtide.client.connection import Connection
from ebbtide.client.lifecycle import new_request_id
from ebbtide.messages.tasks import (
    AcquirerStatus,
    EngineStatus,
    ManagedTask,
    TaskExplanation,
    TaskRequest,
    TaskSpec,
    TaskState,
)


class TaskCalls(Connection):
    """Methods of `ebbtide.client.ManagerClient`."""

    async def submit_task(self, spec: TaskSpec, *, request_id: str | None = None) -> ManagedTask:
        """Submit a task; the same request id again gets the same task."""
        body = TaskRequest(request_id=request_id or new_request_id(), task=spec)
        return await self._one("POST", "/v1/tasks", ManagedTask, body=body)

    async def tasks(
        self,
        limit: int | None = 100,
        *,
        state: TaskState | None = None,
        machine: str | None = None,
        prefix: str | None = None,
    ) -> list[ManagedTask]:
        """The latest tasks, newest first. ``limit``: None: all."""
        query = {"state": state, "machine": machine, "prefix": prefix}
        return await self._list("/v1/tasks", "tasks", ManagedTask, query, limit)

    async def task(self, name: str) -> ManagedTask:
        """One task; ManagerRefused with status 404 if there is none of that name."""
        return await self._one("GET", f"/v1/tasks/{name}", ManagedTask)

    async def explain_task(self, name: str) -> TaskExplanation:
        """Why a task waits, and what it waits for."""
        return await self._one("GET", f"/v1/tasks/{name}/explanation", TaskExplanation)

    async def cancel_task(self, name: str) -> ManagedTask:
        """Cancel a task; harmless where it has ended."""
        return await self._one("DELETE", f"/v1/tasks/{name}", ManagedTask)

    async def engine(self) -> EngineStatus:
        """What runs the tasks, and its machines."""
        return await self._one("GET", "/v1/engine", EngineStatus)

    async def acquirer(self) -> AcquirerStatus:
        """The harvest VMs that are kept for tasks, and why."""
        return await self._one("GET", "/v1/acquirer", AcquirerStatus)
