"""Routes that explain: a VM, the history of decisions, the host's mode."""

from __future__ import annotations

from typing import Final

from aiohttp import web
from pydantic import TypeAdapter, ValidationError

from deflation.explanations import Decisions
from deflation.messages import ModeCommand, Name
from hostagent.api_forms import AGENT, accepted, answer, body_of, parameters, whole_number
from hostagent.errors import RequestRefused
from hostagent.explain import explain

#: Decisions in one answer.
MOST_DECISIONS: Final = 1000
_NUMBERS: Final = 2**53
_NAME: Final[TypeAdapter[str]] = TypeAdapter(Name)
routes = web.RouteTableDef()


@routes.get("/v1/vms/{name}/explain")
async def _explain(request: web.Request) -> web.Response:
    parameters(request, ())
    return answer(await explain(request.app[AGENT].host, request.match_info["name"]))


@routes.get("/v1/decisions")
async def _decisions(request: web.Request) -> web.Response:
    query = parameters(request, ("vm", "since", "limit"))
    host = request.app[AGENT].host
    vm = query.get("vm")
    if vm is not None:
        try:
            _NAME.validate_python(vm)
        except ValidationError:
            raise RequestRefused(400, f"vm: {vm!r} is no name of a VM", "vm") from None
    since = whole_number(query, "since", 0, _NUMBERS) if "since" in query else None
    limit = whole_number(query, "limit", 100, MOST_DECISIONS, 1)
    history = host.history
    return answer(
        Decisions(
            host=host.slice.host_id,
            incarnation=host.incarnation,
            decisions=history.decisions(vm, since, limit),
            newest=history.newest,
            forgotten=history.forgotten(vm, since),
        )
    )


@routes.get("/v1/mode")
async def _get_mode(request: web.Request) -> web.Response:
    parameters(request, ())
    return answer(request.app[AGENT].host.modes.status())


@routes.put("/v1/mode")
async def _put_mode(request: web.Request) -> web.Response:
    return accepted(await request.app[AGENT].mode_commands.set(await body_of(request, ModeCommand)))
