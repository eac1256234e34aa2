"""Helpers that all routes of the manager's API share: bodies in, bodies out, parameters, where the manager is found."""

from __future__ import annotations

from typing import Annotated, Any, Final, TypeVar

from aiohttp import hdrs, web
from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from cluster_manager.errors import InvalidBody, RequestError
from cluster_manager.inventory.later_words import read_of_agent
from cluster_manager.manager import Manager
from ebbtide.messages.common import RequestId, problem_of
from ebbtide.messages.labels import Selector, selector_of
from ebbtide.messages.operations import Operation
from ebbtide.rest.descriptions import LOCATION, Answer, Parameter

B = TypeVar("B", bound=BaseModel)

MANAGER: Final = web.AppKey("manager", Manager)

#: Longest long poll, seconds; longest task duration that is ranked for, seconds.
LONGEST_WAIT_S: Final = 60.0
LONGEST_DURATION_S: Final = 30 * 86_400.0

#: The answer to a request that a plan, or a host, carries out.
WENT_OUT: Final = Answer(Operation, "It is under way; the same request again gets the same answer.", headers=LOCATION)

CHANGED_SINCE: Final = Parameter(
    "changed_since",
    Annotated[int, Field(ge=0, le=2**53)],
    "only what has changed since a page's `changes`; all, where that is not known any more, or beside a filter",
)

SELECTOR: Final = Parameter(
    "selector",
    Annotated[str, Field(min_length=1, max_length=2000, pattern=r"^[A-Za-z0-9_./=!,() -]+$")],
    "only those with such labels: env=prod, env!=prod, env in (prod,test), env notin (prod), env, !env; all of these",
)


def selector_in(query: dict[str, Any]) -> Selector:
    """The selector that is asked for. Raises InvalidField."""
    return selector_of(query["selector"]) if query["selector"] is not None else ()


_REQUEST_ID: Final[TypeAdapter[str]] = TypeAdapter(RequestId)


async def body_of(request: web.Request, form: type[B], *, agent: str | None = None) -> B:
    """The body in its form.

    :param agent: the host whose agent sends it, which may be of a later version and say more.

    :raises RequestError: 400 with the field.
    """
    try:
        # Strict: "3" is no number, as the OpenAPI document says.
        if agent is not None:
            return read_of_agent(form, await request.read(), agent, strict=True)
        return form.model_validate_json(await request.read(), strict=True)
    except ValidationError as error:
        raise InvalidBody(problem_of(error)) from error


def request_id_of(text: str) -> str:
    """:raises RequestError: it can be none."""
    try:
        return _REQUEST_ID.validate_python(text)
    except ValidationError as error:
        raise RequestError(400, f"request_id: {problem_of(error).detail}", "request_id") from error


def answer(body: BaseModel, status: int = 200) -> web.Response:
    return web.Response(text=body.model_dump_json(), status=status, content_type="application/json")


def begun(operation: Operation, where: str = "/v1") -> web.Response:
    """202 with an operation, and where to look at it.

    :param where: whose operation it is: the manager's, or a host's.
    """
    response = answer(operation, 202)
    response.headers[hdrs.LOCATION] = f"{where}/operations/{operation.request_id}"
    return response
