"""The guest's part of a trace: only where the host asks for it, with the host's ids, and never more than fits."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest

from ebbtide.messages.guest import MOST_HOOK_CALLS, GuestTrace
from ebbtide.tracing.context import new_trace
from guestagent import tracing
from guestagent.channel import LINE_BYTES
from guestagent.rpc import answer_line, parse_request
from tests.guestagent.elastic import Elastic, Serve
from tests.guestagent.harness import Host

DEFLATE = {"request_id": "r-1", "deadline_s": 60.0, "mode": "ask", "target": {"memory_mib": 500}, "bound_mib": 1024}


def ask(host: Host, method: str, params: dict[str, Any], **more: Any) -> dict[str, Any]:
    host.send(json.dumps({"jsonrpc": "2.0", "id": "x", "method": method, "params": params, **more}).encode())
    return host.receive()


def test_an_answer_tells_of_the_hooks_that_were_called_for_it(host: Host, serve: Serve) -> None:
    serve("cache", Elastic(300.0))
    answer = ask(host, "application.deflate", DEFLATE, traceparent=new_trace().header())
    assert answer["result"]["state"] == "promised", answer
    told = GuestTrace.model_validate(answer["trace"])
    assert [(call.hook, call.call, call.status) for call in told.hooks] == [
        ("cache", "capabilities", 200),
        ("cache", "target", 202),
    ]
    first, second = told.hooks
    assert 0 <= first.at_s <= first.at_s + first.seconds <= second.at_s
    assert second.at_s + second.seconds <= told.seconds


@pytest.mark.slow
@pytest.mark.usefixtures("usual_limits")
def test_a_hook_that_has_not_answered_is_told_of_as_going_on(host: Host, serve: Serve) -> None:
    slow = Elastic(300.0)
    slow.hang = threading.Event()
    serve("cache", slow)
    try:
        answer = ask(host, "application.deflate", DEFLATE, traceparent=new_trace().header())
    finally:
        slow.hang.set()
    told = GuestTrace.model_validate(answer["trace"])
    assert (answer["result"]["state"], told.hooks[-1].call, told.hooks[-1].status) == ("refused", "target", None)


@pytest.mark.parametrize("header", [None, "", 7, {"a": 1}, "00-0-0-01", "x" * 70_00])
def test_without_a_traceparent_that_is_one_an_answer_is_as_ever(host: Host, serve: Serve, header: Any) -> None:
    serve("cache", Elastic(300.0))
    more = {} if header is None else {"traceparent": header}
    answer = ask(host, "application.deflate", DEFLATE, **more)
    assert answer.keys() == {"jsonrpc", "id", "result"}


def test_more_calls_than_an_answer_has_room_for_are_not_told_and_not_traced() -> None:
    trace = tracing.trace_of(new_trace().header())
    assert trace is not None
    headers = [trace.begin("cache", "target")[0] for _ in range(MOST_HOOK_CALLS + 5)]
    assert [bool(one) for one in headers] == [True] * MOST_HOOK_CALLS + [False] * 5
    assert len({one["traceparent"] for one in headers if one}) == MOST_HOOK_CALLS
    assert len(trace.told().hooks) == tracing.MOST_CALLS == MOST_HOOK_CALLS


def test_an_answer_that_has_no_room_for_its_trace_is_sent_without_it() -> None:
    line = {"jsonrpc": "2.0", "id": 1, "method": "status", "traceparent": new_trace().header()}
    request = parse_request(json.dumps(line).encode())
    assert request.trace is not None
    request.trace.begin("cache", "target")
    text = "x" * (LINE_BYTES - 100)
    answer = json.loads(answer_line(1, {"text": text}, request.trace))
    assert answer["result"] == {"text": text}
    assert "trace" not in answer
    assert "trace" in json.loads(answer_line(1, {}, request.trace))
