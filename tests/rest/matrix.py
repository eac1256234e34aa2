"""The matrix of roles and routes, walked over real HTTP with the routes that a server really has."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import aiohttp
from aiohttp import web

from ebbtide.rest.roles import OPEN_ROUTES, Role

#: One caller of each role, and his token. Hosts of agents: see below.
TOKENS: Mapping[str, str] = {
    "metrics": "token-of-a-prometheus",
    "viewer": "token-of-a-viewer",
    "operator": "token-of-an-operator",
    "admin": "token-of-an-admin",
    "manager": "token-of-the-manager",
    "agent": "token-of-host-a",
}
#: Who covers what: written down here once more, so that the matrix does not check the code by itself.
COVERS: Mapping[str, frozenset[str]] = {
    "metrics": frozenset({"metrics"}),
    "viewer": frozenset({"metrics", "viewer"}),
    "operator": frozenset({"metrics", "viewer", "operator"}),
    "admin": frozenset({"metrics", "viewer", "operator", "admin"}),
    "manager": frozenset({"metrics", "viewer", "operator", "admin", "manager"}),
    "agent": frozenset({"agent"}),
}
#: What stands in a path for its parameters: a host that is there, and a VM and an operation that are not.
VALUES = {"id": "host-a", "name": "nobody", "request_id": "r", "file": "main.js"}


def routes_of(app: web.Application) -> set[tuple[str, str]]:
    """Method and canonical path of all routes but HEAD, which stands for GET."""
    found = set()
    for route in app.router.routes():
        assert route.resource is not None
        if route.method != "HEAD":
            found.add((route.method, route.resource.canonical))
    return found


async def walk(session: aiohttp.ClientSession, url: str, table: Mapping[tuple[str, str], str], role: str) -> None:
    """Call every route as this role: it gets in exactly where it may, and a refusal says which role it takes."""
    headers = {"Authorization": f"Bearer {TOKENS[role]}"}
    for (method, path), needed in table.items():
        status, answer = await call(session, url, method, path, headers)
        where = f"{role}: {method} {path} -> {status} {answer}"
        if needed == "nobody" or needed in COVERS[role]:
            assert status not in (401, 403, 429), where
            assert status < 500 or status == 503, where
        elif (needed == "agent") != (role == "agent"):
            # People and agents are strangers to each other.
            assert (status, answer["field"]) == (401, "Authorization"), where
        else:
            assert status == 403, where
            assert f"the role {needed}" in answer["detail"], where


async def walk_as_stranger(
    session: aiohttp.ClientSession, url: str, table: Mapping[tuple[str, str], str], headers: Mapping[str, str]
) -> None:
    """Without a right token every route answers the same, and so do paths that do not exist."""
    paths = [*table, ("GET", "/v1/nothing"), ("POST", "/nothing"), ("POST", "/healthz"), ("PATCH", "/v1/vms")]
    for method, path in paths:
        status, answer = await call(session, url, method, path, headers)
        if table.get((method, path)) == "nobody":
            # Those by which a host joins look at the invitation in the body.
            assert status == 200 or (status in (400, 409) and path in OPEN_ROUTES), (method, path)
        else:
            assert (status, answer["field"]) == (401, "Authorization"), (method, path)


async def call(
    session: aiohttp.ClientSession, url: str, method: str, path: str, headers: Mapping[str, str]
) -> tuple[int, Any]:
    filled = re.sub(r"\{(\w+)\}", lambda match: VALUES[match[1]], path)
    async with session.request(method, url + filled, headers=headers, data=None if method == "GET" else b"{}") as got:
        # A stream does not end by itself: that it has begun is the answer, as with a page for a browser, and a file.
        no_json = ("text/event-stream", "text/html", "text/javascript", "text/plain", "application/octet-stream")
        answer = None if got.content_type in no_json else await got.json()
        if got.status == 401:
            assert got.headers["WWW-Authenticate"].startswith("Bearer ")
        return got.status, answer


def roles() -> list[str]:
    return [role.value for role in Role]
