"""What daemons hang where: follow-up plans, steps of layers, operations of a host agent, requests that only read."""

from __future__ import annotations

from unittest.mock import AsyncMock

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request

from cluster_manager.execution.plan_spans import place_of, traced, with_follow_ups
from cluster_manager.plans.migrations import MigrationPlan, start_migration
from cluster_manager.plans.plans import SpawnFollowUp
from ebbtide.deflation.bounds import Bound
from ebbtide.deflation.cascade.instructions import ColdReclaimed, Outcome, ReclaimCold
from ebbtide.deflation.ledger import Layer, LedgerEntry
from ebbtide.deflation.placement.policy_names import PlacementPolicy
from ebbtide.deflation.resources import ResourceVector
from ebbtide.messages.operations import Operation
from ebbtide.messages.requests import MigrateRequest
from ebbtide.rest.access import PRINCIPAL
from ebbtide.rest.roles import Role
from ebbtide.rest.tokens import Principal
from ebbtide.tracing.context import HEADER, new_trace
from ebbtide.tracing.middleware import trace_middleware
from ebbtide.tracing.spans import current, operation, within
from hostagent.operations.operations import Operations, done
from hostagent.vm.executor import Executor
from hostagent.vm.step_spans import StepSpans
from tests.manager.plan_events import spec_of
from tests.tracing.conftest import Kept


@pytest.mark.usefixtures("kept")
def test_a_plan_that_goes_on_with_what_is_left_has_a_span_of_its_own_beneath_the_first() -> None:
    request = MigrateRequest(request_id="request", limit_s=1.0, deadline_s=60.0)
    policy = PlacementPolicy.FIRST_FIT
    first = traced(start_migration("plan", request, spec_of("web"), "home", running=True, policy=policy))
    context = place_of(first)
    assert isinstance(first, MigrationPlan)
    assert context is not None
    with within(context):
        (effect,) = with_follow_ups([SpawnFollowUp(first.continuation("away", "clear"))])
    assert isinstance(effect, SpawnFollowUp)
    follow_up = place_of(effect.state)
    assert follow_up is not None
    assert (follow_up.trace_id, effect.state.trace[1]) == (context.trace_id, context.header())
    assert follow_up.span_id != context.span_id


async def test_the_layer_of_cold_pages_has_its_span_and_its_row(kept: Kept) -> None:
    executor = AsyncMock(spec=Executor)
    executor.carry_out.return_value = ColdReclaimed(1.0, 1, 64.0, True, "no more")
    row = LedgerEntry(Layer.COLD, "memory_mib", 100.0, 100.0, 64.0, 1.0, "no more")
    bound = Bound(1, 1.0, 512.0, 0.0)
    outcome = Outcome(bound, bound, bound.size, (row,), ResourceVector(), 1.0, "")
    spans = StepSpans()
    with operation("operation target"):
        await spans.carry_out(executor, ReclaimCold(1, 5.0, 100.0))
        spans.end(outcome)
    step, layer, _ = kept.spans
    assert (step.name, layer.name, step.parent) == ("step ReclaimCold", "layer cold", layer.context)
    assert (step.attributes["ebbtide.freed_mib"], step.attributes["ebbtide.asked.memory_mib"]) == (64.0, 100.0)
    assert layer.attributes["ebbtide.memory_mib.verified"] == 64.0


async def ended(operations: Operations, request_id: str) -> Operation:
    async def nothing(operation: Operation) -> Operation:
        return done(operation, "nothing to do")

    return operations.begin(request_id, "mode", {}, nothing)


async def test_a_host_agent_says_the_trace_to_those_who_gave_one(kept: Kept) -> None:
    """A manager of version 0.1 gives none, and cannot read an answer that has a field it does not know."""
    operations, above = Operations("host-a"), new_trace()
    assert "trace_id" not in (await ended(operations, "of-an-earlier-manager")).model_dump()
    with within(above):
        assert (await ended(operations, "of-ours")).trace_id == above.trace
    for request_id in ("of-an-earlier-manager", "of-ours"):
        await operations.ended(request_id)
    await operations.close()
    assert [one.attributes["ebbtide.request_id"] for one in kept.spans] == ["of-an-earlier-manager", "of-ours"]


@pytest.mark.usefixtures("kept")
@pytest.mark.parametrize(
    ("method", "role", "belongs"),
    [
        ("PUT", Role.OPERATOR, True),
        ("PUT", Role.MANAGER, True),
        ("PUT", Role.AGENT, False),
        ("PUT", None, False),
        ("GET", Role.MANAGER, False),
    ],
)
async def test_a_request_belongs_to_its_callers_trace_unless_a_host_sends_it_or_it_only_reads(
    method: str, role: Role | None, belongs: bool
) -> None:
    above = new_trace()
    request = make_mocked_request(method, "/v1/vms/web/target", headers={HEADER: above.header()})
    if role is not None:
        request[PRINCIPAL] = Principal("caller", role, b"")

    async def handler(request: web.Request) -> web.StreamResponse:
        assert current() == (above if belongs else None)
        return web.Response()

    await trace_middleware(request, handler)
