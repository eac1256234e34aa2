"""A service with pictures in memory that embeds the hook: under FastAPI, Flask, gunicorn or in plain threads.

`python -m tests.adapters.embedded FORM PLACE TOKEN_FILE HOLD` serves until standard input ends; gunicorn imports
`application`. While the file HOLD is there, work waits with a part of it done.
"""

from __future__ import annotations

import mmap
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any

from app_adapters.adapter import Adapter, Answer, Capabilities, Deadline, Promise, Refusal, Release, SizeRange
from app_adapters.processes.process import own_resident_mib

MIB = 1024 * 1024
PICTURES, KEPT = 60, 10


def picture() -> mmap.mmap:
    """Memory that goes back to the kernel at once when it is closed."""
    made = mmap.mmap(-1, MIB)
    made.write(os.urandom(MIB))
    return made


class Pictures(Adapter):
    """One picture a MiB; the newest 10 stay."""

    def __init__(self, hold: str) -> None:
        self.hold = hold
        self.pictures = [picture() for _ in range(PICTURES)]

    def capabilities(self) -> Capabilities:
        now_mib, count = own_resident_mib(), len(self.pictures)
        memory = SizeRange(now_mib, now_mib - count + KEPT, now_mib - count + PICTURES, 1)
        return Capabilities("pictures", "1", {"memory_mib": memory}, 0.5, True, ["ask"])

    def deflate(self, target: dict[str, float], mode: str, deadline: Deadline) -> Answer:
        now_mib, spare_mib = own_resident_mib(), len(self.pictures) - KEPT
        amount_mib = max(now_mib - target["memory_mib"], 0)
        if amount_mib > spare_mib + 5:
            return Refusal("the newest pictures stay", 5, {"memory_mib": now_mib - spare_mib})
        return Promise({"memory_mib": amount_mib}, 0.5, lambda: self.forget(round(amount_mib), deadline))

    def forget(self, count: int, deadline: Deadline) -> Release:
        before_mib = own_resident_mib()
        for number in range(min(count, len(self.pictures) - KEPT)):
            while number >= count / 2 and os.path.exists(self.hold) and not deadline.wait(0.01):
                pass
            if deadline.passed:
                break
            self.pictures.pop(0).close()
        freed_mib = max(before_mib - own_resident_mib(), 0)
        return Release({"memory_mib": freed_mib}, "VmRSS", f"{len(self.pictures)} pictures are left")

    def reinflate(self, target: dict[str, float], deadline: Deadline) -> Answer:
        return Promise({}, 0.5, self.load)

    def load(self) -> Release:
        self.pictures += [picture() for _ in range(PICTURES - len(self.pictures))]
        return Release({"memory_mib": 0}, "VmRSS", "all pictures are there")


def fastapi(adapter: Adapter, place: str, token_file: str) -> str:
    import uvicorn
    from fastapi import FastAPI

    from app_adapters.asgi import hook_application

    app = FastAPI()
    app.mount("/deflation", hook_application(adapter, token_file))
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True).start()
    return f"http://127.0.0.1:{listening.getsockname()[1]}"


def flask(adapter: Adapter, place: str, token_file: str) -> str:
    from flask import Flask
    from werkzeug.middleware.dispatcher import DispatcherMiddleware
    from werkzeug.serving import make_server

    from app_adapters.wsgi import hook_application

    app = Flask(__name__)
    app.wsgi_app = DispatcherMiddleware(app.wsgi_app, {"/deflation": hook_application(adapter, token_file)})  # type: ignore[method-assign]
    server = make_server("127.0.0.1", 0, app, threaded=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.port}"


def threads(adapter: Adapter, place: str, token_file: str) -> str:
    from app_adapters.server import HookServer

    return HookServer(adapter, place, token_file).start().url


def application(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
    hold = os.environ["HOLD"]
    if environ["PATH_INFO"] == "/hold":
        open(f"{os.path.dirname(hold)}/held", "w").close()
        while os.path.exists(hold):
            threading.Event().wait(0.02)
    start_response("200 OK", [("Content-Type", "text/plain")])
    return [f"{os.getpid()}\n".encode()]


if __name__ == "__main__":
    form, place, token_file, hold = sys.argv[1:]
    serve = {"fastapi": fastapi, "flask": flask, "threads": threads}[form]
    print(serve(Pictures(hold), place, token_file), flush=True)
    sys.stdin.read()
elif "HOOK" in os.environ:  # in a worker of gunicorn
    from app_adapters.shared import SharedHookServer

    SharedHookServer(Pictures(os.environ["HOLD"]), os.environ["HOOK"], os.environ["TOKEN_FILE"]).start()
