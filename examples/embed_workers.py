"""A service of several processes embeds one hook: the marked lines are all it takes. Each process has its own buffer.

Run it: gunicorn --workers 2 --bind 127.0.0.1:8000 embed_workers:application
With --preload, or where a process forks later, start the hook after the fork (gunicorn: post_worker_init).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

from embed_hook import Buffer

from app_adapters.hook import TOKEN_FILE

# embedding: begin
from app_adapters.shared import SharedHookServer

buffer = Buffer(32)
path = os.environ.get("HOOK", "/run/ebbtide/hooks/buffer.sock")
hook = SharedHookServer(buffer, path, os.environ.get("TOKEN_FILE", TOKEN_FILE)).start()
# embedding: end


def application(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
    """What the service is for."""
    start_response("200 OK", [("Content-Type", "text/plain")])
    return [f"{buffer.size_mib():g} MiB in process {os.getpid()}\n".encode()]
