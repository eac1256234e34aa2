"""Operations on one adapter: idempotent by request_id, one at a time, each with a deadline."""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass, field, replace
from typing import Callable, Union

from app_adapters import checks
from app_adapters.adapter import Adapter, Answer, Deadline, Promise, Refusal
from app_adapters.errors import ApplicationError, BadAnswer, BadBody, Conflict
from app_adapters.logs import fault, guarded, say
from app_adapters.messages import PromiseBody, RefusalBody, TargetRequest, TargetStatus

OPERATIONS_KEPT = 256
BUSY_RETRY_S = 1.0
# How long a newer attempt waits for the older one to stop: the guest agent gives a hook 2.5 s for its answer.
CALL_OFF_LIMIT_S = 1.5
# An application that is at work is asked no more often what it still has.
LOOK_EVERY_S = 0.25
# One that takes longer to say so is not asked at all: the guest agent waits for 2.5 s.
LOOK_LIMIT_S = 0.5

AnswerBody = Union[PromiseBody, RefusalBody]
UNITS = {"memory_mib": "MiB", "cpu_cores": "cores"}


def in_words(amounts: dict[str, float]) -> str:
    """A vector for a person."""
    return " and ".join(f"{amounts[name]:g} {unit}" for name, unit in UNITS.items() if name in amounts) or "nothing"


@dataclass
class _Operation:
    request: TargetRequest
    answer: AnswerBody
    status: TargetStatus
    # What it had when the work began, empty where that is not known, and when it was last asked.
    before: dict[str, float] = field(default_factory=dict)
    looked_at: float = -math.inf


def attempt(request_id: str) -> tuple[str, str, int]:
    """The request, the series of attempts at it, and the number in that series.

    `r#2` is the second at `r` of a series without a name, as is `r` the first; `r#x.2` is the second of the series x.
    """
    request, sign, mark = request_id.rpartition("#")
    series, _, number = mark.rpartition(".")
    if sign and request and number.isascii() and number.isdigit() and len(number) <= 9:
        return request, series, int(number)
    return request_id, "", 1


