"""Base of the adapters of web servers: sizes in workers, and a release that is counted and measured."""

from __future__ import annotations

import time
from abc import abstractmethod
from dataclasses import dataclass

from app_adapters import __version__
from app_adapters.adapter import Adapter, Answer, Capabilities, Deadline, Promise, Refusal, Release, SizeRange
from app_adapters.errors import ApplicationError
from app_adapters.processes.process_memory import measured_together
from app_adapters.web.workers import Pool, workers_for

FIRST_GUESS_S = 2.0


@dataclass(frozen=True)
class Processes:
    """A master, its workers that live, and of them those that take new requests; `note` is for the next answer."""

    master: int
    workers: list[int]
    serving: list[int]
    nominal: int
    note: str = ""


class PoolAdapter(Adapter):
    """A server with a master and workers. A size in cores is a share of its workers; one in MiB is as many as fit."""

    components = ("cpu_cores", "memory_mib")
    name = ""

    def __init__(self, full_cores: float, minimum_workers: int) -> None:
        self._full_cores = full_cores
        self._minimum_workers = minimum_workers
        self._seconds = FIRST_GUESS_S  # what the last change of size took

    @abstractmethod
    def _processes(self) -> Processes:
        """What runs now. Raises: ApplicationError where it cannot be told."""

    @abstractmethod
    def _resize(self, workers: int, deadline: Deadline) -> str:
        """Have so many workers, and wait for it; returns what is not as it should be by the deadline.

        Raises: ApplicationError where nothing was changed.
        """

    def _is_right(self, wanted: int) -> bool:
        """Whether the server would also begin with so many workers, as far as the adapter has a say in that."""
        return True

    def _most(self, nominal: int) -> int:
        """The workers that a reinflation may go up to, 0 where nothing had been taken."""
        return nominal

    def _note_told(self) -> None:
        """The note of the last look stands in an answer."""
        return

    def _obstacle(self) -> str:
        """Why the number of workers cannot be changed, empty where it can."""
        return ""

    def capabilities(self) -> Capabilities:
        """From the minimum of workers to the number it is configured for."""
        pool, _ = self._look()
        least = min(pool.minimum, pool.workers, pool.nominal)
        cores = SizeRange(
            # Workers that are on their way out can be more than there are at full size.
            current=round(min(pool.cores(pool.workers), pool.full_cores), 3),
            minimum=round(pool.cores(least), 3),
            maximum=round(pool.full_cores, 3),
            step=round(pool.cores(1), 3),
        )
        memory = SizeRange(
            current=round(pool.total_mib, 3),
            minimum=round(min(pool.memory_mib(least), pool.total_mib), 3),
            maximum=round(pool.largest_mib(), 3),
            step=round(max(pool.worker_mib, 0.001), 3),
        )
        resources = {"cpu_cores": cores, "memory_mib": memory}
        return Capabilities(self.name, __version__, resources, round(self._seconds, 1), True, ["ask", "force"])

    def deflate(self, target: dict[str, float], mode: str, deadline: Deadline) -> Answer:
        """Promise the workers that the target leaves no room for."""
        pool, note = self._look()
        self._note_told()
        obstacle = self._obstacle()
        if obstacle:
            return Refusal(obstacle, floor=_sizes(pool, pool.workers))
        if pool.workers <= pool.minimum:
            reason = f"{self.name} has {pool.workers} workers, its minimum is {pool.minimum}"
            return Refusal("; ".join(filter(None, [reason, note])), floor=_sizes(pool, pool.workers))
        wanted = min(workers_for(target, pool), pool.serving)
        now, then = _sizes(pool, pool.workers), _sizes(pool, wanted)
        promised = {name: round(max(now[name] - then[name], 0.0), 3) for name in now}
        reason = "; ".join(filter(None, [f"{pool.serving} to {wanted} of {pool.nominal} workers", note]))
        return Promise(promised, round(self._seconds, 1), lambda: self._change(wanted, deadline), reason)

    def reinflate(self, target: dict[str, float], deadline: Deadline) -> Answer:
        """Start workers until the target is full; it never takes one away."""
        pool, note = self._look()
        self._note_told()
        obstacle = self._obstacle()
        if obstacle:
            return Refusal(obstacle, floor=_sizes(pool, pool.workers))
        most = self._most(pool.nominal)
        wanted = max(min(workers_for(target, pool), most), pool.serving)
        nothing = "" if most else "nothing had been taken"
        reason = "; ".join(filter(None, [f"{pool.serving} to {wanted} of {pool.nominal} workers", nothing, note]))
        return Promise({}, round(self._seconds, 1), lambda: self._change(wanted, deadline), reason)

    def _change(self, wanted: int, deadline: Deadline) -> Release:
        before, _ = self._look()
        began = time.monotonic()
        problem = ""
        if wanted != before.serving or before.workers != before.serving or not self._is_right(wanted):
            problem = self._resize(wanted, deadline)
            if not problem:
                self._seconds = max(time.monotonic() - began, 0.1)
        after, _ = self._look()
        released = {
            "cpu_cores": round(max(before.cores(before.workers) - before.cores(after.workers), 0.0), 3),
            "memory_mib": round(max(before.total_mib - after.total_mib, 0.0), 3),
        }
        parts = [
            f"workers {before.workers} to {after.workers}, together {before.total_mib:.0f} to {after.total_mib:.0f} MiB"
        ]
        # Something came free though a part failed: it is told, and counts.
        complete = not problem or released["cpu_cores"] > 0
        measured_by = f"living workers of {self.name}, and PSS of all its processes"
        return Release(released, measured_by, "; ".join(filter(None, [*parts, problem])), complete)

    def _look(self) -> tuple[Pool, str]:
        processes = self._processes()
        memory = measured_together([processes.master, *processes.workers])
        if processes.master not in memory:
            raise ApplicationError(f"{self.name} (process {processes.master}) has just ended")
        alone = [memory[pid].private_mib for pid in processes.workers if pid in memory]
        pool = Pool(
            workers=len(processes.workers),
            serving=len(processes.serving),
            nominal=processes.nominal,
            minimum=min(self._minimum_workers, processes.nominal),
            full_cores=self._full_cores,
            total_mib=sum(one.proportional_mib for one in memory.values()),
            worker_mib=sum(alone) / len(alone) if alone else 0.0,
        )
        return pool, processes.note


def _sizes(pool: Pool, workers: int) -> dict[str, float]:
    return {"cpu_cores": round(pool.cores(workers), 3), "memory_mib": round(pool.memory_mib(workers), 3)}
