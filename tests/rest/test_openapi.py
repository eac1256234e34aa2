"""The OpenAPI documents: served, checked in and made from the router they are one; no route goes without."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any
from unittest.mock import Mock

import jsonschema
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from pydantic import Field
from yarl import URL

import hostagent.api.openapi
from cluster_manager.api import itself
from cluster_manager.api.app import make_app as make_manager
from cluster_manager.manager import Manager
from cluster_manager.settings import Settings
from ebbtide.cli.openapi import documents
from ebbtide.deflation.errors import InvalidField
from ebbtide.messages.common import Health, Problem
from ebbtide.rest.descriptions import Parameter, UndescribedRoute, describe
from ebbtide.rest.openapi import EVERYWHERE, document_of, text_of
from ebbtide.rest.parameters import parameters_of
from hostagent.api.app import make_app as make_agent
from hostagent.operations.agent import Agent
from tests.hostagent.conftest import TOKEN, agent, world

__all__ = ["agent", "world"]
DIRECTORY = Path(__file__).resolve().parents[2] / "docs" / "openapi"


@pytest.mark.parametrize("name", ["manager.json", "hostagent.json", "cli.json"])
def test_the_document_that_is_checked_in_is_that_of_the_code(name: str) -> None:
    assert (DIRECTORY / name).read_text() == text_of(documents()[name]), "make openapi writes it anew"


async def served(app: web.Application, token: str) -> Any:
    async with TestClient(TestServer(app)) as client:
        assert (await client.get("/v1/openapi.json")).status == 401
        answer = await client.get("/v1/openapi.json", headers={"Authorization": f"Bearer {token}"})
        assert answer.status == 200
        return await answer.json()


async def test_the_manager_serves_the_document_of_its_own_router(tmp_path: Path) -> None:
    app = make_manager(Manager(Settings(tmp_path / "m.sqlite", "a-client-token", "an-agent-token")))
    document = await served(app, "a-client-token")
    assert document == documents()["manager.json"]
    assert routes_of(app) == described(document)
    assert "a-client-token" not in json.dumps(document)


async def test_the_host_agent_serves_the_document_of_its_own_router(agent: Agent) -> None:
    app = make_agent(agent, TOKEN)
    document = await served(app, TOKEN)
    assert document == documents()["hostagent.json"]
    assert routes_of(app) == described(document)


@pytest.mark.parametrize("daemon", [itself, hostagent.api.openapi])
async def test_the_document_is_made_once_however_often_it_is_asked_for(
    daemon: ModuleType, agent: Agent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes a tenth of a second of the event loop, by which a manager proves its lock."""
    made = Mock(side_effect=document_of)
    monkeypatch.setattr(daemon, "document_of", made)
    manager = Manager(Settings(tmp_path / "m.sqlite", TOKEN, "an-agent-token"))
    app = make_manager(manager) if daemon is itself else make_agent(agent, TOKEN)
    async with TestClient(TestServer(app)) as client:
        for _ in range(2):
            answer = await client.get("/v1/openapi.json", headers={"Authorization": f"Bearer {TOKEN}"})
            assert "/v1/openapi.json" in (await answer.json())["paths"]
    assert made.call_count == 1


def routes_of(app: web.Application) -> set[tuple[str, str]]:
    routes = ((r.method, r.resource.canonical) for r in app.router.routes() if r.resource is not None)
    return {(method, path) for method, path in routes if method != "HEAD"}


def described(document: Any) -> set[tuple[str, str]]:
    return {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}


@pytest.mark.parametrize("name", ["manager.json", "hostagent.json"])
def test_every_operation_has_a_summary_a_name_and_the_answers_that_all_have(name: str) -> None:
    document = documents()[name]
    operations = [operation for methods in document["paths"].values() for operation in methods.values()]
    assert len({operation["operationId"] for operation in operations}) == len(operations)
    for operation in operations:
        assert operation["summary"]
        if operation["security"]:
            assert {str(status) for status in EVERYWHERE} <= set(operation["responses"])


