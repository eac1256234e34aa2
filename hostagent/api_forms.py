"""What all routes of the host agent's API share: bodies in, bodies out, parameters, where the agent is found."""

from __future__ import annotations

from typing import Final, TypeVar

from aiohttp import web
from pydantic import BaseModel

from deflation.messages import Operation
from hostagent.agent import Agent

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
