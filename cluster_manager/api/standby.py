"""Answers of a manager that does not lead, or whose store fails."""

from __future__ import annotations

from typing import Final

import structlog
from aiohttp import hdrs, web
from aiohttp.typedefs import Handler

from cluster_manager.api.forms import MANAGER
from cluster_manager.errors import DISK_FULL, LostLeadership, StoreError
from cluster_manager.manager import Manager
from ebbtide.messages.common import Problem
from ebbtide.messages.problem_codes import ProblemCode
from ebbtide.rest.metrics.sheet import PATH
from ebbtide.rest.problems import answer_problem
from ebbtide.rest.roles import OPEN_ROUTES

log = structlog.get_logger()

#: When a client may ask again, seconds: a take-over takes a few of them.
RETRY_AFTER_S: Final = 1
REPORT: Final = "/v1/hosts/{id}/report"
#: What a manager answers whoever leads. Who may join only the leader knows.
ANYWHERE: Final = OPEN_ROUTES - {"/v1/enrolments"} | {PATH}


@web.middleware
async def leader_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """A standby knows nothing for sure: it answers only for its health, and says who leads."""
    resource = request.match_info.route.resource
    if resource is None or resource.canonical in ANYWHERE or request.app[MANAGER].leadership.leads():
        return await handler(request)
    if resource.canonical == REPORT:
        request.app[MANAGER].refuse_report(request.match_info["id"])
    return _refusal(request)


def store_problem(request: web.Request, error: StoreError) -> web.Response:
    """A request that the store failed: the same request again, with its request id, is harmless."""
    if not isinstance(error, LostLeadership):
        log.error("request failed by the store", method=request.method, path=request.rel_url.raw_path, why=str(error))
    elif not request.app[MANAGER].leadership.leads():
        return _refusal(request)
    said = str(error) if str(error) == DISK_FULL else "the store does not answer"
    return unavailable(request, f"{said}; send the same request again")


def unavailable(request: web.Request, sentence: str, code: ProblemCode | None = None) -> web.Response:
    """503 for a while. A standby ends the connection: a name may lead to another manager by now."""
    headers: dict[str, str] = {hdrs.RETRY_AFTER: str(RETRY_AFTER_S)}
    if code is ProblemCode.STANDBY:
        headers[hdrs.CONNECTION] = "close"
    return answer_problem(request, Problem.of(503, sentence, None, code), headers)


def not_leading(manager: Manager) -> str:
    """Why a manager does not answer; for strangers, too, so without names of files and servers."""
    why = manager.leadership.why
    return f"this manager does not lead: {why}" if why == DISK_FULL else "this manager is a standby"


def _refusal(request: web.Request) -> web.Response:
    manager = request.app[MANAGER]
    if manager.leadership.why == DISK_FULL:
        return unavailable(request, not_leading(manager), ProblemCode.STANDBY)
    leader = manager.leadership.leader
    where = f"the manager at {leader} leads" if leader is not None else "it is not known which manager leads"
    return unavailable(request, f"this manager is a standby; {where}", ProblemCode.STANDBY)
