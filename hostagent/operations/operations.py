"""Operations of the agent: idempotent by request id, run in the background, remembered until newer ones come."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import structlog

from ebbtide.deflation.cascade.outcomes import beyond_rounding
from ebbtide.deflation.errors import InvalidField
from ebbtide.deflation.resources import ZERO, ResourceVector
from ebbtide.deflation.sharing.proportional import Split
from ebbtide.messages.common import Vector
from ebbtide.messages.operations import Operation, OperationState, VMOutcome
from ebbtide.messages.problem_codes import ProblemCode
from ebbtide.rest.metrics.totals import OPERATION_S, Distributions
from ebbtide.tracing.spans import Span, current, logged
from ebbtide.tracing.spans import operation as tracing_operation
from hostagent.errors import HostAgentError, RequestRefused

#: Ended operations that are remembered.
REMEMBERED: Final = 1000
#: Sentences of one operation's progress that are kept, the latest: a move says one a second, however long it takes.
TOLD: Final = 500
#: How often it is tried again to write down that an operation has failed, seconds.
WRITE_AGAIN_S: Final = 2.0

Kind = Literal[
    "create",
    "delete",
    "target",
    "reclaim",
    "reinflate",
    "mode",
    "stop",
    "start",
    "resize",
    "adopt",
    "release",
    "withdraw",
    "arrive",
    "depart",
]
#: Carries an operation out: gets its record and returns it as it ended.
Run = Callable[[Operation], Awaitable[Operation]]
log = structlog.get_logger()


@dataclass(slots=True)
class _Record:
    operation: Operation
    body: dict[str, Any]
    ended: asyncio.Event = field(default_factory=asyncio.Event)


async def _nothing_to_write(request_id: str) -> bool:
    return True


class Operations:
    """All operations of one agent. Tasks are held here and cancelled by `close`.

    :param failure_is_written: by request id, whether an operation may be answered as failed: a later agent knows of it,
        or would not go on with it.
    """

    def __init__(self, host: str, failure_is_written: Callable[[str], Awaitable[bool]] = _nothing_to_write) -> None:
        self._host = host
        self._failure_is_written = failure_is_written
        self._records: OrderedDict[str, _Record] = OrderedDict()
        self._tasks: set[asyncio.Task[None]] = set()
        #: Of those who wait for an end.
        self._limits: set[asyncio.Timeout] = set()
        self._hung_up = False
        #: How long those took that have ended, by kind and state.
        self.durations: Distributions[tuple[str, str]] = Distributions(OPERATION_S)

    def has(self, request_id: str) -> bool:
        """Whether an operation of this id has begun."""
        return request_id in self._records

    def known(
        self, request_id: str, kind: Kind, body: dict[str, Any], read_again: Callable[[dict[str, Any]], dict[str, Any]]
    ) -> Operation | None:
        """The operation that this request has begun already; None if it is new.

        :param read_again: the body as this version writes it.
        :raises RequestRefused: the id stands for another request.
        """
        record = self._records.get(request_id)
        if record is None:
            return None
        if record.operation.kind != kind or (record.body != body and read_again(record.body) != body):
            raise RequestRefused(
                409,
                f"request_id {request_id} was used for another request",
                "request_id",
                code=ProblemCode.REQUEST_ID_REUSED,
            )
        return record.operation

    def begin(
        self,
        request_id: str,
        kind: Kind,
        body: dict[str, Any],
        run: Run,
        vm: str | None = None,
        started_at: float | None = None,
    ) -> Operation:
        """Start an operation in the background. ``run`` gets its record and returns it as it ended."""
        operation = Operation(
            request_id=request_id,
            kind=kind,
            state=OperationState.RUNNING,
            sentence="under way",
            vm=vm,
            host=self._host,
            started_at=time.time() if started_at is None else started_at,
        )
        # Here, since what asked for it may have had its answer before the task begins.
        spanned = tracing_operation(f"operation {kind}", kind=kind, request_id=request_id, vm=vm or "", host=self._host)
        # Said to those who gave a trace: managers of version 0.1 give none, and refuse an answer with such a field.
        if spanned.trace_id is not None and current() is not None:
            operation = operation.model_copy(update={"trace_id": spanned.trace_id})
        record = self._records[request_id] = _Record(operation, body)
        while len(self._records) > REMEMBERED and next(iter(self._records.values())).ended.is_set():
            self._records.popitem(last=False)
        task = asyncio.create_task(self._run(record, run, spanned), name=f"operation:{kind}:{request_id}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return operation

    async def get(self, request_id: str, wait_s: float = 0.0) -> Operation | None:
        """An operation, as soon as it has ended, after ``wait_s`` or on `hang_up`; None if it is not known."""
        record = self._records.get(request_id)
        if record is None:
            return None
        limit = asyncio.timeout(0.0 if self._hung_up else wait_s)
        self._limits.add(limit)
        try:
            async with limit:
                await record.ended.wait()
        except TimeoutError:
            pass
        finally:
            self._limits.discard(limit)
        return record.operation

    def hang_up(self) -> None:
        """Whoever waits in `get` is answered now, as it stands: the agent ends."""
        self._hung_up = True
        for limit in self._limits:
            if not limit.expired():
                limit.reschedule(0.0)

    def under_way(self) -> Counter[str]:
        """How many of each kind have not ended."""
        return Counter(record.operation.kind for record in self._records.values() if not record.ended.is_set())

    def resizing(self) -> list[Operation]:
        """Those under way that may change sizes on command."""
        running = (record.operation for record in self._records.values() if not record.ended.is_set())
        return [operation for operation in running if operation.kind not in ("delete", "mode", "stop", "depart")]

    async def ended(self, request_id: str) -> None:
        """Wait for the end of an operation, however long it takes."""
        if (record := self._records.get(request_id)) is not None:
            await record.ended.wait()

    def progress(self, request_id: str, sentence: str) -> None:
        """Say what an operation has come to so far."""
        record = self._records[request_id]
        said = (*record.operation.progress, sentence)[-TOLD:]
        record.operation = record.operation.model_copy(update={"progress": said})

    async def _run(self, record: _Record, run: Run, spanned: Span) -> None:
        with spanned, logged():
            await self._carry_out(record, run)
            ended = record.operation
            spanned.set(state=ended.state.value, sentence=ended.sentence)
            if ended.shortfall != Vector():
                spanned.set(shortfall=str(ended.shortfall.vector()))
            spanned.failure = ended.sentence if ended.state is OperationState.FAILED else ""

    async def _carry_out(self, record: _Record, run: Run) -> None:
        began = time.monotonic()
        operation = record.operation
        try:
            operation = await run(operation)
        except (HostAgentError, InvalidField) as error:
            operation = operation.model_copy(update={"state": OperationState.FAILED, "sentence": str(error)})
        except Exception as error:
            log.exception("an operation broke", request_id=operation.request_id)
            sentence = f"a defect of the agent: {type(error).__name__}: {error}"
            operation = operation.model_copy(update={"state": OperationState.FAILED, "sentence": sentence})
        if operation.state is OperationState.FAILED:
            await self._until_written(operation)
        said = {"seconds": round(time.monotonic() - began, 3), "progress": record.operation.progress}
        record.operation = operation.model_copy(update=said)
        record.ended.set()
        self.durations[operation.kind, operation.state.value].add(record.operation.seconds)
        # A failure is told by whoever asked: to this host it may be its VM's owner's doing.
        said = {"request_id": operation.request_id, "vm": operation.vm, "state": operation.state.value}
        log.info(operation.kind, **said, why=operation.sentence)

    async def _until_written(self, failed: Operation) -> None:
        """Hold back that an operation has failed while a later agent, which knows nothing of it, would carry it out."""
        is_told = False
        while not await self._failure_is_written(failed.request_id):
            if not is_told:
                self.progress(failed.request_id, f"that it failed cannot be written down yet: {failed.sentence}")
                is_told = True
            await asyncio.sleep(WRITE_AGAIN_S)

    async def close(self) -> None:
        """Cancel what runs: it is resumed from the intents at the next start."""
        tasks, self._tasks = self._tasks, set()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def done(operation: Operation, sentence: str, *vms: VMOutcome) -> Operation:
    """An operation's record at its end: all was reached."""
    return _ended(operation, OperationState.DONE, sentence, vms)


