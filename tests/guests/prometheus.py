"""A real Prometheus on loopback, with the configuration and the rules of deploy/prometheus."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import shutil
import subprocess
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import aiohttp

from ebbtide.lab.cluster import free_ports

DEPLOY: Final = Path(__file__).resolve().parents[2] / "deploy" / "prometheus"
LIMIT_S: Final = 180.0


@dataclass(frozen=True)
class Prometheus:
    """One that runs; ask it as Grafana would."""

    url: str
    log: Path

    async def ask(self, path: str, **params: str) -> Any:
        """An answer of its HTTP API; None while it does not answer yet."""
        with contextlib.suppress(aiohttp.ClientConnectionError):
            async with aiohttp.ClientSession() as session, session.get(f"{self.url}{path}", params=params) as response:
                body = json.loads(await response.text())
                assert body["status"] == "success", body
                return body["data"]

    async def values(self, expression: str, *labels: str) -> dict[tuple[str, ...], float]:
        """What an expression comes to now, by these labels."""
        data = await self.ask("/api/v1/query", query=expression)
        rows = data["result"] if data is not None else ()
        return {tuple(row["metric"].get(label, "") for label in labels): float(row["value"][1]) for row in rows}

    async def firing(self, alert: str) -> list[dict[str, str]]:
        """The labels of an alert's instances that fire."""
        data = await self.ask("/api/v1/alerts")
        return [
            one["labels"]
            for one in (data or {"alerts": ()})["alerts"]
            if one["labels"]["alertname"] == alert and one["state"] == "firing"
        ]


@contextlib.contextmanager
def running(directory: Path, manager_url: str, token_file: Path) -> Iterator[Prometheus]:
    """Start one that scrapes every second, with a directory of its own; ended at the end."""
    config = (DEPLOY / "prometheus.yml").read_text()
    config = config.replace("127.0.0.1:7100", manager_url.removeprefix("http://"))
    config = config.replace("/etc/prometheus/ebbtide.token", str(token_file))
    config = re.sub(r"(scrape_interval|evaluation_interval|refresh_interval): \w+", r"\1: 1s", config)
    (directory / "prometheus.yml").write_text(config)
    shutil.copy(DEPLOY / "ebbtide.rules.yml", directory)
    (port,) = free_ports(1)
    argv = ["prometheus", f"--config.file={directory}/prometheus.yml", f"--storage.tsdb.path={directory}/data"]
    argv += [f"--web.listen-address=127.0.0.1:{port}"]
    log = directory / "prometheus.log"
    with log.open("wb") as output:
        process = subprocess.Popen(argv, cwd=directory, stdout=output, stderr=subprocess.STDOUT)
    try:
        yield Prometheus(f"http://127.0.0.1:{port}", log)
    finally:
        process.terminate()
        process.wait(30)


async def until(found: Callable[[], Awaitable[Any]], wanted: Callable[[Any], bool], limit_s: float = LIMIT_S) -> Any:
    """Ask again and again until it is what is wanted; says what it was last."""
    now = None
    try:
        async with asyncio.timeout(limit_s):
            while not wanted(now := await found()):
                await asyncio.sleep(0.5)
    except TimeoutError:
        raise AssertionError(f"not within {limit_s:g} s; it was {now}") from None
    return now
