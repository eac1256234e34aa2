"""Parameters of a request, read by the description of its route: what is documented is what is checked."""

from __future__ import annotations

import re
from typing import Any, Final

from aiohttp import web
from pydantic import ValidationError

from ebbtide.deflation.errors import InvalidField
from ebbtide.messages.common import problem_of
from ebbtide.rest.descriptions import Parameter, description_of

#: What JSON calls a number; Python would read "1_0" and "infinity" too.
_NUMBER: Final = re.compile(r"-?\d{1,30}(\.\d{1,30})?([eE][+-]?\d{1,3})?", re.ASCII)


def parameters_of(request: web.Request) -> dict[str, Any]:
    """The query's and the headers' parameters, each known, given at most once, and of its kind. The path's are text.

    :returns: values by name; the default, or None, where a parameter is left out.
    :raises InvalidField: names the parameter.
    """
    for name, text in request.match_info.items():
        if "\0" in text:  # no database knows it; of any other name it is said that there is no such thing
            raise InvalidField(name, "must not hold a null character")
    description = description_of(request.match_info.handler)
    known = {parameter.name: parameter for parameter in description.query}
    for name in request.query:
        if name not in known:
            those = f"known here: {', '.join(known)}" if known else "none is known here"
            raise InvalidField(name, f"is no query parameter of {request.path} ({those})")
    values = {p.name: _one(p, request.query.getall(p.name, [])) for p in description.query}
    return values | {p.name: _one(p, request.headers.getall(p.name, [])) for p in description.headers}


def check_parameters(request: web.Request) -> None:
    """For routes that have none, or do not need their values. Raises as `parameters_of`."""
    parameters_of(request)


def _one(parameter: Parameter, given: list[str]) -> Any:
    if not given:
        if parameter.required:
            raise InvalidField(parameter.name, "is required")
        return parameter.default
    if len(given) > 1:
        raise InvalidField(parameter.name, "is given more than once")
    return _parsed(parameter, given[0])


def _parsed(parameter: Parameter, text: str) -> Any:
    value: Any = text
    if parameter.schema.get("type") in ("number", "integer"):
        if not _NUMBER.fullmatch(text):
            raise InvalidField(parameter.name, "must be a number")
        value = int(text) if text.lstrip("-").isdigit() else float(text)
    elif parameter.schema.get("type") == "boolean":
        if text not in ("true", "false"):
            raise InvalidField(parameter.name, "must be true or false")
        value = text == "true"
    try:
        return parameter.adapter.validate_python(value)
    except ValidationError as error:
        raise InvalidField(parameter.name, problem_of(error).detail.removeprefix("the body: ")) from error
