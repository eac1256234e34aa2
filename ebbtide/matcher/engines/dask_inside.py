"""Code that the Dask engine sends whole to its scheduler and workers, which need not have Ebbtide."""

from __future__ import annotations

from typing import Any


def survey(prefix: str, key_prefix: str, dask_scheduler: Any = None) -> dict[str, Any]:
    """At the scheduler: its workers, and the attempts whose names begin so.

    :param key_prefix: before the name, in the key; keys of earlier versions are the names alone.

    :returns: ``workers``: name, address, cores, why it takes nothing, cores of others; ``tasks``: state, worker, words.
    """
    tasks = {}
    others: dict[str, float] = {}
    for key, task in dask_scheduler.tasks.items():
        where = task.processing_on
        attempt = key.removeprefix(key_prefix) if isinstance(key, str) else ""
        if attempt.startswith(prefix):
            tasks[attempt] = {
                "state": task.state,
                "worker": str(where.name) if where is not None else None,
                "reason": str(task.exception_text or "") if task.state == "erred" else "",
            }
        elif where is not None:
            held = (task.resource_restrictions or {}).get("core", 1)
            others[str(where.name)] = others.get(str(where.name), 0) + held
    workers = [
        {
            "name": str(worker.name),
            "address": worker.address,
            "threads": worker.nthreads,
            "cores": worker.resources.get("core"),
            "running": worker.status.name == "running",
            "drained": worker.extra.get("ebbtide-drained", ""),
            "others": others.get(str(worker.name), 0),
        }
        for worker in dask_scheduler.workers.values()
    ]
    return {"workers": workers, "tasks": tasks}


def run(argv: list[str]) -> None:
    """At a worker: an attempt. Its exit code is the scheduler's knowledge, not that of a file.

    :raises RuntimeError: with the exit code, where that is not 0.
    """
    import subprocess

    code = subprocess.call(argv, start_new_session=True, cwd="/")
    if code:
        raise RuntimeError(f"exit code {code}")


def signal(shell: list[str], number: int, all_of_it: bool) -> None:
    """At a worker: signal the processes of an attempt, found by how its shell was started and by no number in a file.

    :param shell: the first words of its command line.
    :param all_of_it: False: its shell alone, which passes it on to its command. Else not its shell, but for SIGKILL:
        its command would have it twice, and its shell could take its code for that of the signal.
    """
    import os
    from contextlib import suppress
    from signal import SIGKILL

    words = [word.encode() for word in shell]
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    for leader in pids:
        try:
            with open(f"/proc/{leader}/cmdline", "rb") as file:
                found = file.read().split(b"\0")[: len(words)]
            if found != words or os.getpgid(leader) != leader or leader == os.getpgrp():
                continue
            if number == SIGKILL:
                os.killpg(leader, number)
            for pid in pids if number != SIGKILL else ():
                with suppress(ProcessLookupError):
                    if os.getpgid(pid) == leader and all_of_it == (pid != leader):
                        os.kill(pid, number)
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            # It has ended, or belongs to another user.
            continue


def mark_drained(address: str, reason: str, dask_scheduler: Any = None) -> None:
    """At the scheduler: remember why a worker takes no new task; empty: it does."""
    if address in dask_scheduler.workers:
        dask_scheduler.workers[address].extra["ebbtide-drained"] = reason


async def set_cores(cores: int, dask_worker: Any = None) -> None:
    """At a worker: have so many cores, and tell the scheduler."""
    from distributed.core import Status
    from distributed.worker_state_machine import UnpauseEvent

    await dask_worker.set_resources(core=cores)
    if dask_worker.status == Status.running:
        # Tasks that wait for cores are not looked at by a change of resources alone (dask/distributed#6575).
        dask_worker.handle_stimulus(UnpauseEvent(stimulus_id=f"ebbtide-cores-{cores}"))
