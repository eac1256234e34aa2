"""The route of the budget within which harvest VMs grow."""

from __future__ import annotations

from aiohttp import web

from deflation.budget_messages import Budget
from deflation.messages import Command
from hostagent.api_forms import AGENT, answer, body_of, parameters

routes = web.RouteTableDef()


@routes.put("/v1/budget")
async def _grant(request: web.Request) -> web.Response:
    parameters(request, ())
    commands, budget = request.app[AGENT].commands, await body_of(request, Budget)
    await commands.follow(Command(request_id="budget", epoch=budget.epoch))
    return answer(await commands.harvest.grant(budget))


@routes.get("/v1/budget", allow_head=False)
async def _status(request: web.Request) -> web.Response:
    parameters(request, ())
    return answer(request.app[AGENT].commands.harvest.status())
