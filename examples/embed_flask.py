"""A Flask service embeds the hook beside its own routes: the marked lines are all it takes.

Run it: python3 embed_flask.py 0 /run/ebbtide/token
"""

from __future__ import annotations

import sys
import threading

from embed_hook import Buffer
from flask import Flask
from werkzeug.middleware.dispatcher import DispatcherMiddleware
from werkzeug.serving import make_server

from app_adapters.hook import TOKEN_FILE, default_port
from app_adapters.wsgi import hook_application

app = Flask(__name__)
buffer = Buffer(32)


@app.route("/")
def size() -> str:
    """What the service is for."""
    return f"{buffer.size_mib():g} MiB\n"


def main(port: int = default_port("flask"), token_file: str = TOKEN_FILE) -> None:
    """Serve until standard input ends."""
    # embedding: begin
    hook = hook_application(buffer, token_file)
    app.wsgi_app = DispatcherMiddleware(app.wsgi_app, {"/deflation": hook})  # type: ignore[method-assign]
    # embedding: end
    server = make_server("127.0.0.1", port, app, threaded=True)
    print(f"hook on 127.0.0.1:{server.port}", flush=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    sys.stdin.read()
    server.shutdown()
    hook.stop()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
