"""What all routes of the host agent's API share: bodies in, bodies out, parameters, where the agent is found."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Final, TypeVar

from aiohttp import web
from pydantic import BaseModel

from deflation.messages import Operation
from hostagent.agent import Agent
from hostagent.errors import RequestRefused

AGENT: Final = web.AppKey("agent", Agent)
BodyT = TypeVar("BodyT", bound=BaseModel)


async def body_of(request: web.Request, model: type[BodyT]) -> BodyT:
    """:raises ValidationError: the body is no JSON or does not fit the model."""
    # Strict: "3" is no number, as the OpenAPI document says.
    return model.model_validate_json(await request.read(), strict=True)


def answer(body: BaseModel, status: int = 200) -> web.Response:
    return web.Response(text=body.model_dump_json(), status=status, content_type="application/json")


def accepted(operation: Operation) -> web.Response:
    return answer(operation, 202)


def parameters(request: web.Request, known: Collection[str]) -> dict[str, str]:
    """The query's parameters.

    :raises RequestRefused: one that is not known here.
    """
    for name in request.query:
        if name not in known:
            raise RequestRefused(400, f"{name} is no parameter of this route", name)
    return dict(request.query)


def number(query: dict[str, str], name: str, default: float, highest: float, lowest: float = 0.0) -> float:
    """A parameter as a number.

    :raises RequestRefused: it is none, or out of its range.
    """
    try:
        value = float(query.get(name, default))
    except ValueError:
        value = math.nan
    if not lowest <= value <= highest:
        raise RequestRefused(400, f"{name} must be a number from {lowest:g} to {highest:g}", name)
    return value


def whole_number(query: dict[str, str], name: str, default: int, highest: int, lowest: int = 0) -> int:
    """A parameter as a whole number. Raises as :func:`number`."""
    value = number(query, name, default, highest, lowest)
    if not value.is_integer():
        raise RequestRefused(400, f"{name} must be a whole number", name)
    return int(value)
