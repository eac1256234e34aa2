"""Routes of the host agent's API but those that explain."""

from __future__ import annotations

from typing import Final

from aiohttp import web

from deflation.messages import Command, CreateCommand, ReclaimCommand, ReinflateCommand, TargetCommand
from hostagent.api_forms import AGENT, accepted, answer, body_of, number, parameters
from hostagent.errors import RequestRefused

MAX_WAIT_S: Final = 30.0
DELETE_REASONS: Final = ("delete", "minimum", "shortfall")
#: Stands in a request that is a dry run.
WOULD_BE: Final = web.RequestKey("dry_run", bool)

routes = web.RouteTableDef()


@routes.get("/healthz")
async def _health(request: web.Request) -> web.Response:
    return web.json_response({"status": "ok"})


@routes.get("/v1/host")
async def _get_host(request: web.Request) -> web.Response:
    return answer(request.app[AGENT].host.report())


@routes.get("/v1/vms")
async def _get_vms(request: web.Request) -> web.Response:
    vms = request.app[AGENT].host.vms.values()
    return web.json_response({"vms": [vm.status().model_dump(mode="json") for vm in vms]})


@routes.get("/v1/vms/{name}")
async def _get_vm(request: web.Request) -> web.Response:
    return answer(request.app[AGENT].host.vm(request.match_info["name"]).status())


@routes.post("/v1/vms")
async def _create(request: web.Request) -> web.Response:
    return accepted(await request.app[AGENT].commands.create(await body_of(request, CreateCommand)))


@routes.delete("/v1/vms/{name}")
async def _delete(request: web.Request) -> web.Response:
    query = dict(request.query)
    reason = query.pop("reason", "delete")
    if reason not in DELETE_REASONS:
        raise RequestRefused(400, f"reason must be one of {', '.join(DELETE_REASONS)}", "reason")
    command = Command.model_validate_strings(query, strict=False)
    return accepted(await request.app[AGENT].commands.delete(request.match_info["name"], command, reason))


@routes.put("/v1/vms/{name}/target")
async def _target(request: web.Request) -> web.Response:
    agent, name = request.app[AGENT], request.match_info["name"]
    command = await body_of(request, TargetCommand)
    if command.dry_run:
        request[WOULD_BE] = True
        return answer(await agent.dry_run.target(name, command))
    return accepted(await agent.commands.target(name, command))


@routes.post("/v1/reclaims")
async def _reclaim(request: web.Request) -> web.Response:
    agent, command = request.app[AGENT], await body_of(request, ReclaimCommand)
    if command.dry_run:
        request[WOULD_BE] = True
        return answer(await agent.dry_run.reclaim(command))
    return accepted(await agent.commands.reclaim(command))


@routes.post("/v1/reinflations")
async def _reinflate(request: web.Request) -> web.Response:
    agent, command = request.app[AGENT], await body_of(request, ReinflateCommand)
    if command.dry_run:
        request[WOULD_BE] = True
        return answer(await agent.dry_run.reinflate(command))
    return accepted(await agent.commands.reinflate(command))


@routes.get("/v1/operations/{request_id}")
async def _get_operation(request: web.Request) -> web.Response:
    wait_s = number(parameters(request, ("wait_s",)), "wait_s", 0.0, MAX_WAIT_S)
    request_id = request.match_info["request_id"]
    operation = await request.app[AGENT].commands.operations.get(request_id, wait_s)
    if operation is None:
        raise RequestRefused(404, f"there is no operation {request_id}", "request_id")
    return answer(operation)
