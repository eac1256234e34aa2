"""Words of enums in answers: whoever reads one takes a word that only a later version knows."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated, Any, Literal, get_args, get_origin

import pytest
from aiohttp import web
from pydantic import BaseModel, ValidationError

from cluster_manager.api.app import ROUTES as MANAGER_ROUTES
from ebbtide.messages.common import as_sent, problem_in
from ebbtide.messages.hosts import HostReport
from ebbtide.messages.operations import Operation
from ebbtide.rest.descriptions import description_of
from hostagent.api.app import ROUTES as AGENT_ROUTES

#: "always this word".
SINGLE = {"Health.status", "ManagerHealth.status", "Readiness.ready"}


def answered() -> set[type[BaseModel]]:
    """The models of all answers, and that of reports."""
    handlers = [
        route.handler
        for routes in (*MANAGER_ROUTES, *AGENT_ROUTES)
        for route in routes
        if isinstance(route, web.RouteDef)
    ]
    bodies = [answer.body for handler in handlers for answer in description_of(handler).answers.values()]
    return {HostReport, *(body for body in bodies if body is not None)}


def closed_words(kind: Any, opened: bool = False) -> Iterator[type[BaseModel] | str]:
    """The models inside a type, and its enums that take no other word."""
    if get_origin(kind) is Annotated:
        kind, *marks = get_args(kind)
        yield from closed_words(kind, opened or any(type(mark).__name__ == "_OpenWord" for mark in marks))
    elif get_origin(kind) is Literal or (isinstance(kind, type) and issubclass(kind, StrEnum)):
        if not opened:
            yield str(kind)
    elif isinstance(kind, type) and issubclass(kind, BaseModel):
        yield kind
    else:
        for part in get_args(kind):
            yield from closed_words(part)


def test_every_enum_in_an_answer_takes_a_word_that_only_a_later_version_knows() -> None:
    waiting, seen, closed = answered(), set[type[BaseModel]](), set[str]()
    assert len(waiting) >= 50
    while waiting:
        seen.add(model := waiting.pop())
        for name, field in model.model_fields.items():
            for found in closed_words(Annotated[field.annotation, *field.metadata, None]):
                if isinstance(found, str):
                    closed.add(f"{model.__name__}.{name}")
                elif found not in seen:
                    waiting.add(found)
    assert closed - SINGLE == set()


SAID = {"request_id": "r", "kind": "polish", "state": "suspended", "sentence": "", "started_at": 1.0}


def test_a_word_is_read_and_written_as_it_was_sent(recwarn: pytest.WarningsRecorder) -> None:
    found = Operation.model_validate(SAID, context=as_sent)
    assert (found.kind, found.state.value, f"{found.state}") == ("polish", "suspended", "suspended")
    assert found.model_dump(mode="json", include=set(SAID)) == SAID
    assert Operation.model_validate_json(found.model_dump_json(), context=as_sent) == found
    assert not recwarn.list


def test_a_word_of_another_daemon_is_short_and_printable() -> None:
    found = Operation.model_validate({**SAID, "state": "\x1b[2J" + "x" * 100}, context=as_sent)
    assert len(found.state.value) == 64
    assert found.state.value.isprintable()


@pytest.mark.parametrize("field", ["kind", "state"])
def test_what_is_no_word_is_refused_and_without_a_reader_one_that_is_not_known(field: str) -> None:
    with pytest.raises(ValidationError):
        Operation.model_validate({**SAID, field: 3}, context=as_sent)
    with pytest.raises(ValidationError) as refused:
        Operation.model_validate({**SAID, "kind": "create", "state": "done", field: "polish"})
    assert [error["loc"] for error in refused.value.errors()] == [(field,)]


def test_a_problem_whose_fields_have_codes_of_a_later_version_is_read() -> None:
    body = (
        '{"type": "t", "title": "t", "status": 400, "detail": "d", "code": "newer", '
        '"errors": [{"field": "vm", "code": "outdated", "detail": "d"}]}'
    )
    found = problem_in(400, body)
    assert found is not None
    assert [error.code for error in found.errors] == ["outdated"]
