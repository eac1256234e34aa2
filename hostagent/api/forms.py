"""Parts that the routes of the host agent's API share: bodies in, answers out, commands that begin operations."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from typing import Final, TypeVar

from aiohttp import hdrs, web
from pydantic import BaseModel

from ebbtide.messages.commands import Budget, Command, SteadyCommand
from ebbtide.messages.dry_runs import Forecast
from ebbtide.messages.operations import Operation
from ebbtide.rest.access import require
from ebbtide.rest.parameters import check_parameters
from ebbtide.rest.roles import Role
from hostagent.operations.agent import Agent
from hostagent.vm.earlier_manager import without

AGENT: Final = web.AppKey("agent", Agent)
#: Stands in a request that is a dry run.
WOULD_BE: Final = web.RequestKey("dry_run", bool)
BodyT = TypeVar("BodyT", bound=BaseModel)
CommandT = TypeVar("CommandT", bound=Command)


async def body_of(request: web.Request, model: type[BodyT]) -> BodyT:
    """The body of a request.

    :raises ValidationError: it is no JSON or does not fit the model.
    :raises Refused: 403, it speaks for a manager.
    """
    # Strict: "3" is no number, as the OpenAPI document says.
    body = model.model_validate_json(await request.read(), strict=True)
    if isinstance(body, Command | Budget | SteadyCommand):
        check_leads(request, body.epoch, body.order)
    return body


def check_leads(request: web.Request, epoch: int, order: int) -> None:
    """Whether the caller may have commands of others refused: only the manager may.

    :raises Refused: 403.
    """
    if request.app[AGENT].requests.leadership.leads(epoch, order):
        require(request, Role.MANAGER, "order" if order else "epoch")


def answer(body: BaseModel, status: int = 200, unknown: Collection[tuple[str, ...]] = ()) -> web.Response:
    """:param unknown: fields that the manager does not know."""
    return web.Response(text=without(body, unknown), status=status, content_type="application/json")


async def begin(
    request: web.Request,
    model: type[CommandT],
    take: Callable[..., Awaitable[Operation]],
    dry_run: Callable[..., Awaitable[Forecast]] | None = None,
) -> web.Response:
    """Take the command in a request's body, for the VM in its path, and answer with its operation.

    :param dry_run: answers a command that asks what it would come to.
    """
    check_parameters(request)
    command = await body_of(request, model)
    path = (request.match_info["name"],) if "name" in request.match_info else ()
    if dry_run is not None and getattr(command, "dry_run", False):
        request[WOULD_BE] = True
        return answer(await dry_run(*path, command))
    return begun(await take(*path, command))


def begun(operation: Operation) -> web.Response:
    """202 with an operation, and where to look at it."""
    response = answer(operation, 202)
    response.headers[hdrs.LOCATION] = f"/v1/operations/{operation.request_id}"
    return response
