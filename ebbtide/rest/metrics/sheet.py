"""Declarations of metrics, and a sheet of their values at one moment, which is written as Prometheus reads it.

What was not declared cannot be written, so that the reference, the dashboards and the rules can be held against the
declarations. prometheus_client is imported when a sheet is written first: a daemon that nobody looks at does without.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from typing import TYPE_CHECKING, Final, Literal

from aiohttp import hdrs, web

from ebbtide.deflation.resources import ResourceVector
from ebbtide.rest.descriptions import Answer
from ebbtide.rest.metrics.stalls import LoopWatch
from ebbtide.rest.metrics.totals import Distribution

if TYPE_CHECKING:
    from prometheus_client.core import Metric as Family

#: Bytes.
MIB: Final = 2**20
#: What Prometheus 2 and 3 read, whatever else they ask for.
CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
#: The path of a daemon's own metrics.
PATH: Final = "/metrics"
ANSWER: Final = Answer(None, "Metrics in Prometheus' text format.", "text/plain")

Kind = Literal["gauge", "counter", "histogram"]
Values = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric.

    :param name: as it is asked for; a counter's ends in ``_total``.
    :param labels: each of them is in the list of its daemon's labels, which says how many values it can have.
    """

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Amounts:
    """A vector of resources as metrics, in base units."""

    cpu: Metric
    memory: Metric
    disk: Metric
    network: Metric

    def __iter__(self) -> Iterator[Metric]:
        return iter((self.cpu, self.memory, self.disk, self.network))


def amounts(name: str, help: str, labels: tuple[str, ...] = (), kind: Kind = "gauge") -> Amounts:
    """Declare a vector.

    :param name: without the unit.
    """
    end = "_total" if kind == "counter" else ""
    return Amounts(
        Metric(f"{name}_cpu_cores{end}", kind, f"{help}: CPU, in cores.", labels),
        Metric(f"{name}_memory_bytes{end}", kind, f"{help}: memory.", labels),
        Metric(f"{name}_disk_bytes_per_second{end}", kind, f"{help}: bandwidth of disks, where declared.", labels),
        Metric(f"{name}_network_bytes_per_second{end}", kind, f"{help}: bandwidth, where declared.", labels),
    )


def gauge(name: str, help: str, *labels: str) -> Metric:
    """Declare a value that goes up and down."""
    return Metric(f"ebbtide_{name}", "gauge", help, labels)


def counter(name: str, help: str, *labels: str) -> Metric:
    """Declare a total."""
    return Metric(f"ebbtide_{name}_total", "counter", help, labels)


def declared_in(*groups: type) -> Iterator[Metric]:
    """All metrics that stand in these classes, in their order."""
    for group in groups:
        for one in vars(group).values():
            if isinstance(one, Metric):
                yield one
            elif isinstance(one, Amounts):
                yield from one


#: Of the event loop of either daemon.
LOOP_LAG: Final = Metric(
    "ebbtide_loop_lag_seconds", "histogram", "How late the daemon's event loop came to what was due, every two seconds."
)
LOOP_STALLS: Final = Metric(
    "ebbtide_loop_stalls_total", "counter", "How often the event loop was late by more than a tenth of a second."
)
BUILD: Final = Metric("ebbtide_build_info", "gauge", "1; the version of the daemon.", ("version",))
COMMON: Final = (BUILD, LOOP_LAG, LOOP_STALLS)


class Sheet:
    """Values of metrics at one moment.

    :param declared: all that may be written, in the order in which they are.
    """

    def __init__(self, declared: Iterable[Metric]) -> None:
        self._rows: dict[Metric, list[tuple[Values, float | tuple[list[tuple[str, float]], float]]]]
        self._rows = {metric: [] for metric in (*COMMON, *declared)}

    def put(self, metric: Metric, value: float | None, *labels: str) -> None:
        """Write a value down; None, which is unknown and not zero, leaves no trace."""
        if value is not None:
            self._rows[metric].append((labels, float(value)))

    def put_spread(self, metric: Metric, found: Distribution, *labels: str) -> None:
        """Write a histogram down, as it is now."""
        self._rows[metric].append((labels, (found.buckets(), found.total)))

    def put_amounts(self, metrics: Amounts, found: ResourceVector, declared: ResourceVector, *labels: str) -> None:
        """Write a vector down.

        :param declared: a 0 of disk or network of which this has nothing is no figure, and is left out.
        """
        self.put(metrics.cpu, found.cpu_cores, *labels)
        self.put(metrics.memory, found.memory_mib * MIB, *labels)
        if declared.disk_mib_s or found.disk_mib_s:
            self.put(metrics.disk, found.disk_mib_s * MIB, *labels)
        if declared.network_mib_s or found.network_mib_s:
            self.put(metrics.network, found.network_mib_s * MIB, *labels)

    def put_common(self, watch: LoopWatch) -> None:
        """Write down what both daemons have."""
        self.put(BUILD, 1.0, _version())
        self.put_spread(LOOP_LAG, watch.lag)
        self.put(LOOP_STALLS, watch.stalls)

    def values(self) -> Mapping[str, Mapping[Values, float]]:
        """Gauges and counters by name and labels."""
        return {
            metric.name: {labels: value for labels, value in rows if isinstance(value, float)}
            for metric, rows in self._rows.items()
        }

    def text(self) -> bytes:
        """In Prometheus' format, with what the process itself takes. Reads /proc: not for the event loop's thread."""
        from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest

        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        ProcessCollector(registry=registry)
        return generate_latest(registry)

    def collect(self) -> Iterator[Family]:
        """The families, for prometheus_client's registry."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        for metric, rows in self._rows.items():
            if not rows:
                continue
            if metric.kind == "histogram":
                spread = HistogramMetricFamily(metric.name, metric.help, labels=metric.labels)
                for labels, value in rows:
                    if isinstance(value, tuple):
                        spread.add_metric(labels, value[0], value[1])
                yield spread
                continue
            kind = GaugeMetricFamily if metric.kind == "gauge" else CounterMetricFamily
            family: GaugeMetricFamily | CounterMetricFamily = kind(metric.name, metric.help, labels=metric.labels)
            for labels, value in rows:
                if isinstance(value, float):
                    family.add_metric(labels, value)
            yield family


@cache
def _version() -> str:
    """Read from the package\'s files, which takes longer than all the rest."""
    return version("ebbtide")


def answer(text: bytes) -> web.Response:
    """Metrics as an answer."""
    return web.Response(body=text, headers={hdrs.CONTENT_TYPE: CONTENT_TYPE})
