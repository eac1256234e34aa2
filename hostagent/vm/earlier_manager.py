"""What a manager of an earlier version is told: bodies without the fields that it has refused.

Versions before 0.2 refuse a body with a field that they do not know, and say which it is.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

from pydantic import BaseModel

from ebbtide.messages.common import problem_in


def unknown_field(answer: str) -> tuple[str, ...] | None:
    """The field that a manager refuses since it does not know it, ``*`` for a number in its path.

    :returns: None: the refusal is about something else.
    """
    problem = problem_in(400, answer)
    errors = problem.errors if problem is not None else ()
    field = next((error.field for error in errors if error.code == "unknown"), None)
    return None if field is None else tuple("*" if part.isdigit() else part for part in field.split("."))


def without(body: BaseModel, fields: Collection[tuple[str, ...]]) -> str:
    """A body without some fields, as it is sent."""
    if not fields:
        return body.model_dump_json()
    values = body.model_dump(mode="json")
    for field in fields:
        _take_out(values, field)
    return json.dumps(values)


def of_one_vm(fields: Collection[tuple[str, ...]]) -> set[tuple[str, ...]]:
    """The fields of a body that has one VM, ``vm``, where a report has ``vms``."""
    return {("vm", *field[2:]) for field in fields if field[:2] == ("vms", "*")}


def _take_out(value: Any, field: tuple[str, ...]) -> None:
    name, rest = field[0], field[1:]
    for inner in value if name == "*" and isinstance(value, list) else [value]:
        if name == "*":
            _take_out(inner, rest)
        elif isinstance(inner, dict) and not rest:
            inner.pop(name, None)
        elif isinstance(inner, dict) and name in inner:
            _take_out(inner[name], rest)
