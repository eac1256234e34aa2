"""The routes of the budget within which harvest VMs grow."""

from __future__ import annotations

from aiohttp import web

from ebbtide.messages.commands import Budget, BudgetStatus, Command
from ebbtide.messages.common import Vector
from ebbtide.rest.descriptions import describe
from ebbtide.rest.parameters import check_parameters
from hostagent.api.forms import AGENT, answer, body_of

routes = web.RouteTableDef()


@routes.put("/v1/budget")
@describe(
    "Grant harvest VMs room",
    tag="host",
    body=Budget,
    example=Budget(number=1, room=Vector(cpu_cores=2.0, memory_mib=1024.0)),
    answers={200: BudgetStatus},
    problems=(409, 503),
)
async def _grant(request: web.Request) -> web.Response:
    check_parameters(request)
    agent, budget = request.app[AGENT], await body_of(request, Budget)
    await agent.requests.leadership.follow(Command(request_id="budget", epoch=budget.epoch, order=budget.order))
    return answer(await agent.harvest.grant(budget))


@routes.get("/v1/budget")
@describe("What harvest VMs may hold", tag="host", answers={200: BudgetStatus})
async def _status(request: web.Request) -> web.Response:
    check_parameters(request)
    return answer(request.app[AGENT].harvest.status())