class Operations:
    """Runs what an adapter promises, and remembers answers and results. `log` is given a sentence for every step."""

    def __init__(self, adapter: Adapter, log: Callable[[str], None] = say) -> None:
        self._adapter = adapter
        self._log = guarded(log)
        self._deciding = threading.Lock()  # held while the adapter decides, which may take as long as its application
        self._lock = threading.RLock()  # a service that has one thread may stop us in a signal's handler
        self._looking = threading.Lock()
        self._operations: OrderedDict[str, _Operation] = OrderedDict()
        self._worker: threading.Thread | None = None
        self._latest: _Operation | None = None
        self._deadline = Deadline(0)
        self._stopped = False

    def submit(self, request: TargetRequest) -> AnswerBody:
        """The adapter's answer; the same request again gets the same answer and starts nothing.

        A newer attempt at the request that runs calls the older one off, and so does a reinflation a deflation. A
        refusal because another operation runs is not remembered, so that the same request may come again.

        Raises: Conflict where the request_id was used with another body, BadBody where the adapter does not give what
        the target names, BadAnswer and whatever the adapter raises for its faults; nothing has begun then.
        """
        foreign = sorted(set(request.target) - set(self._adapter.components))
        if foreign:
            raise BadBody(f"target.{foreign[0]}", f"this application gives {', '.join(self._adapter.components)} only")
        deadline = Deadline(request.deadline_s)  # the host's, which goes on while an older attempt is waited for
        with self._deciding:
            known = self._find(request.request_id)
            if known is not None:
                if known.request != request:
                    raise Conflict(f"request_id: {request.request_id} was used with another body")
                return known.answer
            self._log(
                f"{request.request_id}: {request.direction} ({request.mode}) to {in_words(request.target)} "
                f"within {request.deadline_s:g} s"
            )
            busy = self._make_way(request.request_id, request.direction)
            if busy:
                self._log(f"{request.request_id}: refused: {busy}")
                return _refusal(request, _not_now(request, busy))
            answer = self._decide(request, deadline)
            body: AnswerBody
            if isinstance(answer, Refusal):
                # Without a time nobody tells it again, and it stays small at the VM's full size.
                if request.direction == "reinflate" and answer.retry_after_s is None and not answer.for_good:
                    answer = replace(answer, retry_after_s=BUSY_RETRY_S)
                body = _refusal(request, answer)
                status = TargetStatus(request.request_id, "failed", {}, "", "refused: " + answer.reason)
                self._remember(_Operation(request, body, status))
                self._log(f"{request.request_id}: {status.reason}")
                return body
            body = PromiseBody(request.request_id, "promised", answer.promised, answer.expected_s, answer.reason)
            operation = _Operation(request, body, TargetStatus(request.request_id, "running", {}, "", request.reason))
            self._remember(operation)
            self._log(
                f"{request.request_id}: promised {in_words(answer.promised)} in about {answer.expected_s:g} s"
                + (f": {answer.reason}" if answer.reason else "")
            )
            worker = threading.Thread(
                target=self._run, args=(operation, answer), name=f"operation-{request.request_id}", daemon=True
            )
            with self._lock:
                before = self._deadline, self._latest
                self._deadline, self._latest = deadline, operation  # first: stop() in a signal calls this off, too
                try:
                    if self._stopped:
                        raise RuntimeError("stopped")
                    worker.start()
                except RuntimeError:  # nothing will run, so nothing may seem to
                    self._deadline, self._latest = before
                    del self._operations[request.request_id]
                    why = "the hook is ending" if self._stopped else "no thread can be started"
                    return _refusal(request, _not_now(request, why))
                self._worker = worker
            return body

    def status(self, request_id: str) -> TargetStatus | None:
        """How far a request is, None where it is unknown. While it runs: what has come free so far, as measured now."""
        operation = self._find(request_id)
        if operation is None:
            return None
        if operation.status.state == "running" and operation.before:
            self._look(operation)
        return operation.status

    def _look(self, operation: _Operation) -> None:
        """Measure what has come free since the work began; never more than was promised."""
        if not self._looking.acquire(blocking=False):
            return
        try:
            if time.monotonic() - operation.looked_at < LOOK_EVERY_S:
                return
            now = self._has()
            operation.looked_at = time.monotonic()
        finally:
            self._looking.release()
        promised = operation.answer.promised if isinstance(operation.answer, PromiseBody) else {}
        released = {
            name: round(min(max(before - now[name], 0.0), promised[name]), 3)
            for name, before in operation.before.items()
            if name in now and name in promised
        }
        if not released:  # not asked again: one that cannot say it now answers no status late because of that
            operation.before = {}
            return
        with self._lock:
            status = operation.status
            # It may have ended meanwhile, and then its own word stands.
            if status.state == "running":
                words = "what it has now"
                operation.status = TargetStatus(status.request_id, "running", released, words, status.reason)

    def _has(self) -> dict[str, float]:
        """What the application has now. Empty: it cannot say, or not soon enough, which is no fault of its work."""
        began = time.monotonic()
        try:
            found = checks.vector(self._adapter.status(), "status")
        except (ApplicationError, BadAnswer):
            return {}
        except Exception as error:
            fault("the adapter's status failed while its work runs", error)
            return {}
        return found if time.monotonic() - began < LOOK_LIMIT_S else {}

    def stop(self, limit_s: float = 5.0) -> None:
        """Cancel what runs and wait for it, at most `limit_s` seconds. Nothing begins afterwards."""
        with self._lock:
            self._stopped = True
            self._deadline.cancel()
            worker = self._worker
        if worker is not None:
            worker.join(limit_s)

    def _make_way(self, request_id: str, direction: str) -> str:
        """End what runs if this is a newer attempt at it, or gives back what is still being taken; returns why the way
        is not free, empty if it is.
        """
        name, series, number = attempt(request_id)
        latest = self._latest
        if latest is None:
            return ""
        latest_id = latest.request.request_id
        latest_name, latest_series, latest_number = attempt(latest_id)
        # Of two series the one that comes later is the newer: what began the other has ended.
        if (name, series) == (latest_name, latest_series) and number < latest_number:
            return f"{latest_id} is a newer attempt"
        # One whose status says how it ended blocks no other, though its thread may still write that into the log.
        if self._worker is None or not self._worker.is_alive() or latest.status.state != "running":
            return ""
        gives_back = direction == "reinflate" and latest.request.direction == "deflate"
        if name != latest_name and not gives_back:
            return "another operation is under way"
        self._deadline.cancel()
        self._worker.join(CALL_OFF_LIMIT_S)
        if self._worker.is_alive():
            return f"{latest_id} is still being called off"
        latest.status = replace(latest.status, reason=f"called off for {request_id}: {latest.status.reason}")
        return ""

    def _decide(self, request: TargetRequest, deadline: Deadline) -> Answer:
        try:
            if request.direction == "deflate":
                answer = self._adapter.deflate(request.target, request.mode, deadline)
            else:
                answer = self._adapter.reinflate(request.target, deadline)
        except ApplicationError as error:
            return _not_now(request, str(error))
        return checks.answer(answer, request.direction)

    def _run(self, operation: _Operation, promise: Promise) -> None:
        began = time.monotonic()
        request_id = operation.request.request_id
        try:
            if operation.request.direction == "deflate":
                operation.before = self._has()
            release = checks.release(promise.work())
        except BaseException as error:  # whatever the adapter does, sys.exit() included, the request must end
            if isinstance(error, (ApplicationError, BadAnswer)):
                reason = str(error)
            else:
                reason = f"the work ended by {type(error).__name__}: {error}"
            with self._lock:
                operation.status = TargetStatus(request_id, "failed", {}, "", reason)
            self._log(f"{request_id}: failed: {reason}")
            if not isinstance(error, ApplicationError):
                fault(f"{request_id}: the adapter's work failed", error)
            return
        reason = f"{release.reason}; took {time.monotonic() - began:.1f} s"
        state = "released" if release.complete else "failed"
        with self._lock:
            operation.status = TargetStatus(request_id, state, release.released, release.measured_by, reason)
        self._log(f"{request_id}: {state} {in_words(release.released)}: {reason}")

    def _find(self, request_id: str) -> _Operation | None:
        with self._lock:
            return self._operations.get(request_id)

    def _remember(self, operation: _Operation) -> None:
        with self._lock:
            self._operations[operation.request.request_id] = operation
            while len(self._operations) > OPERATIONS_KEPT:
                self._operations.popitem(last=False)


def _not_now(request: TargetRequest, reason: str) -> Refusal:
    """A refusal of something that may be taken a moment later.

    It gives no time for a deflation: a time is the application's own wish, after which the host forces it.
    """
    return Refusal(reason, BUSY_RETRY_S if request.direction == "reinflate" else None)


def _refusal(request: TargetRequest, refusal: Refusal) -> RefusalBody:
    return RefusalBody(request.request_id, "refused", refusal.reason, refusal.retry_after_s, refusal.floor)
