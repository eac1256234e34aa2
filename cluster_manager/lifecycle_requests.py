"""Takes requests about VMs that exist: checks them against store and reports, and begins their plans."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import Final

from pydantic import BaseModel, ValidationError

from cluster_manager.errors import RequestError
from cluster_manager.hosts import Hosts
from cluster_manager.lifecycle import sold_as, start_adoption, start_release, start_resize, start_start, start_stop
from cluster_manager.migrations import start_migration
from cluster_manager.operations import BUSY, Operations
from cluster_manager.plans import GONE_S, VMPhase
from cluster_manager.rows import StoredVM
from cluster_manager.running_plans import Prepared, plan_id
from cluster_manager.store import Store
from cluster_manager.versions import ANY_VERSION, Precondition
from deflation.allocations import HARD_FLOOR, Priority
from deflation.errors import InvalidField
from deflation.lifecycle_messages import (
    ADOPTED_TEMPLATE,
    AdoptRequest,
    MigrateRequest,
    ReleaseRequest,
    ResizeRequest,
    StartRequest,
    StopRequest,
)
from deflation.messages import NAME_PATTERN, Operation, Vector, VMSpec, VMState, problem_of
from deflation.placement_policies import PlacementPolicy

Preparing = Callable[[], Awaitable[Prepared]]
_LEAST: Final = Vector.of(HARD_FLOOR.with_component("disk_mib_s", 0.0).with_component("network_mib_s", 0.0))


class Lifecycle:
    """Stop, start, resize, migrate, adopt, release.

    :param policy: how a migration's host is chosen.
    :param gone_s: for how long a VM waits for a host that has not answered until a request's own deadline.
    """

    def __init__(
        self, operations: Operations, store: Store, hosts: Hosts, policy: PlacementPolicy, gone_s: float = GONE_S
    ) -> None:
        self._operations = operations
        self._store = store
        self._hosts = hosts
        self._policy = policy
        self._gone_s = gone_s

    async def stop(self, name: str, request: StopRequest, precondition: Precondition = ANY_VERSION) -> Operation:
        """Have a VM power off. Raises :class:`RequestError`: 404 unknown, 409 stopped already, 503 silent host."""

        async def prepare() -> Prepared:
            row = await self._free(name, precondition)
            host = self._ready(row)
            if self._phase(row) is VMPhase.STOPPED and row.phase is VMPhase.STOPPED:
                raise RequestError(409, f"{name} is stopped already", "name")
            state = start_stop(plan_id("stop", name), request.request_id, name, host, request.limit_s)
            return Prepared(state, phase=VMPhase.STOPPING)

        return await self._begin("stop", name, request, prepare)

    async def start(self, name: str, request: StartRequest, precondition: Precondition = ANY_VERSION) -> Operation:
        """Start a VM that is off.

        Raises :class:`RequestError`: 404 unknown, 409 where it runs or would lose its disk, 503 silent host.
        """

        async def prepare() -> Prepared:
            row = await self._free(name, precondition)
            host = self._ready(row)
            if self._phase(row) is not VMPhase.STOPPED:
                raise RequestError(409, f"{name} is {self._phase(row)}, not stopped", "name")
            if request.anywhere:
                self._check_disk(row, host, request.lose_disk)
            new_id = plan_id("start", name)
            state = start_start(
                new_id,
                request.request_id,
                name,
                host,
                row.spec,
                request.anywhere,
                request.deadline_s,
                gone_s=self._gone_s,
            )
            return Prepared(state, phase=VMPhase.STARTING)

        return await self._begin("start", name, request, prepare)

    async def resize(self, name: str, request: ResizeRequest, precondition: Precondition = ANY_VERSION) -> Operation:
        """Sell a VM as something else. Raises :class:`RequestError`: 400 sizes that contradict each other."""

        async def prepare() -> Prepared:
            row = await self._free(name, precondition)
            host = self._ready(row)
            if row.phase not in (VMPhase.RUNNING, VMPhase.STOPPED):
                raise RequestError(409, f"{name} is {row.phase}", "name")
            try:
                spec = request.onto(self._sold(row))
            except (ValidationError, InvalidField) as error:
                problem = problem_of(error)
                raise RequestError(400, problem.error, problem.field) from error
            state = start_resize(plan_id("resize", name), request.request_id, name, host, spec, request.deadline_s)
            return Prepared(state, phase=row.phase)

        return await self._begin("resize", name, request, prepare)

    async def migrate(self, name: str, request: MigrateRequest, precondition: Precondition = ANY_VERSION) -> Operation:
        """Move a VM to another host by stopping it and starting it there.

        Raises :class:`RequestError`: 404 unknown, 409 where it would lose its disk, 503 silent host.
        """

        async def prepare() -> Prepared:
            row = await self._free(name, precondition)
            host = self._ready(row)
            phase = self._phase(row)
            if phase not in (VMPhase.RUNNING, VMPhase.STOPPED):
                raise RequestError(409, f"{name} is {phase}", "name")
            if request.host is not None:
                self._check_target(name, host, request.host)
            self._check_disk(row, host, request.lose_disk)
            state = start_migration(
                plan_id("migrate", name),
                request.request_id,
                self._sold(row),
                host,
                host=request.host,
                running=phase is VMPhase.RUNNING,
                stopped=phase is VMPhase.STOPPED and row.phase is VMPhase.STOPPED,
                limit_s=request.limit_s,
                deadline_s=request.deadline_s,
                policy=self._policy,
                gone_s=self._gone_s,
            )
            return Prepared(state, phase=VMPhase.MIGRATING)

        return await self._begin("migrate", name, request, prepare)

    async def adopt(self, request: AdoptRequest) -> Operation:
        """Look after a domain that somebody else has made. Raises :class:`RequestError`: 404, 409 name taken, 503."""
        name = request.name or request.domain
        if request.name is None and not _is_name(name):
            sentence = f"name: {name} can be no VM's name, so one has to be given (lower-case letters, digits, hyphens)"
            raise RequestError(400, sentence, "name")

        async def prepare() -> Prepared:
            for row in await self._store.vms(name):
                if row.host is not None or row.phase is not VMPhase.FAILED:
                    raise RequestError(409, f"name: {name} exists already ({row.phase})", "name")
            if self._hosts.get(request.host) is None:
                raise RequestError(404, f"there is no host {request.host}", "host")
            if not self._hosts.is_ready(request.host):
                raise RequestError(503, f"{request.host} is silent", "host")
            if request.priority is Priority.HARVEST:
                raise RequestError(400, "priority: a domain is adopted as fixed or deflatable", "priority")
            state = start_adoption(plan_id("adopt", name), name, request)
            # Its sizes are read on its host; until then the row only holds the name.
            spec = VMSpec(name=name, nominal=_LEAST, template=ADOPTED_TEMPLATE)
            sentence = f"being adopted on {request.host}"
            row = StoredVM(name, request.host, VMPhase.PLACING, spec, sentence, False, request.request_id, 0)
            return Prepared(state, row=row)

        return await self._begin("adopt", name, request, prepare)

    async def release(self, name: str, request: ReleaseRequest, precondition: Precondition = ANY_VERSION) -> Operation:
        """Give an adopted VM back. Raises :class:`RequestError`: 404 unknown, 409 where it was made here, 503."""

        async def prepare() -> Prepared:
            row = await self._free(name, precondition)
            host = self._ready(row)
            if row.spec.template != ADOPTED_TEMPLATE:
                raise RequestError(409, f"{name} was not adopted: it can be deleted, not released", "name")
            new_id = plan_id("release", name)
            state = start_release(new_id, request.request_id, name, host, request.deadline_s)
            return Prepared(state, phase=row.phase)

        return await self._begin("release", name, request, prepare)

    # --- what they share ---------------------------------------------------------------------------------------------

    async def _begin(self, kind: str, name: str, request: BaseModel, prepare: Preparing) -> Operation:
        body = request.model_dump_json(exclude={"request_id"})
        request_id: str = request.model_dump()["request_id"]
        return await self._operations.begin(request_id, f"{kind} {name} {body}", prepare)

    async def _free(self, name: str, precondition: Precondition) -> StoredVM:
        """The row of a VM that no plan is at work on and that has the version which is asked for."""
        row = await self._operations.existing(name)
        precondition(row)
        if row.phase in BUSY:
            raise RequestError(409, f"{name} is {row.phase}: wait for operation {row.request_id}", "name")
        if row.owes_removal:
            raise RequestError(409, f"{name} is removed as soon as {row.host} answers: {row.sentence}", "name")
        if (other := self._operations.changing(name)) is not None:
            raise RequestError(409, f"{name} is being changed: wait for operation {other}", "name")
        return row

    def _ready(self, row: StoredVM) -> str:
        """The host of a VM, which has reported lately."""
        if row.host is None:
            raise RequestError(409, f"{row.name} is {row.phase} and on no host", "name")
        if not self._hosts.is_ready(row.host):
            raise RequestError(503, f"{row.host}, where {row.name} is, is silent")
        return row.host

    def _phase(self, row: StoredVM) -> VMPhase:
        """The phase, by the store and the host's last report together."""
        reported = self._hosts.vm(row.host, row.name)
        if reported is None or row.phase not in (VMPhase.RUNNING, VMPhase.STOPPED, VMPhase.FAILED):
            return row.phase
        return VMPhase.STOPPED if reported.state is VMState.STOPPED else VMPhase.RUNNING

    def _sold(self, row: StoredVM) -> VMSpec:
        """What the VM is sold as: the host's word counts where the answer to an earlier change was lost."""
        reported = self._hosts.vm(row.host, row.name)
        if reported is not None and reported.at_next_start is not None:
            return reported.at_next_start.model_copy(update={"xml": row.spec.xml, "template": row.spec.template})
        return sold_as(row.spec, reported)

    def _check_target(self, name: str, home: str, host: str) -> None:
        if host == home:
            raise RequestError(409, f"host: {name} is on {host} already", "host")
        if self._hosts.get(host) is None:
            raise RequestError(404, f"there is no host {host}", "host")
        if not self._hosts.is_ready(host):
            raise RequestError(503, f"{host} is silent", "host")

    def _check_disk(self, row: StoredVM, host: str, lose_disk: bool) -> None:
        """Whether a VM may go elsewhere: its disk is shared, or its owner says that it may be lost."""
        known = self._hosts.get(host)
        reported = self._hosts.vm(host, row.name)
        if row.spec.template == ADOPTED_TEMPLATE or (reported is not None and reported.adopted):
            raise RequestError(409, f"{row.name} is adopted: its domain stays where it is", "name")
        templates = known.report.templates if known is not None else None
        shared = row.spec.xml is None and any(t.shared_disk for t in templates or () if t.name == row.spec.template)
        if not (shared or lose_disk):
            sentence = f"lose_disk: must be true, since the disk of {row.name} is on {host} alone and stays behind"
            raise RequestError(409, sentence, "lose_disk")


def _is_name(text: str) -> bool:
    return re.fullmatch(NAME_PATTERN, text) is not None
