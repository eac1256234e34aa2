"""One form for every error of a REST server: its status, and a Problem as its body."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping
from typing import Final

import structlog
from aiohttp import hdrs, web
from aiohttp.typedefs import Handler, Middleware
from pydantic import BaseModel

from ebbtide.deflation.errors import InvalidField
from ebbtide.messages.common import REQUEST_ID_PATTERN, EarlierProblem, Problem, problem_of
from ebbtide.messages.problem_codes import ProblemCode
from ebbtide.rest.access import PRINCIPAL, RATE_LIMIT
from ebbtide.rest.descriptions import JSON, PROBLEM_JSON
from ebbtide.rest.errors import Refused
from ebbtide.rest.roles import Role

log = structlog.get_logger()

REQUEST_ID: Final = "X-Request-Id"
_REQUEST_ID: Final = web.RequestKey("request_id", str)
#: What other daemons of a cluster call as.
_DAEMONS: Final = (Role.MANAGER, Role.AGENT)

#: The answer to one of a daemon's own errors, see `answer_problem`; None for an error that it does not know.
Known = Callable[[web.Request, Exception], web.Response | None]


def problem_middleware(daemon: str, known: Known) -> Middleware:
    """Answers every error with a Problem; the outermost middleware.

    :param daemon: its name in the sentence for a defect.
    :param known: the daemon's own errors.
    """

    @web.middleware
    async def problems(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except Refused as error:
            return answer_problem(request, error.problem, error.headers)
        except web.HTTPException as error:
            if error.status < 400:
                raise
            say = _SENTENCES.get(error.status)
            sentence = say(request) if say is not None else error.reason
            headers = {str(hdrs.ALLOW): error.headers[hdrs.ALLOW]} if hdrs.ALLOW in error.headers else {}
            code = ProblemCode.NO_SUCH_ROUTE if error.status == 404 else None
            return answer_problem(request, Problem.of(error.status, sentence, None, code), headers)
        except Exception as error:
            if (answer := known(request, error)) is not None:
                return answer
            if isinstance(error, InvalidField):
                return answer_problem(request, problem_of(error))
            path = request.rel_url.raw_path
            log.exception(f"request failed by a defect of the {daemon}", method=request.method, path=path)
            return answer_problem(request, Problem.of(500, f"the {daemon} failed; its log says more"))

    return problems


_SENTENCES: Mapping[int, Callable[[web.Request], str]] = {
    404: lambda request: f"there is nothing at {request.path}",
    405: lambda request: f"{request.path} does not take {request.method}",
    413: lambda request: f"the body is larger than {request.client_max_size} bytes",
}


def answer_problem(request: web.Request, problem: Problem, headers: Mapping[str, str] | None = None) -> web.Response:
    """A Problem as an answer; after 408 the connection is closed, since the rest of the body may still come,
    and where the headers say so.
    """
    told: BaseModel = problem.model_copy(update={"instance": f"urn:ebbtide:request:{request_id_of(request)}"})
    kind = PROBLEM_JSON
    caller = request.get(PRINCIPAL)
    if caller is not None and caller.role in _DAEMONS and PROBLEM_JSON not in request.headers.get(hdrs.ACCEPT, ""):
        # One of version 0.1, which reads nothing else, and of several fields the first.
        first = problem.errors[0].detail if problem.errors else problem.detail
        told, kind = EarlierProblem(error=first, field=problem.field), JSON
    response = web.Response(text=told.model_dump_json(), status=problem.status, headers=headers, content_type=kind)
    if problem.status == 408 or hdrs.CONNECTION in response.headers:
        response.force_close()
    return response


def request_id_of(request: web.Request) -> str:
    """What a request is called in logs and answers: its X-Request-Id, or one that is made here."""
    if (known := request.get(_REQUEST_ID)) is None:
        given = request.headers.get(REQUEST_ID, "")
        known = request[_REQUEST_ID] = (
            given if re.fullmatch(REQUEST_ID_PATTERN, given) else f"{random.getrandbits(128):032x}"
        )
    return known


async def put_headers(request: web.Request, response: web.StreamResponse) -> None:
    """What every answer says of its request: its id, and what its caller has left; for ``on_response_prepare``."""
    response.headers[REQUEST_ID] = request_id_of(request)
    response.headers.update(request.get(RATE_LIMIT, {}))
