"""Recorder that sends spans by OTLP/HTTP in a thread of its own; the only module that imports OpenTelemetry."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from typing import Final
from urllib.parse import urlsplit

import requests
import structlog
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import Decision, Sampler
from opentelemetry.trace import NonRecordingSpan, SpanKind, Status, StatusCode, TraceFlags

from ebbtide.rest.tls import is_loopback
from ebbtide.tracing.context import TraceContext
from ebbtide.tracing.spans import MOST_TEXT, PREFIX, Ended

log = structlog.get_logger()

GUEST_SERVICE: Final = "ebb-guestagent"
#: A collector that cannot be reached is complained of so often, seconds.
COMPLAINT_S: Final = 60.0


class _Given(IdGenerator):
    """Ids that are known beforehand: a span may be another's parent before it is recorded."""

    trace_id = span_id = 0

    def generate_trace_id(self) -> int:
        return self.trace_id

    def generate_span_id(self) -> int:
        return self.span_id


class _Complaints(logging.Handler):
    """The library's warnings as lines of our log; once spans are sent, when they come again and again, one a minute."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.sending = False
        self._next_at = 0.0

    def emit(self, record: logging.LogRecord) -> None:
        if not self.sending:
            # Of its variables, which it may well do without.
            log.warning("OpenTelemetry says", why=record.getMessage()[:300])
        elif (now := time.monotonic()) >= self._next_at:
            self._next_at = now + COMPLAINT_S
            log.warning("spans are not sent", why=record.getMessage()[:300])


class OtlpRecorder:
    """Spans wait in a bounded queue (``OTEL_BSP_MAX_QUEUE_SIZE``), of which the oldest are dropped.

    Where to send them, how many at a time and what is sampled is as OpenTelemetry's environment variables say.

    :raises ValueError: one of them cannot be.
    """

    def __init__(self, service: str, resource: Mapping[str, str]) -> None:
        self._complaints = _Complaints()
        self._library = logging.getLogger("opentelemetry")
        self._library.addHandler(self._complaints)
        self._library.propagate = False
        self._exporter = OTLPSpanExporter()
        if is_loopback(urlsplit(self.endpoint).hostname or ""):
            # What the environment says of proxies is for other machines.
            session = requests.Session()
            session.trust_env = False
            self._exporter = OTLPSpanExporter(session=session)
        self._processor = BatchSpanProcessor(self._exporter)
        self._ids = _Given()
        #: As the environment says.
        self._sampler: Sampler | None = None
        described = {SERVICE_VERSION: version("ebbtide")} | {PREFIX + name: value for name, value in resource.items()}
        own = Resource.create({SERVICE_NAME: service} | described)
        # What the environment says of this service wins over what we do. A guest is another one.
        self._own = self._tracer(own.merge(OTELResourceDetector().detect()))
        self._guests = self._tracer(Resource.create({SERVICE_NAME: GUEST_SERVICE} | described))
        self._complaints.sending = True

    @property
    def endpoint(self) -> str:
        """Where spans are sent, without what may be secret in it."""
        url = urlsplit(str(getattr(self._exporter, "_endpoint", "")))
        return f"{url.scheme}://{url.hostname}" + (f":{url.port}" if url.port else "")

    def samples(self, context: TraceContext, name: str) -> bool:
        """As ``OTEL_TRACES_SAMPLER`` says of the first span of a trace."""
        assert self._sampler is not None, "made with the first tracer"
        with self._complaining():
            decision = self._sampler.should_sample(None, context.trace_id, name).decision
            return decision is Decision.RECORD_AND_SAMPLE
        return False

    def record(self, span: Ended) -> None:
        """Queue a span; never waits."""
        tracer = self._guests if span.in_guest else self._own
        self._ids.trace_id, self._ids.span_id = span.context.trace_id, span.context.span_id
        with self._complaining():
            made = tracer.start_span(
                span.name,
                _above(span.parent),
                SpanKind[span.kind.name],
                dict(span.attributes),
                start_time=span.began_ns,
            )
            if span.failure:
                made.set_status(Status(StatusCode.ERROR, span.failure[:MOST_TEXT]))
            made.end(max(span.ended_ns, span.began_ns))

    @contextlib.contextmanager
    def _complaining(self) -> Iterator[None]:
        """What the library, or a sampler of somebody's, raises ends nothing that is traced."""
        try:
            yield
        except Exception as error:
            self._library.warning("%s: %s", type(error).__name__, error)

    def close(self) -> None:
        """Send what waits; what cannot be sent is dropped."""
        self._processor.shutdown()  # type: ignore[no-untyped-call]
        self._library.removeHandler(self._complaints)

    def _tracer(self, named: Resource) -> trace.Tracer:
        provider = TracerProvider(self._sampler, named, shutdown_on_exit=False, id_generator=self._ids)
        provider.add_span_processor(self._processor)
        self._sampler = provider.sampler
        return provider.get_tracer("ebbtide", version("ebbtide"))


def _above(parent: TraceContext | None) -> Context:
    """The context of OpenTelemetry's in which a span stands."""
    if parent is None:
        return trace.set_span_in_context(trace.INVALID_SPAN)
    flags = TraceFlags(TraceFlags.SAMPLED if parent.sampled else TraceFlags.DEFAULT)
    above = trace.SpanContext(parent.trace_id, parent.span_id, is_remote=False, trace_flags=flags)
    return trace.set_span_in_context(NonRecordingSpan(above))
