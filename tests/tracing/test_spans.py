"""Spans: what is recorded, beneath what, and what it costs where nobody records."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from cluster_manager.errors import AgentError
from cluster_manager.inventory.agents import Agents, _Call
from cluster_manager.settings import AgentLimits
from ebbtide.tracing import spans
from ebbtide.tracing.context import new_trace
from ebbtide.tracing.spans import MOST_CHILDREN, MOST_TEXT, NO_SPAN, Ended, operation, record_to, span, within
from hostagent.vm.guest_spans import record_guest
from tests.tracing.conftest import Kept


def test_without_a_recorder_there_is_nothing_and_no_header() -> None:
    with operation("operation target") as one, span("step") as inner, within(new_trace()):
        assert (one, inner) == (NO_SPAN, NO_SPAN)
        assert spans.headers() == {}
        one.set(vm="web")
    assert (one.trace_id, one.is_recorded) == (None, False)


def test_daemons_that_do_not_trace_import_nothing_of_opentelemetry() -> None:
    code = (
        "import sys, cluster_manager.serving, hostagent.api.app, hostagent.vm.resizer, ebbtide.tracing.exporting; "
        "print([name for name in sys.modules if name.startswith('opentelemetry')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_span_is_beneath_the_one_that_is_open_and_recorded_at_its_end(kept: Kept) -> None:
    with operation("operation target", vm="web") as one:
        with span("step", host="host-a") as step:
            assert spans.headers() == {"traceparent": step.context.header() if step.context else ""}
        assert [ended.name for ended in kept.spans] == ["step"]
    step_ended, ended = kept.spans
    assert (ended.parent, step_ended.parent) == (None, ended.context)
    assert one.trace_id == ended.context.trace
    assert (ended.attributes, step_ended.attributes) == ({"ebbtide.vm": "web"}, {"ebbtide.host": "host-a"})
    assert ended.began_ns <= step_ended.began_ns <= step_ended.ended_ns <= ended.ended_ns


def test_what_a_daemon_does_outside_operations_makes_no_span(kept: Kept) -> None:
    with span("call status") as one:
        assert one is NO_SPAN
    assert not kept.spans


def test_an_operation_is_beneath_what_asked_for_it_unless_that_is_not_sampled(kept: Kept) -> None:
    above = new_trace()
    with within(above), operation("operation target"):
        pass
    assert kept.spans[0].parent == above
    with within(new_trace(sampled=False)), operation("operation target") as one, span("step") as step:
        assert (one.trace_id, step) == (None, NO_SPAN)
        assert spans.headers()["traceparent"].endswith("-00"), "who is called does not begin a trace either"
    assert len(kept.spans) == 1


def test_a_trace_that_the_sampler_does_not_take_is_not_recorded() -> None:
    none = Kept(samples=False)
    record_to(none)
    try:
        with operation("operation target") as one, span("step"):
            assert one.trace_id is None
    finally:
        record_to(None)
    assert not none.spans


def test_an_error_is_told_and_goes_on(kept: Kept) -> None:
    with pytest.raises(ValueError, match="no room"), operation("operation target"):
        raise ValueError("no room")
    assert kept.spans[0].failure == "no room"


async def test_a_task_that_outlives_its_operation_adds_nothing_to_it(kept: Kept) -> None:
    go, inside = asyncio.Event(), asyncio.Event()

    async def watch() -> None:
        inside.set()
        await go.wait()
        with span("late") as one:
            assert one is NO_SPAN

    with operation("operation create"):
        task = asyncio.create_task(watch(), name="watch")
        await inside.wait()
    go.set()
    await task
    assert [ended.name for ended in kept.spans] == ["operation create"]


def test_texts_attributes_and_children_are_bounded(kept: Kept) -> None:
    with operation("operation reclaim", sentence="x" * 10_000, empty="") as one:
        one.set(**{f"a{number}": number for number in range(1000)})
        for _ in range(MOST_CHILDREN + 50):
            with span("vm cascade"):
                pass
    root = kept.spans[-1]
    assert len(kept.spans) == MOST_CHILDREN + 1
    assert len(root.attributes) == spans.MOST_ATTRIBUTES
    assert len(str(root.attributes["ebbtide.sentence"])) == MOST_TEXT
    assert "ebbtide.empty" not in root.attributes


# --- guests ----------------------------------------------------------------------------------------------------------

CALL = {"hook": "shop", "call": "target", "at_s": 0.1, "seconds": 0.2, "status": 202}


def told(kept: Kept, said: object) -> list[Ended]:
    above = new_trace()
    context = above.child()
    record_guest("web", "application.deflate", above, context, 1_000, said)
    assert all(one.context.trace_id == above.trace_id for one in kept.spans)
    return kept.spans


def test_a_guests_spans_have_our_names_and_ids_and_the_time_of_the_call(kept: Kept) -> None:
    late = {
        **CALL,
        "at_s": 80_000.0,
        "seconds": 86_400.0,
        "status": 0,
        "trace_id": "f" * 32,
        "name": "operation create",
    }
    hook, other, guest = told(kept, {"seconds": 86_000.0, "hooks": [CALL, late], "name": "root"})
    assert [one.name for one in (guest, hook, other)] == ["guest application.deflate", "hook target", "hook target"]
    assert all(one.in_guest for one in kept.spans)
    assert (hook.context, other.context) == (guest.context.numbered(1), guest.context.numbered(2))
    assert (hook.parent, other.parent) == (guest.context, guest.context)
    for one in (hook, other):
        assert 1_000 <= guest.began_ns <= one.began_ns <= one.ended_ns <= guest.ended_ns
    assert (hook.failure, bool(other.failure)) == ("", True)


@pytest.mark.parametrize(
    "said",
    [
        None,
        [],
        "seconds",
        {},
        {"seconds": -1.0},
        {"seconds": float("nan")},
        {"seconds": float("inf")},
        {"seconds": 0.1, "hooks": [CALL] * 33},
        {"seconds": 0.1, "hooks": [{**CALL, "hook": "../etc"}]},
        {"seconds": 0.1, "hooks": [{**CALL, "hook": "x" * 64}]},
        {"seconds": 0.1, "hooks": [{**CALL, "call": "anything"}]},
        {"seconds": 0.1, "hooks": [{**CALL, "at_s": -1.0}]},
        {"seconds": 0.1, "hooks": [{**CALL, "status": 10**6}]},
    ],
)
def test_what_a_guest_says_that_does_not_fit_is_left_out(kept: Kept, said: object) -> None:
    assert not told(kept, said)


@pytest.mark.parametrize(
    ("status", "failure"),
    [(200, ""), (404, ""), (409, ""), (408, "answered with 408"), (429, "answered with 429")]
    + [(status, f"answered with {status}") for status in (500, 503)],
)
@pytest.mark.parametrize("traced", [True, False])
async def test_a_call_that_the_agent_could_not_do_is_a_span_that_failed(
    kept: Kept, status: int, failure: str, traced: bool
) -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.json_response({}, status=status)

    app, before = web.Application(), NO_SPAN.failure
    app.router.add_post("/v1/x", answer)
    async with TestServer(app) as server, aiohttp.ClientSession() as session:
        agents = Agents(session, lambda host: None, "key", AgentLimits())
        with operation("operation target") if traced else NO_SPAN:
            try:
                await agents._raw_at(str(server.make_url("")), _Call("a", "POST", "/v1/x"))
                assert status == 200
            except AgentError:
                assert status > 200
    calls = [one for one in kept.spans if one.name == "call POST"]
    assert [(one.failure, one.attributes["ebbtide.status"]) for one in calls] == [(failure, status)] * traced
    assert NO_SPAN.failure == before
