"""Who may call what: every verb of the OpenAPI documents by every identity, and which check stops the others.

The rows are the routes of docs/openapi; the columns are those who could try: people by role, the manager, another host,
a guest and a task. Each cell is called over real HTTP or mutual TLS and compared with what `stopped_by` says.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import aiohttp
import pytest

from cluster_manager.api.app import make_app as manager_app
from cluster_manager.manager import Manager
from cluster_manager.settings import Settings
from ebbtide.rest.access import Access, Certificates
from ebbtide.rest.credentials import command_token, report_token
from ebbtide.rest.gate import Gate
from ebbtide.rest.listener import serving
from ebbtide.rest.roles import Role
from ebbtide.rest.settings import AccessSettings
from ebbtide.rest.tokens import principal
from hostagent.api.app import make_app as agent_app
from tests.hostagent.api.test_authorisation import ROUTES as AGENT_ROUTES
from tests.manager import cluster
from tests.manager.api.test_authorisation import ROUTES as MANAGER_ROUTES
from tests.manager.api.test_mutual_tls import BROKEN, agent_of
from tests.manager.cluster import QUICK
from tests.manager.fake_agent import HOSTS_KEY
from tests.rest.pki import Pki
from tests.waiting import AT_ONCE_S

ROOT: Final = Path(__file__).parents[3]
RANK: Final = {"metrics": 0, "viewer": 1, "operator": 2, "admin": 3, "manager": 4}
#: Each with what it carries: its token, and the common name of its certificate, if it has one.
IDENTITIES: Final = {
    "metrics": ("token-of-metrics", None),
    "viewer": ("token-of-viewer", None),
    "operator": ("token-of-operator", None),
    "admin": ("token-of-admin", None),
    "manager": (command_token(HOSTS_KEY, "host-a"), "ebb-manager"),
    # Another host than the one that the path or the server is about, with all that it has.
    "host": (report_token(HOSTS_KEY, "host-b"), "host-b"),
    "host, with the token that it is called with": (command_token(HOSTS_KEY, "host-b"), "host-b"),
    "guest": ("token-of-its-vm", None),
    "task": (None, None),
}
PEOPLE: Final = ("metrics", "viewer", "operator", "admin")
#: Where a cell is not what its row's least role says.
MAY: Final = "may"


@dataclass(frozen=True)
class Place:
    """One server: the OpenAPI document of its routes, their least roles, and how it is reached."""

    document: str
    roles: dict[tuple[str, str], str]
    tls: bool


PLACES: Final = {
    "manager, mutual TLS": Place("manager", MANAGER_ROUTES, True),
    "host agent, mutual TLS": Place("hostagent", AGENT_ROUTES, True),
    "host agent, plain loopback": Place("hostagent", AGENT_ROUTES, False),
}


def routes_of(place: Place) -> set[tuple[str, str]]:
    document = json.loads((ROOT / f"docs/openapi/{place.document}.json").read_text())
    return {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}


def stopped_by(place: Place, least: str, who: str) -> str:
    """The check that stops an identity at a route of this least role, or that it may."""
    if place.document == "hostagent" and place.tls and IDENTITIES[who][1] is None:
        return "no connection without a certificate"
    if least == "nobody":
        return MAY
    if place.document == "hostagent":
        if who in RANK:
            return MAY if RANK[who] >= RANK[least] else "role"
        # With the certificate of another host it would not do, whatever token it had.
        return "token"
    if least == "agent":
        return "certificate of the host" if who == "host" else "token"
    if who in PEOPLE:
        return MAY if RANK[who] >= RANK[least] else "role"
    return "token"


@pytest.fixture
async def servers(tmp_path: Path, each_store: None) -> AsyncIterator[tuple[dict[str, str], Pki]]:
    """The URL of each place."""
    pki = Pki(tmp_path / "pki")
    people = [principal(role, Role(role), str(IDENTITIES[role][0])) for role in PEOPLE]
    own = AccessSettings(own=pki.pair("ebb-manager"), client_ca=pki.ca)
    gate = Gate(own, people, Certificates(of_host=True), required=False, hosts_key=HOSTS_KEY)
    settings = Settings(cluster.database_in(tmp_path), "", HOSTS_KEY, agents=QUICK, agent_tls=gate.calls)
    async with contextlib.AsyncExitStack() as stack:
        app = manager_app(Manager(settings), gate.access)
        listener = await stack.enter_async_context(gate.serve(app, "127.0.0.1", 0, AT_ONCE_S))
        url = f"https://127.0.0.1:{listener.port}"
        agent = await stack.enter_async_context(agent_of(tmp_path, pki, "https://127.0.0.1:9"))
        manager = principal("token-file", Role.MANAGER, str(IDENTITIES["manager"][0]))
        plain = agent_app(agent, Access([*people, manager]))
        listening = await stack.enter_async_context(serving(plain, "127.0.0.1", 0, shutdown_timeout_s=AT_ONCE_S))
        urls = (url, agent.host.slice.url, f"http://127.0.0.1:{listening.port}")
        yield dict(zip(PLACES, urls, strict=True)), pki


@pytest.mark.parametrize("who", IDENTITIES)
async def test_every_verb_is_stopped_by_the_check_that_the_matrix_names(
    servers: tuple[dict[str, str], Pki], who: str
) -> None:
    urls, pki = servers
    token, name = IDENTITIES[who]
    headers = {"Authorization": f"Bearer {token}"} if token is not None else {}
    connector = aiohttp.TCPConnector(ssl=pki.client(pki.pair(name) if name is not None else None))
    async with aiohttp.ClientSession(headers=headers, connector=connector) as session:
        for where, place in PLACES.items():
            found, wanted = {}, {}
            for method, path in sorted(routes_of(place)):
                wanted[method, path] = stopped_by(place, place.roles[method, path], who)
                found[method, path] = await stop_at(session, method, urls[where] + path)
            assert found == wanted, where


async def stop_at(session: aiohttp.ClientSession, method: str, url: str) -> str:
    """What stops one call, whose body is wrong, so that one that may go on changes nothing."""
    for word, value in (("id", "host-a"), ("name", "none"), ("request_id", "r"), ("file", "main.js")):
        url = url.replace(f"{{{word}}}", value)
    assert not re.search(r"[{}]", url)
    try:
        async with session.request(method, url, data=None if method == "GET" else b"{}") as response:
            error = (await response.json())["detail"] if response.status in (401, 403) else ""
    except BROKEN:
        return "no connection without a certificate"
    if response.status == 401:
        return "token"
    if "certificate must have the common name host-a" in error:
        return "certificate of the host"
    if response.status == 403:
        return "role" if "needs the role" in error else error
    return MAY


def test_the_rows_are_those_of_the_openapi_documents() -> None:
    for place in PLACES.values():
        assert routes_of(place) == set(place.roles)


def test_no_host_guest_or_task_causes_anything_elsewhere() -> None:
    """The matrix in one sentence: beside what is open to all, only people and the manager get in anywhere."""
    for place in PLACES.values():
        for least in set(place.roles.values()) - {"nobody"}:
            for who in IDENTITIES.keys() - {*PEOPLE, "manager"}:
                assert stopped_by(place, least, who) != MAY


async def test_a_host_reports_of_itself_and_nothing_else(servers: tuple[dict[str, str], Pki]) -> None:
    """Its own column: the certificate and the token of host-b, at the path of host-b."""
    urls, pki = servers
    url = urls["manager, mutual TLS"]
    headers = {"Authorization": f"Bearer {IDENTITIES['host'][0]}"}
    connector = aiohttp.TCPConnector(ssl=pki.client(pki.pair("host-b")))
    async with aiohttp.ClientSession(headers=headers, connector=connector) as session:
        for method, path in sorted(routes_of(PLACES["manager, mutual TLS"])):
            least, path = MANAGER_ROUTES[method, path], path.replace("{id}", "host-b")
            stop = await stop_at(session, method, url + path)
            assert stop == (MAY if least in ("nobody", "agent") else "token"), (method, path)
