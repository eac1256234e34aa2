"""Reports whose answers cannot be written down: the manager has taken them all the same."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from structlog.testing import capture_logs

from hostagent.control import reporter
from hostagent.control.reporter import Reporter
from hostagent.state import journal as journals
from hostagent.state.files import replace
from hostagent.vm.host import Host
from tests.waiting import until


async def test_a_report_counts_as_taken_where_the_journal_has_no_room_for_its_answer(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a full disk would look like a manager that does not answer, and the history of its VMs would stop."""
    came: list[str] = []
    full = True

    def written(path: Path, text: str) -> None:
        if full:
            raise OSError(28, "No space left on device")
        replace(path, text)

    async def taken(request: web.Request) -> web.Response:
        came.append(request.path.rpartition("/")[2])
        return web.json_response({"epoch": 5, "acknowledged": 0})

    monkeypatch.setattr(reporter, "EVERY_S", 0.01)
    monkeypatch.setattr(journals, "_replace", written)
    app = web.Application()
    app.router.add_post("/v1/hosts/host-a/{what}", taken)
    async with TestServer(app) as server:
        with capture_logs() as logs:
            reporting = asyncio.create_task(Reporter(host, str(server.make_url("")), "token").run(), name="reporter")
            try:
                await until(lambda: came.count("report") > 2)
                assert (host.journal.epoch, host.reports.failed) == (0, 0)
                assert host.reports.taken > 1
                assert "usage" in came
                full = False
                await until(lambda: host.journal.epoch == 5)
            finally:
                reporting.cancel()
                await asyncio.gather(reporting, return_exceptions=True)
    said = [line for line in logs if "report" in line["event"]]
    assert [line["event"] for line in said] == ["what the manager answers to reports cannot be kept; we go on"]
    assert "the manager's epoch could not be written" in said[0]["why"]