def partly_done(operation: Operation, sentence: str, *vms: VMOutcome) -> Operation:
    """An operation's record at its end: something is missing."""
    return _ended(operation, OperationState.PARTIAL, sentence, vms)


def failed(operation: Operation, sentence: str, *vms: VMOutcome) -> Operation:
    """An operation's record at its end: nothing of it came about."""
    return _ended(operation, OperationState.FAILED, sentence, vms)


def _ended(operation: Operation, state: OperationState, sentence: str, vms: tuple[VMOutcome, ...]) -> Operation:
    return operation.model_copy(update={"state": state, "sentence": sentence, "vms": vms or operation.vms})


def concluded(operation: Operation, outcomes: list[VMOutcome], need: ResourceVector | None = None) -> Operation:
    """An operation's record at its end: what all its VMs came to, in one sentence."""
    freed = sum((o.before.vector().less(o.after.vector()) for o in outcomes), ZERO)
    missing = sum((o.shortfall.vector() for o in outcomes), ZERO) if need is None else need.less(freed)
    short = beyond_rounding(missing)
    state = OperationState.DONE if short.is_zero() else OperationState.PARTIAL
    details = "; ".join(f"{o.name} {o.sentence}" for o in outcomes) or "no VM had anything to give or to get"
    sentence = details if short.is_zero() else f"short of {short}: {details}"
    return operation.model_copy(
        update={"state": state, "sentence": sentence, "vms": tuple(outcomes), "shortfall": Vector.of(short)}
    )


def split_told(request_id: str, need: ResourceVector, split: Split) -> str:
    """How a need was split, in one sentence."""
    targets = "; ".join(f"{name} to {target}" for name, target in split.targets.items()) or "no VM has anything to give"
    short = "" if split.shortfall.is_zero() else f"; {split.shortfall} is more than all minimums leave"
    return f"reclaim {request_id}: {need} is split in proportion: {targets}{short}"
