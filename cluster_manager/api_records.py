"""Routes of what happened: operations, core changes and what follows from them, events."""

from __future__ import annotations

from aiohttp import web

from cluster_manager.api_forms import LONGEST_WAIT_S, MANAGER, answer, answers, duration_of, limit_of, number, query_of
from cluster_manager.errors import RequestError
from cluster_manager.rows import StoredEvent

routes = web.RouteTableDef()


@routes.get("/v1/operations", allow_head=False)
async def operations(request: web.Request) -> web.Response:
    query = query_of(request, ("limit",))
    return answers("operations", await request.app[MANAGER].operations.newest(limit_of(query)))


@routes.get("/v1/operations/{id}", allow_head=False)
async def operation(request: web.Request) -> web.Response:
    query = query_of(request, ("wait_s",))
    wait_s = number(query, "wait_s", 0.0, 0.0, LONGEST_WAIT_S)
    found = await request.app[MANAGER].operations.operation(request.match_info["id"], wait_s)
    if found is None:
        raise RequestError(404, f"there is no operation {request.match_info['id']}", "id")
    return answer(found)


@routes.get("/v1/core-changes", allow_head=False)
async def core_changes(request: web.Request) -> web.Response:
    query = query_of(request, ("machine", "limit"))
    changes = await request.app[MANAGER].core_changes.newest(query.get("machine"), limit_of(query))
    return answers("core_changes", changes)


@routes.get("/v1/machines", allow_head=False)
async def machines(request: web.Request) -> web.Response:
    query = query_of(request, ("duration_s",))
    return answers("machines", await request.app[MANAGER].core_changes.ranking(duration_of(query)))


@routes.get("/v1/machines/{name}", allow_head=False)
async def machine(request: web.Request) -> web.Response:
    query, name = query_of(request, ("duration_s",)), request.match_info["name"]
    for ranked in await request.app[MANAGER].core_changes.ranking(duration_of(query)):
        if ranked.machine == name:
            return answer(ranked)
    raise RequestError(404, f"there is no running machine named {name}", "name")


@routes.get("/v1/events", allow_head=False)
async def events(request: web.Request) -> web.Response:
    query = query_of(request, ("limit",))
    rows = await request.app[MANAGER].store.events(limit_of(query))
    return web.json_response({"events": [_event(row) for row in rows]})


def _event(row: StoredEvent) -> dict[str, object]:
    return {"at": row.at, "vm": row.vm, "host": row.host, "kind": row.kind, "sentence": row.sentence}
