"""Spark's REST interfaces: the master's /json/ and the drivers' /api/v1. Every answer is bounded and checked."""

from __future__ import annotations

import email.utils
import json
import time
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass, field
from typing import Any, Sequence

from app_adapters.errors import ApplicationError
from app_adapters.spark import progress
from app_adapters.spark.policy import Job

ANSWER_BYTES = 16 * 1024 * 1024  # 1000 stages (spark.ui.retainedStages) are about 3 MiB
TIMEOUT_S = 1.0
#: What the application may say about itself, in its own Spark configuration: the number of stages it will have had.
EXPECTED_STAGES = "spark.ebbtide.stages"
#: With these on, what an executor holds moves before it ends, and is not computed again.
MOVES = (
    "spark.decommission.enabled",
    "spark.storage.decommission.enabled",
    "spark.storage.decommission.rddBlocks.enabled",
    "spark.storage.decommission.shuffleBlocks.enabled",
)
# No proxy of the environment: these are machines of the cluster.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass(frozen=True)
class Worker:
    """A worker as the master sees it. `state`: ALIVE, DECOMMISSIONED, DEAD or UNKNOWN."""

    id: str
    host: str
    state: str
    cores: int


@dataclass(frozen=True)
class Application:
    """A running application as the master sees it; `cores` are those that it holds."""

    id: str
    name: str
    cores: int


@dataclass(frozen=True)
class Cluster:
    """What the master knows."""

    workers: tuple[Worker, ...]
    applications: tuple[Application, ...]

    def hosts(self) -> dict[str, int]:
        """Cores of each host that has a worker which takes tasks."""
        cores: dict[str, int] = {}
        for worker in self.workers:
            if worker.state == "ALIVE":
                cores[worker.host] = cores.get(worker.host, 0) + worker.cores
        return cores


@dataclass
class SparkRest:
    """Client of one master and of the drivers whose addresses are known. URLs are like http://HOST:PORT."""

    master_ui: str
    drivers: Sequence[str] = ("http://127.0.0.1:4040",)
    timeout_s: float = TIMEOUT_S
    _applications: dict[str, str] = field(default_factory=dict)  # driver by application, as last found
    _said_at: dict[str, float] = field(default_factory=dict)  # by address: when it answered last, by its own clock

    def cluster(self) -> Cluster:
        """Workers and running applications. Raises: ApplicationError."""
        body = self._get(self.master_ui, "/json/")
        if not isinstance(body, dict):
            raise ApplicationError("the master answered without an object")
        workers = tuple(
            Worker(_text(row, "id"), _text(row, "host"), _text(row, "state"), _count(row, "cores"))
            for row in _rows(body, "workers")
        )
        applications = tuple(
            Application(_text(row, "id"), _text(row, "name"), _count(row, "cores")) for row in _rows(body, "activeapps")
        )
        return Cluster(workers, applications)

    def jobs(self, cluster: Cluster) -> list[Job]:
        """Progress and recomputation of every running application; one without cores has nothing to lose.

        By the clock of its driver, which is that of its stages.

        Raises: ApplicationError where the driver of one cannot be asked.
        """
        found = []
        for application in cluster.applications:
            if application.cores == 0:
                continue
            path = f"/api/v1/applications/{urllib.parse.quote(application.id, safe='')}"
            driver = self._driver(application)
            stages = self.stages(application)
            now_s = self._said_at.get(driver, time.time())
            settings = _settings(self._get(driver, f"{path}/environment"))
            moves = all(settings.get(name, "").lower() == "true" for name in MOVES)
            found.append(
                Job(
                    name=application.name,
                    progress=progress.progress(stages, _expected(settings)),
                    recomputed=0.0 if moves else progress.recomputed(stages, now_s),
                    cores=application.cores,
                    waves=progress.waves(stages, application.cores, now_s),
                )
            )
        return found

    def stages(self, application: Application) -> list[progress.Stage]:
        """The stages that it has had so far. Raises: ApplicationError."""
        path = f"/api/v1/applications/{urllib.parse.quote(application.id, safe='')}/stages"
        return progress.stages(self._get(self._driver(application), path))

    def _driver(self, application: Application) -> str:
        """The UI of the driver that runs it: each known one is asked once. Raises: ApplicationError."""
        known = self._applications.get(application.id)
        if known is not None:
            return known
        problems = []
        for driver in self.drivers:
            try:
                rows = self._get(driver, "/api/v1/applications")
            except ApplicationError as error:
                problems.append(str(error))
                continue
            if isinstance(rows, list) and any(isinstance(r, dict) and r.get("id") == application.id for r in rows):
                self._applications = {application.id: driver, **dict(list(self._applications.items())[:63])}
                return driver
        why = "; ".join(problems) or "none of the known drivers has it"
        raise ApplicationError(f"the driver of {application.name} ({application.id}) cannot be asked: {why}")

    def _get(self, base: str, path: str) -> Any:
        try:
            body, said_at = self._read(base + path)
            if said_at is not None:
                self._said_at[base] = said_at
            return json.loads(body.decode("utf-8"))
        except (ValueError, RecursionError):
            raise ApplicationError(f"{base}{path} answered without JSON") from None

    def _read(self, address: str) -> tuple[bytes, float | None]:
        """What it answers, and when by its own clock, where it says so."""
        end = time.monotonic() + self.timeout_s
        parts: list[bytes] = []
        size = 0
        try:
            with _OPENER.open(address, timeout=self.timeout_s) as response:
                while True:
                    part = response.read1(65536)
                    if not part:
                        return b"".join(parts), _date(response.headers.get("Date", ""))
                    parts.append(part)
                    size += len(part)
                    if size > ANSWER_BYTES:
                        raise ApplicationError(f"{address} answered with more than {ANSWER_BYTES} bytes")
                    if time.monotonic() > end:  # the timeout of a socket is for each read alone
                        raise ApplicationError(f"{address} was not done within {self.timeout_s:g} s")
        except urllib.error.HTTPError as error:
            raise ApplicationError(f"{address} answered with {error.code}") from None
        except (OSError, ValueError) as error:
            raise ApplicationError(f"{address} cannot be reached: {error}") from None


def _date(said: str) -> float | None:
    try:
        return email.utils.parsedate_to_datetime(said).timestamp()
    except (TypeError, ValueError, IndexError, OverflowError):  # whichever this Python has for what is no date
        return None


def _settings(body: Any) -> dict[str, str]:
    """The application's own Spark configuration."""
    properties = body.get("sparkProperties") if isinstance(body, dict) else None
    pairs = properties if isinstance(properties, list) else []
    return {str(pair[0]): str(pair[1]) for pair in pairs if isinstance(pair, list) and len(pair) == 2}


def _expected(settings: dict[str, str]) -> int:
    """The stages that the application says it will have had, 0 where it does not."""
    said = settings.get(EXPECTED_STAGES, "")
    return int(said[:9]) if said.isdigit() else 0


def _rows(body: dict[str, Any], name: str) -> list[dict[str, Any]]:
    rows = body.get(name)
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ApplicationError(f"the master answered without a list of {name}")
    return rows


def _text(row: dict[str, Any], field_: str) -> str:
    value = row.get(field_)
    if not isinstance(value, str):
        raise ApplicationError(f"Spark answered without {field_}")
    return value[:256]


def _count(row: dict[str, Any], field_: str) -> int:
    value = row.get(field_, 0)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1_000_000:
        raise ApplicationError(f"Spark answered with a {field_} that is no number")
    return value
