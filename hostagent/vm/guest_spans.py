"""Spans of a guest, which has no network and no say: made here of what it answered, held to the time that it had."""

from __future__ import annotations

import time
from typing import Any

import structlog
from pydantic import ValidationError

from ebbtide.messages.guest import GuestTrace
from ebbtide.tracing.context import TraceContext
from ebbtide.tracing.spans import Ended, Kind, Value, described, record

log = structlog.get_logger()

_NS = 10**9


def record_guest(vm: str, method: str, above: TraceContext, context: TraceContext, sent_ns: int, said: Any) -> None:
    """Record what a guest says that it did for a call.

    Names and ids are ours: the call of hook number n has the n-th id after the guest's own, which is how the guest
    reckons what it tells the hook. Times are cut to those of the call; what does not fit its schema is left out.

    :param above: the span of the call, as it is seen from here.
    :param context: what the guest was given as its own span.
    :param sent_ns: when the call was sent, nanoseconds since the epoch. It has just been answered.
    :param said: as it came, unchecked.
    """
    try:
        trace = GuestTrace.model_validate(said)
    except ValidationError as error:
        log.debug("what a guest says of its hooks does not fit", vm=vm, why=error.errors()[0]["msg"])
        return
    spent_ns = max(time.time_ns() - sent_ns, 0)
    inside_ns = min(int(trace.seconds * _NS), spent_ns)
    # The way there takes as long as the way back.
    began_ns = sent_ns + (spent_ns - inside_ns) // 2
    until_ns = began_ns + inside_ns
    attributes: dict[str, Value] = {"vm": vm, "method": method, "claimed_s": trace.seconds}
    for number, hook in enumerate(trace.hooks, 1):
        start_ns = min(began_ns + int(hook.at_s * _NS), until_ns)
        said_of_it: dict[str, Value] = {"vm": vm, "hook": hook.hook}
        said_of_it |= {"status": hook.status} if hook.status is not None else {"goes_on": True}
        record(
            Ended(
                f"hook {hook.call}",
                context.numbered(number),
                context,
                Kind.CLIENT,
                start_ns,
                min(start_ns + int(hook.seconds * _NS), until_ns),
                described(said_of_it),
                failure="" if hook.status is None or 200 <= hook.status < 500 else "there was no usable answer",
                in_guest=True,
            )
        )
    name = f"guest {method}"
    record(Ended(name, context, above, Kind.SERVER, began_ns, until_ns, described(attributes), in_guest=True))
