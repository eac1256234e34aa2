"""Description of a route, beside its handler: the OpenAPI document and the check of parameters come from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final, Literal, TypeVar

from aiohttp.typedefs import Handler
from pydantic import BaseModel, TypeAdapter

H = TypeVar("H", bound=Handler)
#: Whose token a route asks for: that of people and programs, that of host agents, or none.
Security = Literal["client", "agent", "none"]

JSON: Final = "application/json"
PROBLEM_JSON: Final = "application/problem+json"
#: Of an answer that something has begun.
LOCATION: Final[Mapping[str, str]] = {"Location": "where to look at what has begun"}
_ATTRIBUTE: Final = "_rest_description"


class UndescribedRoute(LookupError):
    """A route whose handler says nothing of itself."""


@dataclass(frozen=True)
class Parameter:
    """A parameter of the query, the path or the headers.

    :param kind: its type as pydantic reads it, with its limits: ``Annotated[int, Field(ge=1, le=1000)]``.
    :param default: what the handler gets where it is left out.
    """

    name: str
    kind: Any
    summary: str
    default: Any = None
    required: bool = False

    @cached_property
    def adapter(self) -> TypeAdapter[Any]:
        """Checks a value."""
        return TypeAdapter(self.kind)

    @cached_property
    def schema(self) -> dict[str, Any]:
        """Its JSON Schema, with the default."""
        schema = self.adapter.json_schema()
        return schema if self.default is None else {**schema, "default": self.default}


@dataclass(frozen=True)
class Answer:
    """An answer with one status.

    :param body: its model; None: no body, or one that is no JSON.
    :param summary: default: the first sentence of the model's docstring.
    :param headers: their meanings by name; each of them is always there.
    """

    body: type[BaseModel] | None = None
    summary: str = ""
    content_type: str = JSON
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Description:
    """One route. See `describe`."""

    summary: str
    tag: str
    answers: Mapping[int, Answer]
    problems: tuple[int, ...] = ()
    body: type[BaseModel] | None = None
    example: BaseModel | None = None
    path: tuple[Parameter, ...] = ()
    query: tuple[Parameter, ...] = ()
    headers: tuple[Parameter, ...] = ()
    security: Security = "client"


def describe(
    summary: str,
    *,
    tag: str,
    answers: Mapping[int, Answer | type[BaseModel]],
    problems: Sequence[int] = (),
    body: type[BaseModel] | None = None,
    example: BaseModel | None = None,
    path: Sequence[Parameter] = (),
    query: Sequence[Parameter] = (),
    headers: Sequence[Parameter] = (),
    security: Security = "client",
) -> Callable[[H], H]:
    """Describe the route of a handler; stands between the route's decorator and the handler.

    :param answers: what it answers when all is well, by status.
    :param problems: the statuses of its own refusals; those that every route has are listed in `rest.openapi`.
    :param example: a body that does something sensible.
    :param path: one for each name in the path.
    """
    made = Description(
        summary=summary,
        tag=tag,
        answers={status: a if isinstance(a, Answer) else Answer(a) for status, a in answers.items()},
        problems=tuple(problems),
        body=body,
        example=example,
        path=tuple(path),
        query=tuple(query),
        headers=tuple(headers),
        security=security,
    )

    def attach(handler: H) -> H:
        setattr(handler, _ATTRIBUTE, made)
        return handler

    return attach


def description_of(handler: Any) -> Description:
    """:raises UndescribedRoute: the handler carries none."""
    found = getattr(handler, _ATTRIBUTE, None)
    if not isinstance(found, Description):
        name = getattr(handler, "__name__", repr(handler))
        raise UndescribedRoute(f"the handler {name} has no description: put @describe(...) under its route")
    return found
