"""The OpenAPI 3.1 document of a server, made from its router, the descriptions of its routes and their models."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any, Final

from aiohttp import hdrs, web
from pydantic import BaseModel, Field
from pydantic.json_schema import GenerateJsonSchema, models_json_schema

from ebbtide.messages.common import Problem
from ebbtide.rest.descriptions import (
    JSON,
    PROBLEM_JSON,
    Answer,
    Description,
    Parameter,
    UndescribedRoute,
    description_of,
)

PATH: Final = "/v1/openapi.json"
#: What any route may answer; a status that is added to all routes is added here.
EVERYWHERE: Final[Mapping[int, str]] = {
    400: "A parameter or a field is wrong; the sentence names it.",
    401: "The token is missing or wrong.",
    403: "The token's role may not do this.",
    405: "The path takes other methods, which Allow names.",
    408: "The request did not arrive in time.",
    413: "The body is too large.",
    429: "Too many requests; Retry-After says when to come again.",
    500: "A defect of the server, whose log says more.",
    503: "Not now: the server, or the host that is asked, is not ready.",
}
#: Of single routes.
SOMEWHERE: Final[Mapping[int, str]] = {
    404: "There is no such thing.",
    409: "It cannot be done as things stand; nothing has changed.",
    412: "It has another version by now; nothing has changed.",
}
#: Without a token there are neither roles nor principals.
_OPEN: Final = (400, 405, 408, 413, 429, 500, 503)
#: The document, made once: that takes a tenth of a second of the event loop.
_BYTES: Final[web.AppKey[Callable[[], bytes]]] = web.AppKey("openapi")
_NAME_IN_PATH: Final = re.compile(r"{([^}]+)}")


class Document(BaseModel):
    """An OpenAPI 3.1 document."""

    model_config = {"extra": "allow"}

    openapi: str = Field(description="the version of OpenAPI")
    paths: dict[str, Any] = Field(description="the routes")


def document_of(app: web.Application, title: str, summary: str) -> dict[str, Any]:
    """The document of an application.

    :raises UndescribedRoute: a route's handler has no description, or one that does not fit the path.
    """
    routes = list(_routes(app))
    names = _schema_names(description for _, _, _, description in routes)
    paths: dict[str, dict[str, Any]] = {}
    seen: set[str] = set()
    for method, path, handler, description in routes:
        identifier = handler.strip("_")
        if identifier in seen:
            raise UndescribedRoute(f"two handlers are called {identifier}: their operations need names of their own")
        seen.add(identifier)
        paths.setdefault(path, {})[method.lower()] = _operation(identifier, path, description, names[0])
    return {
        "openapi": "3.1.0",
        "info": {"title": title, "summary": summary, "version": "1", "license": {"name": "Apache-2.0"}},
        "paths": paths,
        "components": {
            "schemas": names[1],
            "securitySchemes": {
                "client": {"type": "http", "scheme": "bearer", "description": "The token of people and programs."},
                "agent": {"type": "http", "scheme": "bearer", "description": "The token of host agents."},
            },
        },
    }


def put_document(app: web.Application, document: Callable[[web.Application], dict[str, Any]]) -> None:
    """Have an application serve its document."""
    made: Callable[[], bytes] = cache(lambda: json.dumps(document(app)).encode())
    app[_BYTES] = made


def serve_document(request: web.Request) -> web.Response:
    """The answer to a request for the document of its application."""
    return web.Response(body=request.app[_BYTES](), content_type=JSON, charset="utf-8")


def text_of(document: Mapping[str, Any]) -> str:
    """The document as it is checked in."""
    return json.dumps(document, indent=1, sort_keys=True) + "\n"


def _routes(app: web.Application) -> Iterator[tuple[str, str, str, Description]]:
    """Method, path, the handler's name and description of every route, by path and method."""
    found = []
    for route in app.router.routes():
        if route.method == hdrs.METH_HEAD:
            # Of every GET.
            continue
        if route.resource is None or route.method == hdrs.METH_ANY:
            raise UndescribedRoute(f"{route} takes any method")
        description = description_of(route.handler)
        path = route.resource.canonical
        if sorted(_NAME_IN_PATH.findall(path)) != sorted(parameter.name for parameter in description.path):
            raise UndescribedRoute(f"the description of {route.method} {path} has other names than its path")
        found.append((route.method, path, getattr(route.handler, "__name__", ""), description))
    yield from sorted(found, key=lambda row: (row[1], row[0]))


