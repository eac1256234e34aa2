"""Times of Spark's stages, where the clock of its driver is another one than the service's."""

from __future__ import annotations

import http.server
import json
import threading
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import pytest

from app_adapters.spark.rest import Application, Cluster, SparkRest


@pytest.mark.parametrize("ahead_s", [0.0, 3600.0, -3600.0])
def test_how_long_a_stage_has_run_goes_by_the_clock_of_its_driver(ahead_s: float) -> None:
    began, now = (datetime.fromtimestamp(1.7e9 + ahead_s + s, UTC) for s in (0.0, 100.0))

    def stage(number: int, status: str, tasks: int, read: int, **times: str) -> dict[str, Any]:
        return {
            **{"stageId": number, "status": status, "numTasks": tasks, "numCompleteTasks": 0},
            **{"submissionTime": began.strftime("%Y-%m-%dT%H:%M:%S.000GMT"), "shuffleReadBytes": read, **times},
        }

    ended = (began + timedelta(seconds=100)).strftime("%Y-%m-%dT%H:%M:%S.000GMT")
    rows = [stage(0, "COMPLETE", 8, 0, completionTime=ended), stage(1, "ACTIVE", 4, 1 << 20)]
    answers = {
        "/api/v1/applications": [{"id": "app-1"}],
        "/api/v1/applications/app-1/stages": rows,
        "/api/v1/applications/app-1/environment": {"sparkProperties": []},
    }

    class Driver(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(answers[self.path]).encode())

        def date_time_string(self, timestamp: float | None = None) -> str:
            return format_datetime(now, usegmt=True)

        def log_message(self, format: str, *args: object) -> None:
            """Quiet."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Driver)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        rest = SparkRest("http://127.0.0.1:1", (f"http://127.0.0.1:{server.server_port}",), timeout_s=5.0)
        (job,) = rest.jobs(Cluster((), (Application("app-1", "k-means", 4),)))
    finally:
        server.shutdown()
        server.server_close()
    assert job.recomputed == 0.5
    assert job.waves == 1.5
