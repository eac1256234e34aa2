"""One form of logs for all daemons: key=value or JSON; under journald, and only there, with priorities."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import structlog

from ebbtide.rest.logs import configure_logs

SAYS = """
import structlog
from ebbtide.rest.logs import configure_logs
configure_logs({level!r}, {as_json}, {environ})
log = structlog.get_logger()
log.debug("a step", vm="web")
log.info("resized", vm="web", why="took 1 core;\\nthen none", count=2)
log.warning("slow")
try:
    1 / 0
except ZeroDivisionError:
    log.exception("a defect")
"""


def said(level: str = "info", as_json: bool = False, journal: bool = False) -> list[str]:
    """What a process says on a standard error of which JOURNAL_STREAM tells, or does not."""
    environ = "{'JOURNAL_STREAM': f'{os.fstat(2).st_dev}:{os.fstat(2).st_ino}'}" if journal else "{}"
    code = "import os" + SAYS.format(level=level, as_json=as_json, environ=environ)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == ""
    return done.stderr.splitlines()


def test_a_line_is_keys_and_values_with_time_level_and_event_first() -> None:
    resized, slow, defect = said()
    time, rest = resized.split(" ", 1)
    assert time.startswith("timestamp=2")
    assert time.endswith("Z")
    assert rest == 'level=info event=resized vm=web why="took 1 core;\\nthen none" count=2'
    assert slow.endswith("level=warning event=slow")
    assert 'level=error event="a defect" exception="Traceback' in defect
    assert len(said("debug")) == 4
    assert len(said("error")) == 1


def test_or_it_is_json() -> None:
    found = [json.loads(line) for line in said(as_json=True)]
    assert [line["event"] for line in found] == ["resized", "slow", "a defect"]
    assert found[0]["why"] == "took 1 core;\nthen none"
    assert all(line["timestamp"].endswith("Z") for line in found)


@pytest.mark.parametrize("as_json", [False, True])
def test_under_journald_each_line_begins_with_its_priority_and_has_no_time_of_its_own(as_json: bool) -> None:
    found = said("debug", as_json, journal=True)
    assert [line[:3] for line in found] == ["<7>", "<6>", "<4>", "<3>"]
    assert not any("timestamp" in line for line in found)


def test_a_journal_that_is_somebody_elses_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    """The variable is inherited; standard error may be a file by then."""
    configure_logs(environ={**os.environ, "JOURNAL_STREAM": "1:1"})
    try:
        structlog.get_logger().info("ready")
    finally:
        structlog.reset_defaults()
    assert capsys.readouterr().err.startswith("timestamp=")
