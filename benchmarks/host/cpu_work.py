"""Work of one process in a control group. Standard library only, so that it begins at once.

It says "ready", waits for a line, works, and says what came of it: a list of numbers as JSON.
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


def _serve(seconds: float, every_s: float, takes_s: float, seed: float) -> list[float]:
    """Answer requests that come at random moments: from the moment that each should begin to its end, in seconds."""
    chance, answers = random.Random(seed), []
    began = due = time.monotonic()
    while due - began < seconds:
        due += chance.expovariate(1 / every_s)
        time.sleep(max(due - time.monotonic(), 0.0))
        _burn(chance.expovariate(1 / takes_s))
        answers.append(time.monotonic() - due)
    return answers


def _count(seconds: float) -> list[float]:
    """How much work was done in a while: rounds of the same small loop."""
    rounds, until = 0, time.monotonic() + seconds
    while time.monotonic() < until:
        sum(range(1000))
        rounds += 1
    return [rounds / seconds]


if __name__ == "__main__":
    print("ready", flush=True)
    sys.stdin.readline()
    kind, *numbers = sys.argv[1:]
    if kind == "serve":
        print(json.dumps(_serve(*(float(number) for number in numbers))), flush=True)
    else:
        print(json.dumps(_count(float(numbers[0]))), flush=True)
