"""Client of tasks, of the engine that runs them and of the acquirer of their machines."""

from __future__ import annotations

from ebbtide.client.connection import Connection
from ebbtide.client.lifecycle import new_request_id
from ebbtide.messages.tasks import (
    AcquirerStatus,
    EngineStatus,
    ManagedTask,
    TaskExplanation,
    TaskOutput,
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

    async def task(self, name: str, wait_s: float = 0.0) -> ManagedTask:
        """One task; waits up to ``wait_s`` seconds for its end. ManagerRefused with status 404 if there is none."""
        query = {"wait_s": f"{wait_s:g}"} if wait_s else None
        return await self._one("GET", f"/v1/tasks/{name}", ManagedTask, query=query, held_s=wait_s)

    async def task_output(self, name: str, offset: int = 0, limit: int = 65_536) -> TaskOutput:
        """A part of what a task's last attempt prints, from ``offset`` on (bytes; negative: from the end).

        ManagerRefused with the code no-output (404) where there is none. Go on at ``next_offset``; where ``attempt``
        is another one by then, at 0.
        """
        query = {"offset": str(offset), "limit": str(limit)}
        return await self._one("GET", f"/v1/tasks/{name}/output", TaskOutput, query=query)

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
