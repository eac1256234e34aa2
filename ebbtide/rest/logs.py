"""Logs of the daemons, in one form: key=value or JSON on standard error; under journald each line has its priority."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Mapping
from typing import Any, Final, TextIO, cast

import structlog

#: As syslog counts them (sd-daemon(3)).
PRIORITIES: Final = {"critical": 2, "error": 3, "warning": 4, "info": 6, "debug": 7}


class _Log:
    """Standard error, as far as it takes something: a full disk under the log is no reason to stop working."""

    def write(self, text: str) -> None:
        with contextlib.suppress(OSError):
            sys.stderr.write(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            sys.stderr.flush()


def configure_logs(level: str = "info", as_json: bool = False, environ: Mapping[str, str] = os.environ) -> None:
    """From now on; may be called again.

    :param level: the least that is logged: debug, info, warning or error.
    :param environ: ``JOURNAL_STREAM``, by which journald's standard error is known.
    """
    renderer: Any = structlog.processors.JSONRenderer(default=str)
    if not as_json:
        renderer = structlog.processors.LogfmtRenderer(key_order=["timestamp", "level", "event"], drop_missing=True)
    journal = to_journal(environ)
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            # The journal has its own.
            *([] if journal else [structlog.processors.TimeStamper(fmt="iso", utc=True)]),
            structlog.processors.format_exc_info,
            _with_priority(renderer) if journal else renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelName(level.upper())),
        logger_factory=structlog.PrintLoggerFactory(cast(TextIO, _Log())),
    )


def to_journal(environ: Mapping[str, str]) -> bool:
    """Whether standard error is the journal's: the environment alone is inherited by whom it is not meant for."""
    try:
        found = os.fstat(2)
    except OSError:
        return False
    return environ.get("JOURNAL_STREAM") == f"{found.st_dev}:{found.st_ino}"


def _with_priority(renderer: Any) -> Any:
    def render(logger: Any, method: str, event: dict[str, Any]) -> str:
        priority = PRIORITIES.get(str(event.get("level")), PRIORITIES["info"])
        return f"<{priority}>{renderer(logger, method, event)}"

    return render
