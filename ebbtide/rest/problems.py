"""One form for every error of a REST server: its status, and a Problem as its body."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import structlog
from aiohttp import hdrs, web
from aiohttp.typedefs import Handler, Middleware

from ebbtide.deflation.errors import InvalidField
from ebbtide.messages.common import Problem, problem_of
from ebbtide.rest.errors import Refused

log = structlog.get_logger()

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
            return answer_problem(error.problem, error.status, error.headers)
        except web.HTTPException as error:
            if error.status < 400:
                raise
            say = _SENTENCES.get(error.status)
            sentence = say(request) if say is not None else error.reason
            headers = {str(hdrs.ALLOW): error.headers[hdrs.ALLOW]} if hdrs.ALLOW in error.headers else {}
            return answer_problem(Problem(error=sentence, field=None), error.status, headers)
        except Exception as error:
            if (answer := known(request, error)) is not None:
                return answer
            if isinstance(error, InvalidField):
                return answer_problem(problem_of(error), 400)
            path = request.rel_url.raw_path
            log.exception(f"request failed by a defect of the {daemon}", method=request.method, path=path)
            return answer_problem(Problem(error=f"the {daemon} failed; its log says more", field=None), 500)

    return problems


_SENTENCES: Mapping[int, Callable[[web.Request], str]] = {
    404: lambda request: f"there is nothing at {request.path}",
    405: lambda request: f"{request.path} does not take {request.method}",
    413: lambda request: f"the body is larger than {request.client_max_size} bytes",
}


def answer_problem(problem: Problem, status: int, headers: Mapping[str, str] | None = None) -> web.Response:
    """A Problem as an answer; after 408 the connection is closed, since the rest of the body may still come."""
    text = problem.model_dump_json()
    response = web.Response(text=text, status=status, headers=headers, content_type="application/json")
    if status == 408:
        response.force_close()
    return response
