"""Client of the lifecycle of VMs: stop, start, resize, migrate, adopt, release, templates."""

from __future__ import annotations

import uuid

from ebbtide.client.connection import Connection
from ebbtide.deflation.allocations import Priority
from ebbtide.messages.adoptions import MEASURED_S, Adoptable
from ebbtide.messages.common import PartialVector, Vector
from ebbtide.messages.hosts import TemplateInfo, TemplateList
from ebbtide.messages.operations import Operation
from ebbtide.messages.requests import (
    AdoptRequest,
    MigrateRequest,
    ReleaseRequest,
    ResizeRequest,
    StartRequest,
    StopRequest,
)
from ebbtide.messages.vms import OnPreemption


class LifecycleCalls(Connection):
    """Methods of `ebbtide.client.ManagerClient`; each returns the running operation.

    ``version``: of the VM that is meant; ManagerRefused with status 412 if it has another by now.
    """

    async def stop(
        self, name: str, *, limit_s: float = 60.0, version: str | None = None, request_id: str | None = None
    ) -> Operation:
        """Have a VM power off, by force after ``limit_s`` seconds; it keeps its name, its host and its disk."""
        body = StopRequest(request_id=request_id or new_request_id(), limit_s=limit_s)
        return await self._one("POST", f"/v1/vms/{name}/stop", Operation, body=body, headers=if_match(version))

    async def start(
        self,
        name: str,
        *,
        anywhere: bool = False,
        lose_disk: bool = False,
        deadline_s: float = 60.0,
        version: str | None = None,
        request_id: str | None = None,
    ) -> Operation:
        """Start a VM that is off. ``anywhere``: on another host where its own has no room."""
        body = StartRequest(
            request_id=request_id or new_request_id(), anywhere=anywhere, lose_disk=lose_disk, deadline_s=deadline_s
        )
        return await self._one("POST", f"/v1/vms/{name}/start", Operation, body=body, headers=if_match(version))

    async def resize(
        self,
        name: str,
        *,
        nominal: PartialVector | None = None,
        minimum: PartialVector | None = None,
        ceiling: PartialVector | None = None,
        priority: Priority | None = None,
        on_preemption: OnPreemption | None = None,
        preemption_notice_s: float | None = None,
        steady: bool | None = None,
        deadline_s: float = 60.0,
        version: str | None = None,
        request_id: str | None = None,
    ) -> Operation:
        """Sell a VM as something else; what is left out stays."""
        body = ResizeRequest(
            request_id=request_id or new_request_id(),
            nominal=nominal,
            minimum=minimum,
            ceiling=ceiling,
            priority=priority,
            on_preemption=on_preemption,
            preemption_notice_s=preemption_notice_s,
            steady=steady,
            deadline_s=deadline_s,
        )
        return await self._one("PATCH", f"/v1/vms/{name}", Operation, body=body, headers=if_match(version))

    async def migrate(
        self,
        name: str,
        *,
        host: str | None = None,
        lose_disk: bool = False,
        limit_s: float = 60.0,
        deadline_s: float = 60.0,
        live: bool = False,
        copy_storage: bool = False,
        bandwidth_mib_s: float = 0.0,
        version: str | None = None,
        request_id: str | None = None,
    ) -> Operation:
        """Stop a VM where it is and start it elsewhere; if that fails it stays where it was, off if it was stopped.

        ``live``: move it while it runs; what has not moved within the deadline is called off, and it goes on.
        """
        body = MigrateRequest(
            request_id=request_id or new_request_id(),
            host=host,
            lose_disk=lose_disk,
            limit_s=limit_s,
            deadline_s=deadline_s,
            live=live,
            copy_storage=copy_storage,
            bandwidth_mib_s=bandwidth_mib_s,
        )
        return await self._one("POST", f"/v1/vms/{name}/migrate", Operation, body=body, headers=if_match(version))

    async def adopt(
        self,
        domain: str,
        host: str,
        *,
        name: str | None = None,
        priority: Priority = Priority.DEFLATABLE,
        minimum: Vector | None = None,
        request_id: str | None = None,
    ) -> Operation:
        """Manage a running domain that was made without us, at the size that it has."""
        body = AdoptRequest(
            request_id=request_id or new_request_id(),
            host=host,
            domain=domain,
            name=name,
            priority=priority,
            minimum=minimum or Vector(),
        )
        return await self._one("POST", "/v1/adoptions", Operation, body=body)

    async def adoptable(self, domain: str, host: str) -> Adoptable:
        """What a running domain could be adopted as, with minimums by what it uses: takes some seconds."""
        query = {"host": host, "domain": domain}
        return await self._one("GET", "/v1/adoptions", Adoptable, query=query, held_s=MEASURED_S)

    async def release(
        self, name: str, *, deadline_s: float = 60.0, version: str | None = None, request_id: str | None = None
    ) -> Operation:
        """Give an adopted VM back as it was."""
        body = ReleaseRequest(request_id=request_id or new_request_id(), deadline_s=deadline_s)
        return await self._one("POST", f"/v1/vms/{name}/release", Operation, body=body, headers=if_match(version))

    async def templates(self, host: str) -> list[TemplateInfo]:
        """The templates of a host."""
        return list((await self._one("GET", f"/v1/hosts/{host}/templates", TemplateList)).templates)


def if_match(version: str | None) -> dict[str, str] | None:
    """The headers of a change that is meant for this version only; None: for any."""
    return None if version is None else {"If-Match": f'"{version}"'}


def new_request_id() -> str:
    """A new request id."""
    return f"ebb-{uuid.uuid4().hex[:20]}"
