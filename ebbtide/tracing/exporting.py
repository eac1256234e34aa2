"""Switching on: spans go to an OpenTelemetry collector from here to the end of a block, if the options say so."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import threading
from collections.abc import AsyncIterator, Mapping
from typing import Final
from urllib.parse import urlsplit

import structlog

from ebbtide.extras import installing
from ebbtide.rest.errors import AccessError
from ebbtide.tracing.spans import record_to

log = structlog.get_logger()

#: How long the last spans may take to leave when a daemon ends, seconds.
FLUSH_S: Final = 2.0
_NEEDED: Final = ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http")
_PROTOCOLS: Final = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


def check_tracing(wanted: bool, environ: Mapping[str, str] = os.environ) -> None:
    """Whether spans can be sent, where they are to be. Imports nothing of OpenTelemetry's.

    :raises AccessError: the extra is not installed, or a variable asks for what it cannot do.
    """
    if not wanted:
        return
    if not all(_is_there(module) for module in _NEEDED):
        raise AccessError(f"--tracing needs the extra otel, which is not installed: {installing('otel')}")
    exporter = environ.get("OTEL_TRACES_EXPORTER", "") or "otlp"
    if exporter not in ("otlp", "none"):
        raise AccessError(f"OTEL_TRACES_EXPORTER must be otlp or none, but is {exporter[:80]!r}")
    for name in _PROTOCOLS:
        if (protocol := environ.get(name, "") or "http/protobuf") != "http/protobuf":
            raise AccessError(f"{name} must be http/protobuf, but is {protocol[:80]!r}")
    for name in _ENDPOINTS:
        if (url := environ.get(name, "")) and not _is_url(url):
            raise AccessError(f"{name} must be http:// or https:// with a host, but is {url[:80]!r}")


@contextlib.asynccontextmanager
async def exporting(wanted: bool, service: str, **resource: str) -> AsyncIterator[None]:
    """Record spans while the block runs, and send them beside it. Off, nothing is imported.

    :param service: the daemon's name as a service, where ``OTEL_SERVICE_NAME`` does not say another one.
    :param resource: more of what is said of the daemon, without prefix.
    :raises AccessError: spans cannot be sent.
    """
    check_tracing(wanted)
    if not wanted or not _allowed(os.environ):
        yield
        return
    from ebbtide.tracing.otlp import OtlpRecorder

    try:
        recorder = OtlpRecorder(service, resource)
    except ValueError as error:
        raise AccessError(f"--tracing cannot be: a variable of OpenTelemetry's is wrong: {error}") from error
    log.info("spans are sent", to=recorder.endpoint)
    record_to(recorder)
    try:
        yield
    finally:
        record_to(None)
        # A thread of its own, which nothing waits for at the end of the process: a collector may never answer.
        flush = threading.Thread(target=recorder.close, name="last spans", daemon=True)
        flush.start()
        await asyncio.to_thread(flush.join, FLUSH_S)
        if flush.is_alive():
            log.warning("the last spans were not sent", why=f"the collector took more than {FLUSH_S:g} s")


def _allowed(environ: Mapping[str, str]) -> bool:
    disabled = environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    return not disabled and environ.get("OTEL_TRACES_EXPORTER", "") != "none"


def _is_url(text: str) -> bool:
    try:
        url = urlsplit(text)
        return url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
    except ValueError:
        return False


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False
