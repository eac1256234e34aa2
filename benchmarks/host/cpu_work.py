"""Work of one process in a control group. Standard library only, so that it begins at once.

It says "ready", waits for a line, works, and says what came of it: rows of numbers as JSON.
"""

from __future__ import annotations

import json
import random
import sys
import time


def _burn(cpu_s: float) -> None:
    until = time.thread_time() + cpu_s
    while time.thread_time() < until:
        pass


def _waited_s() -> float:
    """How long this process was to run and did not, its quota's stops included (proc(5): schedstat)."""
    with open("/proc/self/schedstat") as file:
        return int(file.read().split()[1]) / 1e9


def _stopped_s(cpu_stat: str) -> float:
    """How long the quota has stopped its group so far."""
    with open(cpu_stat) as file:
        times = dict(line.split() for line in file)
    return int(times["throttled_usec"]) / 1e6 if "throttled_usec" in times else int(times["throttled_time"]) / 1e9


def _serve(seconds: float, every_s: float, takes_s: float, seed: float, cpu_stat: str) -> list[list[float]]:
    """Answer requests that come at random moments.

    A row for each, in seconds: when it should begin, from then to its end, and, since the end of the one before, CPU
    time, time that the process was to run and did not, and of it time in which the quota stopped it.

    :param cpu_stat: the file of its group.
    """
    chance, rows = random.Random(seed), []
    began = due = time.monotonic()
    before = time.thread_time(), _waited_s(), _stopped_s(cpu_stat)
    while due - began < seconds:
        due += chance.expovariate(1 / every_s)
        time.sleep(max(due - time.monotonic(), 0.0))
        _burn(chance.expovariate(1 / takes_s))
        answered_s = time.monotonic() - due
        now = time.thread_time(), _waited_s(), _stopped_s(cpu_stat)
        cpu_s, waited_s, stopped_s = (new - old for new, old in zip(now, before, strict=True))
        # Some kernels count a group as stopped while nothing in it wants to run.
        row = [due - began, answered_s, cpu_s, waited_s, min(stopped_s, waited_s)]
        rows.append([round(number, 6) for number in row])
        before = now
    return rows


def _had_s(pid: str) -> float:
    """CPU time that another process has had; exact while it does not run."""
    with open(f"/proc/{pid}/schedstat") as file:
        return int(file.read().split()[0]) / 1e9


def _count(seconds: float, beside: str = "") -> list[list[float]]:
    """Work for a while: rounds of the same small loop, CPU time that it had, and that the other process had, if any."""
    rounds, other_s = 0, _had_s(beside) if beside else 0.0
    until, before = time.monotonic() + seconds, time.thread_time()
    while time.monotonic() < until:
        sum(range(1000))
        rounds += 1
    return [[rounds, time.thread_time() - before, _had_s(beside) - other_s if beside else 0.0]]


if __name__ == "__main__":
    print("ready", flush=True)
    sys.stdin.readline()
    kind, *words = sys.argv[1:]
    if kind == "serve":
        seconds, every_s, takes_s, seed = map(float, words[:4])
        print(json.dumps(_serve(seconds, every_s, takes_s, seed, words[4])), flush=True)
    else:
        print(json.dumps(_count(float(words[0]), *words[1:])), flush=True)
