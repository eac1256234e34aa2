"""The hook as an ASGI application, for services that have a web server of their own: FastAPI, Starlette, Quart."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
from http import HTTPStatus
from io import FileIO
from typing import Any, Awaitable, Callable, MutableMapping
from urllib.parse import quote

from app_adapters.adapter import Adapter
from app_adapters.aio import AsyncHook
from app_adapters.async_adapter import AsyncAdapter
from app_adapters.hook import BODY_BYTES, SEVERAL, TOKEN_FILE, Reply, foreign, within
from app_adapters.logs import say
from app_adapters.processes.forks import released_in_children
from app_adapters.server import private

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

#: Why no request is answered where any user may stand in the way.
NAME_HELD = (
    "another process holds @{}: either it is another user's, which no directory that only this user can write "
    "(RuntimeDirectory= of systemd, XDG_RUNTIME_DIR) keeps out here, or " + SEVERAL
)


class HookApplication:
    """The hook; `hook_application` makes one. Requests that are not the guest agent's are 403, with the reason."""

    def __init__(self, adapter: Adapter | AsyncAdapter, token_file: str, log: Callable[[str], None]) -> None:
        self._made = adapter, token_file, log
        self._hook: AsyncHook | None = None
        self._claims: dict[str, socket.socket | FileIO] = {}
        released_in_children(self)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] == "lifespan":  # served by itself; mounted, it is told of neither end
            await receive()
            await send({"type": "lifespan.startup.complete"})
            await receive()
            await self.stop()
            await send({"type": "lifespan.shutdown.complete"})
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close"})
        else:
            status, reply = await self._reply(scope, receive)
            text = json.dumps(reply, allow_nan=False).encode("ascii")
            headers = [(b"content-type", b"application/json"), (b"content-length", str(len(text)).encode())]
            await send({"type": "http.response.start", "status": int(status), "headers": headers})
            await send({"type": "http.response.body", "body": text})

    async def stop(self) -> None:
        """Cancel what runs, and wait for it for some seconds."""
        self.release_in_child()
        if self._hook is not None:
            await self._hook.stop()

    def release_in_child(self) -> None:
        """Claim no address any more: in a child that was forked it is still its parent's."""
        for claim in self._claims.values():
            claim.close()
        self._claims.clear()

    async def _reply(self, scope: Scope, receive: Receive) -> Reply:
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        obstacle = foreign((scope.get("client") or ("",))[0], headers)
        if obstacle:
            return HTTPStatus.FORBIDDEN, {"error": obstacle}
        obstacle = self._claim(scope)
        if obstacle:
            return HTTPStatus.SERVICE_UNAVAILABLE, {"error": obstacle}
        if scope["method"] == "POST" and "content-length" not in headers:
            return HTTPStatus.LENGTH_REQUIRED, {"error": "Content-Length: must be a number"}
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
            if len(body) > BODY_BYTES:
                return HTTPStatus.REQUEST_ENTITY_TOO_LARGE, {"error": f"body: longer than {BODY_BYTES} bytes"}
        if self._hook is None:  # here: an AsyncAdapter runs on the loop that serves
            self._hook = AsyncHook(*self._made)
        raw = scope.get("raw_path")  # as the client sent it, behind `uvicorn --root-path`; servers need not tell
        path = raw.decode("latin-1") if raw else quote(scope["path"], safe="/")
        return await self._hook.reply(scope["method"], within(path), headers.get("authorization", ""), body)

    def _claim(self, scope: Scope) -> str:
        """Why this process may not answer at this address, empty where no other does. ASGI does not tell of several,
        so each claims the address, and the kernel takes that back with the process: by a lock, or, without a directory
        of the user's own, by an abstract socket, which any user can hold."""
        host, port = scope.get("server") or ("", "")
        name = f"ebbtide-hook:{host}:{port}"
        if name in self._claims:
            return ""
        directory = _own_directory(self._made[1])
        if not directory:
            claim = socket.socket(socket.AF_UNIX)
            try:
                claim.bind("\0" + name)
            except OSError:
                claim.close()
                return NAME_HELD.format(name)
            self._claims[name] = claim
            return ""
        with contextlib.ExitStack() as opened:
            try:
                lock = opened.enter_context(private(f"{directory}/{quote(name, safe='')}.lock"))
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return SEVERAL
            except OSError as error:
                return f"whether several processes answer here cannot be told: {error}"
            opened.pop_all()  # it stays open
        self._claims[name] = lock
        return ""


def _own_directory(token_file: str) -> str:
    """One that only this user can write, the same for all processes of a service; empty where there is none."""
    environ = os.environ
    given = environ.get("RUNTIME_DIRECTORY", "").split(":")[0], environ.get("XDG_RUNTIME_DIR", "")
    for path in (*given, os.path.dirname(token_file)):
        with contextlib.suppress(OSError):
            found = os.stat(path)
            if found.st_uid == os.geteuid() and not found.st_mode & 0o022:
                return path
    return ""


def hook_application(
    adapter: Adapter | AsyncAdapter, token_file: str = TOKEN_FILE, log: Callable[[str], None] = say
) -> HookApplication:
    """An ASGI application for the paths under /deflation/: `app.mount("/deflation", hook_application(adapter))`.

    `log` is given a sentence for every target. The service must listen on loopback too, and be served by one process: a
    target is known only where it was taken. One of several processes has `app_adapters.shared.SharedHookServer`.
    """
    return HookApplication(adapter, token_file, log)
