"""Both engines with their clusters under one handle, and tasks that write down when they begin and end."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from pathlib import Path

from benchmarks.matching.slurm_cluster import USER, SlurmCluster
from ebbtide.matcher.engines.interface import Engine, engine_of
from ebbtide.matcher.engines.settings import EngineSettings
from ebbtide.matcher.errors import EngineRefused
from ebbtide.matcher.match.attempts import AttemptState, Look, Seen, attempt_name
from ebbtide.matcher.match.tasks import TaskOrder
from tests.engines.dask_cluster import DaskCluster
from tests.waiting import until

LIMIT_S = 60.0
#: Of each machine of both kinds of cluster.
CORES = 4
_NUMBERS = itertools.count(1)


def settings_of(cluster: SlurmCluster | DaskCluster) -> EngineSettings:
    """For an engine on this cluster."""
    if isinstance(cluster, SlurmCluster):
        return EngineSettings(
            engine="slurm", directory=cluster.tasks, slurm_conf=cluster.conf, user=USER, period_s=0.2, answer_s=20.0
        )
    return EngineSettings(
        engine="dask", directory=cluster.tasks, dask_scheduler=cluster.url, period_s=0.2, answer_s=20.0
    )


def counting(runs: Path, seconds: float) -> tuple[str, ...]:
    """A command that appends a line to a file of its own when it begins and when it ends."""
    # Slurm may end sleep before its shell, which then would say that all went well.
    script = 'echo begun >> "$1"; sleep "$2" && echo ended >> "$1"'
    return ("/bin/sh", "-c", script, "task", str(runs), f"{seconds:g}")


class EngineHost:
    """An engine on a real cluster."""

    def __init__(self, cluster: SlurmCluster | DaskCluster) -> None:
        self.cluster = cluster
        self.settings = settings_of(cluster)
        self.engine = self.new_engine()

    def new_engine(self) -> Engine:
        """As another manager has it."""
        made = engine_of(self.settings)
        assert made is not None
        return made

    @property
    def directory(self) -> Path:
        return self.cluster.tasks

    def attempt(self) -> str:
        """A name that nobody has had."""
        return attempt_name("ebb", f"task-{next(_NUMBERS)}", "0a", 1)

    def runs(self, attempt: str) -> Path:
        """Where the command of an attempt writes its lines."""
        return self.cluster.runs / f"{attempt}.runs"

    def lines(self, attempt: str) -> list[str]:
        path = self.runs(attempt)
        return path.read_text().split() if path.exists() else []

    async def held(self, seconds: float, cores: int = 1, command: tuple[str, ...] = ()) -> str:
        """A new attempt that has been taken on."""
        attempt = self.attempt()
        order = TaskOrder(attempt.split(".")[1], command or counting(self.runs(attempt), seconds), cores)
        await self.engine.submit(attempt, order)
        await self.becomes(attempt, AttemptState.HELD)
        return attempt

    async def running(self, machine: str, seconds: float = 30.0, cores: int = 1) -> str:
        """A new attempt that has begun there."""
        attempt = await self.held(seconds, cores)
        await self.engine.release(attempt, machine)
        await self.becomes(attempt, AttemptState.RUNNING)

        async def begun() -> bool:
            return self.lines(attempt) == ["begun"]

        await until(begun)
        return attempt

    async def look(self, *attempts: str) -> Look:
        return await self.engine.look(attempts)

    async def becomes(self, attempt: str, *states: AttemptState) -> Seen:
        """An attempt when it has got so far."""
        found: list[Seen] = []

        async def is_there() -> bool:
            found.append((await self.look(attempt)).attempts.get(attempt, Seen(AttemptState.GONE)))
            return found[-1].state in states

        await until(is_there)
        return found[-1]

    async def ready(self) -> None:
        """All machines are there, free of drains, with all of their cores.

        Those of whose registration Slurm took no notice in time are started again, more than once. So are those that
        it mistrusts since they registered with a test's tasks and other cores: until they register anew it refuses to
        end their drain.
        """
        away = list(self.cluster.names)

        async def so() -> bool:
            seen = (await self.look()).machines
            machines = {name: seen[name] for name in self.cluster.names if name in seen}
            away[:] = [
                name
                for name in self.cluster.names
                if name not in machines or not machines[name].up or machines[name].drained
            ]
            for name, machine in machines.items():
                if machine.drained:
                    with contextlib.suppress(EngineRefused):
                        await self.engine.undrain(name)
                if machine.usable_cores != CORES:
                    await self.engine.set_usable_cores(name, CORES)
            return not away

        for left in reversed(range(3)):
            try:
                await until(so, limit_s=30.0)
                return
            except TimeoutError:
                if not left:
                    raise
                print(f"started again: {', '.join(away)}")
                for name in away:
                    self.kill_machine(name)
                    self.start_machine(name)

    async def quiet(self, attempts: int = 4) -> None:
        """Time in which an engine that begins something would do so."""
        for _ in range(attempts):
            await self.look()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.3):
                    await asyncio.Event().wait()

    def kill_machine(self, name: str) -> None:
        """With all that runs there."""
        if isinstance(self.cluster, SlurmCluster):
            self.cluster.kill_node(name)
        else:
            self.cluster.kill(name)

    def start_machine(self, name: str) -> None:
        if isinstance(self.cluster, SlurmCluster):
            self.cluster.start_daemon(name)
        else:
            self.cluster.start(name)
