"""The routes of steady mode: whether idle memory is trimmed, and how much is kept free."""

from __future__ import annotations

from aiohttp import web

from ebbtide.messages.commands import Command, SteadyCommand, SteadyStatus
from ebbtide.rest.descriptions import describe
from ebbtide.rest.parameters import check_parameters
from hostagent.api.forms import AGENT, answer, body_of

routes = web.RouteTableDef()


@routes.put("/v1/steady")
@describe(
    "Keep room before it is asked for, or no longer",
    tag="host",
    body=SteadyCommand,
    example=SteadyCommand(enabled=True, reserve_mib="auto"),
    answers={200: SteadyStatus},
    problems=(409, 503),
)
async def _put_steady(request: web.Request) -> web.Response:
    check_parameters(request)
    agent, command = request.app[AGENT], await body_of(request, SteadyCommand)
    await agent.requests.leadership.follow(Command(request_id="steady", epoch=command.epoch, order=command.order))
    return answer(await agent.steady.set(command))


@routes.get("/v1/steady")
@describe("How room is kept before it is asked for", tag="host", answers={200: SteadyStatus})
async def _steady(request: web.Request) -> web.Response:
    check_parameters(request)
    agent = request.app[AGENT]
    await agent.host.sample()
    return answer(agent.steady.status())