@pytest.mark.parametrize("name", ["manager.json", "hostagent.json"])
def test_every_schema_is_one_and_every_example_fits_its_own(name: str) -> None:
    document = documents()[name]
    for schema in document["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)
    examples = 0
    for operation in (o for methods in document["paths"].values() for o in methods.values()):
        content = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
        if "example" in content:
            schema = {**content["schema"], "components": document["components"]}
            jsonschema.Draft202012Validator(schema).validate(content["example"])
            examples += 1
    assert examples > 2


def parts_of(part: Any, where: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every object in a document, with its path."""
    if isinstance(part, dict):
        yield where, part
    for key, inner in part.items() if isinstance(part, dict) else enumerate(part) if isinstance(part, list) else ():
        yield from parts_of(inner, f"{where}/{key}")


def reached(document: dict[str, Any], part: Any) -> set[str]:
    """The schemas that a part refers to, also by others."""
    found: set[str] = set()
    waiting = [part]
    while waiting:
        for _, inner in parts_of(waiting.pop()):
            name = str(inner.get("$ref", "")).removeprefix("#/components/schemas/")
            if name and name not in found:
                found.add(name)
                waiting.append(document["components"]["schemas"][name])
    return found


#: Fields that earlier versions do not know, which are left out where they say nothing.
LEFT_OUT = {"Operation": {"reason", "trace_id"}, "VMSpec": {"labels", "steady"}}


@pytest.mark.parametrize("name", ["manager.json", "hostagent.json"])
class TestWhatGeneratorsNeed:
    def test_every_schema_has_its_name_as_its_title_and_a_description(self, name: str) -> None:
        schemas = documents()[name]["components"]["schemas"]
        assert {title: schema["title"] for title, schema in schemas.items()} == {title: title for title in schemas}
        assert [title for title, schema in schemas.items() if not schema.get("description")] == []
        assert all(title.isidentifier() for title in schemas)

    def test_every_property_and_parameter_is_described(self, name: str) -> None:
        document = documents()[name]
        bare = [
            f"{title}.{field}"
            for title, schema in document["components"]["schemas"].items()
            for field, found in schema.get("properties", {}).items()
            if not found.get("description")
        ]
        bare += [where for where, part in parts_of(document["paths"]) if "in" in part and not part.get("description")]
        assert bare == []

    def test_answers_may_have_more_fields_and_always_have_those_that_are_described(self, name: str) -> None:
        document = documents()[name]
        answered = reached(document, [o["responses"] for o in operations_of(document)])
        asked = reached(document, [o.get("requestBody", {}) for o in operations_of(document)])
        assert answered & asked <= {title for title in answered if "enum" in document["components"]["schemas"][title]}
        for title in answered:
            schema = document["components"]["schemas"][title]
            assert schema.get("additionalProperties") is not False, title
            always = set(schema.get("properties", {})) - LEFT_OUT.get(title, set())
            assert set(schema.get("required", ())) == always, title
        for title in asked:
            schema = document["components"]["schemas"][title]
            assert schema.get("additionalProperties") is False or "enum" in schema, title

    def test_what_begins_something_says_where_to_look_at_it(self, name: str) -> None:
        for operation in operations_of(documents()[name]):
            answer = operation["responses"].get("202", {"headers": {"Location": None}})
            assert "Location" in answer["headers"]

    def test_kinds_of_what_happened_are_listed(self, name: str) -> None:
        schemas = documents()[name]["components"]["schemas"]
        assert {"deflate", "pressure"} <= set(schemas["Decision"]["properties"]["kind"]["enum"])
        if name == "manager.json":
            assert {"placed", "preempted", "task-done"} <= set(schemas["Event"]["properties"]["kind"]["enum"])


def test_what_managers_tell_hosts_is_no_business_of_clients() -> None:
    document = documents()["manager.json"]
    # A report is a host's, which says whom it follows.
    asked = reached(document, [o.get("requestBody", {}) for o in operations_of(document)]) - {"HostReport"}
    fields = {field for title in asked for field in document["components"]["schemas"][title].get("properties", {})}
    assert "generation" in fields
    assert not fields & {"epoch", "order"}


def operations_of(document: Any) -> list[dict[str, Any]]:
    return [operation for methods in document["paths"].values() for operation in methods.values()]


def app_with(path: str, method: str = "GET", **description: Any) -> web.Application:
    async def one(request: web.Request) -> web.Response:
        try:
            return web.json_response(parameters_of(request))
        except InvalidField as error:
            return web.json_response({"field": error.field, "error": str(error)}, status=400)

    app = web.Application()
    described = describe("A route", tag="test", answers={200: Health}, **description)(one) if description else one
    app.router.add_route(method, path, described)
    return app


def test_a_route_without_a_description_is_an_error() -> None:
    with pytest.raises(UndescribedRoute, match="the handler one has no description"):
        document_of(app_with("/v1/things"), "t", "s")


def test_a_path_whose_names_are_not_described_is_an_error() -> None:
    with pytest.raises(UndescribedRoute, match="other names than its path"):
        document_of(app_with("/v1/things/{name}", problems=(404,)), "t", "s")


def test_two_handlers_of_one_name_are_an_error() -> None:
    app = app_with("/v1/a", problems=(404,))
    app.router.add_get("/v1/b", next(iter(app.router.routes())).handler)
    with pytest.raises(UndescribedRoute, match="two handlers are called one"):
        document_of(app, "t", "s")


def test_a_problem_is_described_as_one() -> None:
    document = document_of(app_with("/v1/a", problems=(404,)), "t", "s")
    answers = document["paths"]["/v1/a"]["get"]["responses"]
    assert answers["404"]["content"]["application/problem+json"]["schema"] == {"$ref": "#/components/schemas/Problem"}
    assert set(document["components"]["schemas"]["Problem"]["properties"]) == set(Problem.model_fields)


QUERY = (
    Parameter("limit", Annotated[int, Field(ge=1, le=10)], "so many", default=5),
    Parameter("share", Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)], "a share"),
    Parameter("all", bool, "all of them", default=False),
    Parameter("word", Annotated[str, Field(pattern="^[a-z]+$")], "a word"),
)


@pytest.mark.parametrize(
    ("query", "values"),
    [
        ("", {"limit": 5, "share": None, "all": False, "word": None}),
        ("limit=7&share=0.5&all=true&word=a", {"limit": 7, "share": 0.5, "all": True, "word": "a"}),
        ("share=1e-2", {"limit": 5, "share": 0.01, "all": False, "word": None}),
        ("limit=2.0", {"limit": 2, "share": None, "all": False, "word": None}),
    ],
)
async def test_parameters_are_read_as_they_are_described(query: str, values: dict[str, Any]) -> None:
    async with TestClient(TestServer(app_with("/v1/a", query=QUERY))) as client:
        answer = await client.get(f"/v1/a?{query}")
        assert (answer.status, await answer.json()) == (200, values)


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("limit=0", "limit"),
        ("limit=11", "limit"),
        ("limit=1.5", "limit"),
        ("limit=1_0", "limit"),
        ("limit=", "limit"),
        ("limit=%D9%A3", "limit"),
        ("limit=1&limit=1", "limit"),
        ("share=nan", "share"),
        ("share=Infinity", "share"),
        ("share=1e999", "share"),
        ("all=yes", "all"),
        ("all=1", "all"),
        ("word=A", "word"),
        ("word=a%0A", "word"),
        ("other=1", "other"),
    ],
)
async def test_parameters_that_are_not_as_described_are_refused_by_name(query: str, field: str) -> None:
    async with TestClient(TestServer(app_with("/v1/a", query=QUERY))) as client:
        answer = await client.get(f"/v1/a?{query}")
        assert (answer.status, (await answer.json())["field"]) == (400, field)


async def test_a_path_with_a_null_character_is_refused_by_its_parameter() -> None:
    async with TestClient(TestServer(app_with("/v1/a/{name}", problems=(404,)))) as client:
        answer = await client.get(URL("/v1/a/x%00", encoded=True))
        assert (answer.status, (await answer.json())["field"]) == (400, "name")
        assert (await client.get("/v1/a/Odd_One")).status == 200