class _Plain(GenerateJsonSchema):
    """Without a title for every field, which only repeats its name. Answers have every field, and may have more."""

    def model_schema(self, schema: Any) -> dict[str, Any]:
        made = super().model_schema(schema)
        if self.mode == "serialization":
            made.pop("additionalProperties", None)
        return made

    def field_is_required(self, field: Any, total: bool) -> bool:
        # What some answers leave out is none of what is always there.
        if self.mode == "serialization" and not field.get("serialization_exclude_if"):
            return True
        return super().field_is_required(field, total)


Models = Mapping[tuple[Any, str], dict[str, Any]]


def _schema_names(descriptions: Iterator[Description]) -> tuple[Models, dict[str, Any]]:
    """Every model's reference, as it is read and as it is written, and the schemas they refer to."""
    wanted: dict[tuple[type[BaseModel], Any], None] = {(Problem, "serialization"): None}
    for description in descriptions:
        if description.body is not None:
            wanted[description.body, "validation"] = None
        for answer in description.answers.values():
            if answer.body is not None:
                wanted[answer.body, "serialization"] = None
    inputs = sorted(wanted, key=lambda row: (row[0].__name__, row[1]))
    references, definitions = models_json_schema(
        inputs, ref_template="#/components/schemas/{model}", schema_generator=_Plain
    )
    schemas = {
        _own_name(name): {**schema, "title": _own_name(name)} for name, schema in definitions.get("$defs", {}).items()
    }
    return {key: _renamed(reference) for key, reference in references.items()}, _renamed(schemas)


def _own_name(name: str) -> str:
    """``X`` where it is answered, ``XInput`` where it is asked for in another form."""
    return name.removesuffix("-Output").replace("-Input", "Input")


def _renamed(part: Any) -> Any:
    """A part of the document with all references by the schemas' own names."""
    if isinstance(part, dict):
        return {key: _own_name(inner) if key == "$ref" else _renamed(inner) for key, inner in part.items()}
    return [_renamed(inner) for inner in part] if isinstance(part, list) else part


def _operation(identifier: str, path: str, description: Description, models: Models) -> dict[str, Any]:
    parameters = [
        *(_parameter(parameter, "path") for parameter in description.path),
        *(_parameter(parameter, "query") for parameter in description.query),
        *(_parameter(parameter, "header") for parameter in description.headers),
    ]
    operation: dict[str, Any] = {
        "operationId": identifier,
        "summary": description.summary,
        "tags": [description.tag],
        "security": [] if description.security == "none" else [{description.security: []}],
        "responses": _responses(description, models),
    }
    if parameters:
        operation["parameters"] = parameters
    if description.body is not None:
        content = {"schema": models[description.body, "validation"]}
        if description.example is not None:
            content["example"] = description.example.model_dump(mode="json", exclude_defaults=True)
        operation["requestBody"] = {"required": True, "content": {JSON: content}}
    return operation


def _parameter(parameter: Parameter, where: str) -> dict[str, Any]:
    return {
        "name": parameter.name,
        "in": where,
        "required": parameter.required or where == "path",
        "description": parameter.summary,
        "schema": parameter.schema,
    }


def _responses(description: Description, models: Models) -> dict[str, Any]:
    found = {str(status): _answer(answer, models) for status, answer in description.answers.items()}
    common = _OPEN if description.security == "none" else tuple(EVERYWHERE)
    for status in (*common, *description.problems):
        problem = Answer(Problem, {**EVERYWHERE, **SOMEWHERE}[status], PROBLEM_JSON)
        found[str(status)] = _answer(problem, models)
    return dict(sorted(found.items()))


def _answer(answer: Answer, models: Models) -> dict[str, Any]:
    summary = answer.summary
    if not summary and answer.body is not None:
        summary = (answer.body.__doc__ or answer.body.__name__).strip().splitlines()[0]
    made: dict[str, Any] = {"description": summary}
    if answer.body is not None:
        made["content"] = {answer.content_type: {"schema": models[answer.body, "serialization"]}}
    elif answer.content_type != JSON:
        made["content"] = {answer.content_type: {"schema": {"type": "string"}}}
    if answer.headers:
        made["headers"] = {
            name: {"description": meaning, "required": True, "schema": {"type": "string"}}
            for name, meaning in answer.headers.items()
        }
    return made
