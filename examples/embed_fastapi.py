"""A FastAPI service embeds the hook beside its own routes, Starlette the same: the marked lines are all it takes.

Run it: python3 embed_fastapi.py 0 /run/ebbtide/token
"""

from __future__ import annotations

import socket
import sys
import threading

import uvicorn
from embed_hook import Buffer
from fastapi import FastAPI
from fastapi.responses import PlainTextResponse

from app_adapters.asgi import hook_application
from app_adapters.hook import TOKEN_FILE, default_port

app = FastAPI()
buffer = Buffer(32)


@app.get("/", response_class=PlainTextResponse)
def size() -> str:
    """What the service is for."""
    return f"{buffer.size_mib():g} MiB\n"


def main(port: int = default_port("fastapi"), token_file: str = TOKEN_FILE) -> None:
    """Serve until standard input ends."""
    # embedding: begin
    app.mount("/deflation", hook_application(buffer, token_file))
    # embedding: end
    listening = socket.create_server(("127.0.0.1", port))
    print(f"hook on 127.0.0.1:{listening.getsockname()[1]}", flush=True)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    serving = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    serving.start()
    sys.stdin.read()
    server.should_exit = True
    serving.join()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
