"""A thousand hosts of twenty VMs behind a real manager that is watched: reports, what VMs use, a month of history.

The manager is a process of its own on a store with all that (`benchmarks.placing.placement_store`), the agents are
another one that reports over real HTTP, fenced and acknowledged, as `hostagent` does.

``python -m benchmarks.watching.fleet [HOSTS]`` runs one until its standard input ends, and says where it listens.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from sqlalchemy import create_engine, insert

from benchmarks.placing.placement_hosts import VMS, host_name
from benchmarks.placing.placement_manager import EVERY_S, RunningAgents, RunningManager, agents_of, manager_on
from benchmarks.placing.placement_store import fill, upgrade
from cluster_manager.history.packs import AT, HOST, SEEN, WIDTH, Pack, encoded
from cluster_manager.history.tiers import TIERS
from cluster_manager.store import schema
from ebbtide.messages.history import SAMPLED_EVERY_S

HOSTS: Final = 1000
#: Hosts of which the store has all the history that it keeps; of the others, what comes in.
REMEMBERED: Final = 20
#: As agents do where no size changes: so many reports for each time that they tell what VMs use.
USAGE_EACH: Final = round(SAMPLED_EVERY_S / EVERY_S)
#: Share of the reports with other sizes than before.
CHANGED: Final = 0.1
#: Steps of a pack as the recorder writes it.
_WRITTEN: Final = 5


@dataclass(frozen=True)
class Fleet:
    """A manager and the hosts that report to it."""

    manager: RunningManager
    agents: RunningAgents
    hosts: int
    #: What the history of `REMEMBERED` hosts takes in the store, bytes a host.
    history_bytes: float

    def begin(self, seconds: float, changed: float = CHANGED, usage: bool = True) -> None:
        """Have all hosts report every two seconds for so long; ``agents.result`` waits for its end."""
        self.agents.begin(self.manager.port, seconds, changed, EVERY_S, USAGE_EACH if usage else 0)

    def all_report(self) -> None:
        """Have each host report once, as fast as they are answered."""
        self.agents.begin(self.manager.port, 0.0, 0.0)
        self.agents.result()


@dataclass(frozen=True)
class Hosts:
    """Hosts and a store that knows them, for one manager after the other."""

    directory: Path
    agents: RunningAgents
    hosts: int
    history_bytes: float

    @contextmanager
    def managed(self, *, history: bool = True) -> Iterator[Fleet]:
        """A manager on a copy of the store, to which all hosts have reported once; ended at the end.

        :param history: whether the manager keeps it.
        """
        database = self.directory / "manager.sqlite"
        shutil.copyfile(self.directory / "full.sqlite", database)
        with manager_on(self.directory, database, options=() if history else ("--no-history",)) as manager:
            made = Fleet(manager, self.agents, self.hosts, self.history_bytes)
            made.all_report()
            yield made
        for left in self.directory.glob("manager.sqlite*"):
            left.unlink()


@contextmanager
def prepared(hosts: int = HOSTS) -> Iterator[Hosts]:
    """Hosts without a manager yet; ended and cleared away at the end."""
    with tempfile.TemporaryDirectory(prefix="ebb-bench-") as name, agents_of(hosts) as agents:
        database = Path(name) / "full.sqlite"
        fill(database, hosts, agents.port)
        taken = remember(database, min(hosts, REMEMBERED), time.time())
        yield Hosts(Path(name), agents, hosts, taken)


@contextmanager
def fleet(hosts: int = HOSTS, *, history: bool = True) -> Iterator[Fleet]:
    """A manager whose hosts have all reported once, as `Hosts.managed`."""
    with prepared(hosts) as made, made.managed(history=history) as managed:
        yield managed


def remember(database: Path, hosts: int, now: float) -> float:
    """Write the history of the first hosts as if they had been there for a month; how many bytes a host takes."""
    upgrade(database)
    engine, taken = create_engine(f"sqlite:///{database}"), 0
    generator = np.random.default_rng(7)
    try:
        with engine.begin() as connection:
            for number in range(hosts):
                mark = f"{number:06d}"
                names = (HOST, *(f"vm-{mark}-{vm}" for vm in range(VMS)))
                for tier in TIERS:
                    span_s = tier.span_s or _WRITTEN * tier.step_s
                    last = int(now // span_s) * span_s
                    rows = []
                    for start in range(last - int(tier.kept_s * 1.05), last, span_s):
                        body = encoded(_pack(start // span_s * span_s, tier.step_s, span_s, names, generator))
                        taken += len(body)
                        at = start // span_s * span_s
                        rows.append({"host": host_name(number), "step_s": tier.step_s, "at": at, "body": body})
                    connection.execute(insert(schema.history), rows)
                homes = [{"vm": vm, "host": host_name(number), "seen_at": now} for vm in names[1:]]
                connection.execute(insert(schema.history_homes), homes)
        with engine.connect() as connection:
            connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)")
    finally:
        engine.dispose()
    return taken / hosts


def _pack(start: int, step_s: int, span_s: int, names: tuple[str, ...], generator: np.random.Generator) -> Pack:
    """Figures as a host has them: sizes that stand still but for two VMs, use and pressure that move all the time."""
    steps = span_s // step_s
    values = np.zeros((steps, len(names), WIDTH), dtype=np.float32)
    for column, figure in (
        ("nominal_cpu_cores", 4.0), ("nominal_memory_mib", 8192.0), ("minimum_cpu_cores", 1.0),
        ("minimum_memory_mib", 2048.0), ("bound_cpu_cores", 4.0), ("bound_memory_mib", 8192.0),
    ):  # fmt: skip
        values[..., AT[column]] = figure
    deflated = np.repeat(generator.random((-(-steps // 3), 2)), 3, axis=0)[:steps]
    values[:, 1:3, AT["guest_memory_mib"]] = np.round(4096 * deflated)
    values[:, 1:3, AT["bound_memory_mib"]] -= values[:, 1:3, AT["guest_memory_mib"]]
    values[..., AT["resident_memory_mib"]] = np.round(6000 + generator.normal(0, 80, (steps, len(names))))
    for what in ("cpu", "memory"):
        pressure = np.round(generator.exponential(1.5, (steps, len(names))), 1)
        values[..., AT[f"{what}_pressure_percent"]] = pressure
        values[..., AT[f"{what}_pressure_max_percent"]] = np.round(1.4 * pressure, 1)
    for column in ("capacity_cpu_cores", "capacity_memory_mib", "free_cpu_cores", "free_memory_mib", "vms"):
        values[:, 1:, AT[column]] = np.nan
    values[..., SEEN] = step_s
    return Pack(start, step_s, names, values)


def main() -> None:
    """One fleet until standard input ends."""
    with fleet(int(sys.argv[1]) if len(sys.argv) > 1 else HOSTS) as made:
        made.begin(86_400.0)
        print(f"{made.manager.url} {made.manager.token}", flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
