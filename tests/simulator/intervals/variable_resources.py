"""First fit as variableResources publishes it (Perotin et al.), written anew from its rules: a referee.

Machines are on from number 0 up to so many; the last goes first. Jobs are tried alone as they come, where more room
than they need is left somewhere (``strict``). Who waits is looked at when a job ends or the machines change, in the
order of release, and passed over where there is no room. Of ends at one instant the lower machine's comes first. A
killed job waits by its release. Of jobs that were released before the window those that would still run begin with it,
with what is left; those that find no room then are gone (``late_start``).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class Referee:
    """:param jobs: (release_s, runtime_s, cores) in the order of the trace; ``moves``: (at_s, machines on)."""

    jobs: Sequence[tuple[float, float, int]]
    on: int
    moves: Sequence[tuple[float, int]]
    cores: int
    from_s: float
    to_s: float
    strict: bool = True
    by_release: str = "submission"
    late_start: bool = True
    at_each_end: bool = True
    ends_by_machine: bool = True
    useful: float = 0.0
    lost: float = 0.0
    there: float = 0.0
    kills: int = 0
    free: list[int] = field(default_factory=list)
    running: dict[int, tuple[float, float, int]] = field(default_factory=dict)
    starts: list[tuple[int, int, float]] = field(default_factory=list)

    def run(self) -> None:
        self.waiting: dict[int, list[tuple[float, int]]] = {}
        self.ends: list[tuple[float, int, int]] = []
        self.free = [self.cores] * max([self.on, *(n for _, n in self.moves)])
        self.turn = 0
        came = []
        for number, (release_s, runtime_s, _) in enumerate(self.jobs):
            if release_s >= self.from_s or not self.late_start:
                came.append((release_s, number, runtime_s))
            elif release_s + runtime_s >= self.from_s:
                came.append((self.from_s, number, runtime_s - (self.from_s - release_s)))
        came.sort(key=lambda one: one[:2])
        changes, arrivals = list(self.moves), came
        move = job = 0
        last_s = min(self.from_s, came[0][0])
        while True:
            at = [
                self.ends[0][0] if self.ends else float("inf"),
                changes[move][0] if move < len(changes) else float("inf"),
                arrivals[job][0] if job < len(arrivals) else float("inf"),
                self.to_s,
            ]
            now_s = min(at)
            begin_s = max(last_s, self.from_s)
            self.there += max(now_s - begin_s, 0.0) * self.on * self.cores
            last_s = max(now_s, last_s)
            if at[0] == now_s:
                end_s, _, number = heapq.heappop(self.ends)
                if number in self.running and self.running[number][1] == end_s:
                    began_s, _, machine = self.running.pop(number)
                    self.free[machine] += self.jobs[number][2]
                    self.useful += self.jobs[number][2] * max(end_s - max(began_s, self.from_s), 0.0)
                    if self.at_each_end or not self.ends or self.ends[0][0] > now_s:
                        self.look(now_s)
            elif at[1] == now_s:
                self.change(changes[move][1], now_s)
                move += 1
            elif at[2] == now_s:
                _, number, left_s = arrivals[job]
                job += 1
                old = self.late_start and self.jobs[number][0] < self.from_s
                need = self.jobs[number][2] + (1 if self.strict and not old else 0)
                if max(self.free[: self.on], default=0) >= need:
                    self.start(number, left_s, now_s)
                elif not old:
                    self.wait(number)
            else:
                break
        for number, (began_s, _, _) in self.running.items():
            self.useful += self.jobs[number][2] * (self.to_s - max(began_s, self.from_s))

    def start(self, number: int, left_s: float, now_s: float) -> None:
        cores = self.jobs[number][2]
        machine = next(i for i in range(self.on) if self.free[i] >= cores)
        self.free[machine] -= cores
        self.running[number] = (now_s, now_s + left_s, machine)
        place = machine if self.ends_by_machine else len(self.starts)
        heapq.heappush(self.ends, (now_s + left_s, place, number))
        self.starts.append((number, machine, now_s))

    def wait(self, number: int, killed: bool = False) -> None:
        release_s, _, cores = self.jobs[number]
        self.turn += 1
        key = float(self.turn)
        if self.by_release == "submission":
            key = release_s
        elif self.by_release == "head" and killed:
            key = -key
        heapq.heappush(self.waiting.setdefault(cores, []), (key, number))

    def look(self, now_s: float) -> None:
        while True:
            room = max(self.free[: self.on], default=0)
            heads = [(queue[0], cores) for cores, queue in self.waiting.items() if queue and cores <= room]
            first = min(heads, default=None)
            if first is None:
                return
            (_, number), cores = first
            heapq.heappop(self.waiting[cores])
            self.start(number, self.jobs[number][1], now_s)

    def change(self, on: int, now_s: float) -> None:
        if on == self.on:
            return
        for number in sorted(n for n, run in self.running.items() if run[2] >= on):
            began_s, _, machine = self.running.pop(number)
            self.free[machine] += self.jobs[number][2]
            self.kills += 1
            self.lost += self.jobs[number][2] * max(now_s - max(began_s, self.from_s), 0.0)
            self.wait(number, True)
        self.on = on
        self.look(now_s)
