"""The hook as a WSGI callable (PEP 3333), for services that have a web server of their own: Flask, Django, wsgiref."""

from __future__ import annotations

import json
from http import HTTPStatus
from typing import Any, Callable, Dict, Iterable
from urllib.parse import quote

from app_adapters.adapter import Adapter
from app_adapters.hook import BODY_BYTES, SEVERAL, TOKEN_FILE, Hook, Reply, foreign, within
from app_adapters.logs import say

Environ = Dict[str, Any]


class HookApplication:
    """The hook; `hook_application` makes one. Requests that are not the guest agent's are 403, with the reason."""

    def __init__(self, hook: Hook) -> None:
        self._hook = hook

    def __call__(self, environ: Environ, start_response: Callable[..., Any]) -> Iterable[bytes]:
        """Answer one request."""
        status, reply = self._reply(environ)
        text = json.dumps(reply).encode("ascii")
        headers = [("Content-Type", "application/json"), ("Content-Length", str(len(text)))]
        start_response(f"{int(status)} {HTTPStatus(status).phrase}", headers)
        return [text]

    def stop(self) -> None:
        """Cancel what runs, and wait for it for some seconds."""
        self._hook.stop()

    def _reply(self, environ: Environ) -> Reply:
        names = (name[5:].replace("_", "-").lower() for name in environ if name.startswith("HTTP_"))
        obstacle = foreign(environ.get("REMOTE_ADDR", ""), names)
        if obstacle:
            return HTTPStatus.FORBIDDEN, {"error": obstacle}
        if environ.get("wsgi.multiprocess"):
            return HTTPStatus.SERVICE_UNAVAILABLE, {"error": SEVERAL}
        length = environ.get("CONTENT_LENGTH") or ("" if environ["REQUEST_METHOD"] == "POST" else "0")
        if "HTTP_TRANSFER_ENCODING" in environ or not (length.isascii() and length.isdigit()):
            return HTTPStatus.LENGTH_REQUIRED, {"error": "Content-Length: must be a number"}
        if len(length) > 20 or int(length) > BODY_BYTES:
            return HTTPStatus.REQUEST_ENTITY_TOO_LARGE, {"error": f"body: longer than {BODY_BYTES} bytes"}
        body = environ["wsgi.input"].read(int(length)) if int(length) else b""
        # Where it is mounted stands in SCRIPT_NAME; both parts come decoded, as bytes in Latin-1.
        path = environ.get("SCRIPT_NAME", "") + environ.get("PATH_INFO", "")
        path = within(quote(path.encode("latin-1", "replace"), safe="/"))
        return self._hook.reply(environ["REQUEST_METHOD"], path, environ.get("HTTP_AUTHORIZATION", ""), body)


def hook_application(
    adapter: Adapter, token_file: str = TOKEN_FILE, log: Callable[[str], None] = say
) -> HookApplication:
    """A WSGI callable for the paths under /deflation/; `log` is given a sentence for every target.

    The service must listen on loopback too, and be served by one process: a target is known only where it was taken.
    One of several processes has `app_adapters.shared.SharedHookServer`.
    """
    return HookApplication(Hook(adapter, token_file, log))
