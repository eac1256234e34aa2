"""The hook as a WSGI callable (PEP 3333), for services that have a web server of their own: Flask, Django, wsgiref."""

from __future__ import annotations

import ipaddress
import json
from http import HTTPStatus
from typing import Any, Callable, Dict, Iterable
from urllib.parse import quote

from app_adapters.adapter import Adapter
from app_adapters.hook import BODY_BYTES, Hook, Reply
from app_adapters.operations import silent

#: A proxy before the service hides who asks, so whatever one has touched is refused.
PROXY_HEADERS = ("HTTP_X_FORWARDED_FOR", "HTTP_FORWARDED", "HTTP_X_REAL_IP", "HTTP_VIA")

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
        obstacle = foreign(environ)
        if obstacle:
            return HTTPStatus.FORBIDDEN, {"error": obstacle}
        if environ.get("wsgi.multiprocess"):
            error = "several processes answer here and know nothing of each other's targets; serve the hook by one"
            return HTTPStatus.SERVICE_UNAVAILABLE, {"error": error}
        length = environ.get("CONTENT_LENGTH") or "0"
        if "HTTP_TRANSFER_ENCODING" in environ or not (length.isascii() and length.isdigit()):
            return HTTPStatus.LENGTH_REQUIRED, {"error": "Content-Length: must be a number"}
        if len(length) > 20 or int(length) > BODY_BYTES:
            return HTTPStatus.REQUEST_ENTITY_TOO_LARGE, {"error": f"body: longer than {BODY_BYTES} bytes"}
        body = environ["wsgi.input"].read(int(length)) if int(length) else b""
        # Where it is mounted stands in SCRIPT_NAME; both parts come decoded, as bytes in Latin-1.
        path = environ.get("SCRIPT_NAME", "") + environ.get("PATH_INFO", "")
        path = quote(path.encode("latin-1", "replace"), safe="/")
        return self._hook.reply(environ["REQUEST_METHOD"], path, environ.get("HTTP_AUTHORIZATION", ""), body)


def hook_application(
    adapter: Adapter, token_file: str = "/run/ebbtide/token", log: Callable[[str], None] = silent
) -> HookApplication:
    """A WSGI callable for the paths under /deflation/; `log` is given a sentence for every target.

    The service must listen on loopback too, and be served by one process: a target is known only where it was taken.
    """
    return HookApplication(Hook(adapter, token_file, log))


def foreign(environ: Environ) -> str:
    """Why this request does not come from this machine's guest agent; empty where it does."""
    for name in PROXY_HEADERS:
        if name in environ:
            return f"a proxy passed this on ({name[5:].replace('_', '-').title()}); the hook is for this machine only"
    peer = environ.get("REMOTE_ADDR", "")
    try:
        address = ipaddress.ip_address(peer)
    except ValueError:
        return "who asks cannot be seen (REMOTE_ADDR); the hook is for this machine only"
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    if not (mapped or address).is_loopback:
        return f"{peer} is not on loopback; the hook is for this machine only"
    return ""
