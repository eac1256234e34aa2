"""Results of operations, waited for without keeping a core busy beside the server that is measured."""

from __future__ import annotations

import time
from typing import Any
from urllib.parse import quote

from tests.adapters.rest import Rest


def result(rest: Rest, request_id: str, limit_s: float = 120) -> dict[str, Any]:
    """What became of an operation."""
    end = time.monotonic() + limit_s
    while True:
        status, body = rest.send("GET", f"/deflation/v1/targets/{quote(request_id, safe='')}")
        assert status == 200, body
        if body["state"] != "running":
            return body
        assert time.monotonic() < end, body
        time.sleep(0.02)
