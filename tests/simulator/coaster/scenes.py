"""Runs of a few jobs, interpreted and validated."""

from __future__ import annotations

from typing import Any

from ebbtide.simulator.coaster.running import Run, Terms, run
from tests.simulator.jobs.scenes import batches

#: Server 0 is for short tasks only, server 1 for all; each short job asks a server for each of its tasks.
ONE_SERVER: dict[str, Any] = {
    "policy": "eagle",
    "servers": 2,
    "short_servers": 1,
    "least_probes": 1,
    "probe_ratio": 1.0,
}


def told(jobs: Any, seed: int = 1, **terms: Any) -> Run:
    """A job is long from 100 s on."""
    given = {"cutoff_s": 100.0, "validate": True} | terms
    return run(batches(jobs), Terms(**given), seed, compile=False)
