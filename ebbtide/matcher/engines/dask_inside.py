"""Code that the Dask engine sends whole to its scheduler and workers, which need not have Ebbtide."""

from __future__ import annotations

from typing import Any


def survey(prefix: str, key_prefix: str, dask_scheduler: Any = None) -> dict[str, Any]:
    """At the scheduler: its workers, and the attempts whose names begin so.

    :param key_prefix: before the name, in the key; keys of earlier versions are the names alone.

    :returns: ``workers``: name, address, cores, why it takes nothing, cores of others; ``tasks``: state, worker, cores,
        words.
    """
    tasks = {}
    others: dict[str, float] = {}
    for key, task in dask_scheduler.tasks.items():
        where = task.processing_on
        asked = task.resource_restrictions or {}
        attempt = key.removeprefix(key_prefix) if isinstance(key, str) else ""
        if attempt.startswith(prefix):
            tasks[attempt] = {
                "state": task.state,
                "worker": str(where.name) if where is not None else None,
                "cores": asked.get("core"),
                "reason": str(task.exception_text or "") if task.state == "erred" else "",
            }
        elif where is not None:
            others[str(where.name)] = others.get(str(where.name), 0) + asked.get("core", 1)
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
    import os
    import subprocess

    with subprocess.Popen(argv, start_new_session=True, cwd="/") as shell:
        # Not waited for yet: its number is nobody else's.
        ended = os.waitid(os.P_PID, shell.pid, os.WEXITED | os.WNOWAIT)
        if ended is not None and ended.si_code != os.CLD_EXITED:
            # Perhaps it alone, by a kernel without memory: nobody would find its command, which would run on beside
            # the next attempt.
            _kill(shell.pid)
    if shell.returncode:
        raise RuntimeError(f"exit code {shell.returncode}")


def signal(shell: list[str], number: int, all_of_it: bool) -> bool:
    """At a worker: signal the processes of an attempt, found by how its shell was started and by no number in a file.

    :param shell: the first words of its command line; the third, its script, was another in earlier versions.
    :param all_of_it: False: its shell alone, which passes it on to its command. Else all of its session, whatever their
        groups, but for its shell: its command would have it twice, and its shell could take its code for that of the
        signal. SIGKILL goes to the shell and to what has left the session, too.
    :returns: whether the attempt is there.
    """
    import os
    from contextlib import suppress
    from signal import SIGKILL

    there = False
    words = [word.encode() for word in shell]
    for leader, (_, session) in _processes().items():
        # A shell of the attempt that leads no session is a child of the one that does.
        if leader != session or session == os.getsid(0):
            continue
        try:
            with open(f"/proc/{leader}/cmdline", "rb") as file:
                found = file.read().split(b"\0")[: len(words)]
            if found[:2] + found[3:] != words[:2] + words[3:]:
                continue
        except OSError:
            # It has ended.
            continue
        there = True
        if all_of_it and number == SIGKILL:
            _kill(leader)
            continue
        pids = {leader}
        if all_of_it:
            pids = {pid for pid, (_, of) in _processes().items() if of == leader} - {leader}
        for pid in pids:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)
    return there


def _kill(leader: int) -> None:
    """Kill a session, and all that descend from it."""
    import os
    from contextlib import suppress
    from signal import SIGKILL, SIGSTOP

    found: set[int] = set()
    # All stand still before one is killed: none is begun meanwhile, and none loses its parent. Of another user's, which
    # cannot be stopped, new ones could come for ever.
    for _ in range(10):
        new = _below(leader) - found
        if not new:
            break
        for pid in new:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, SIGSTOP)
        found |= new
    for pid in found:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, SIGKILL)


def _below(leader: int) -> set[int]:
    """The processes of a session, and all that descend from these: one of them may lead another session by now."""
    processes = _processes()
    found = {pid for pid, (_, session) in processes.items() if session == leader}
    while new := {pid for pid, (parent, _) in processes.items() if parent in found} - found:
        found |= new
    return found


def _processes() -> dict[int, tuple[int, int]]:
    """All that can be seen here, with parent and session."""
    import os
    from contextlib import suppress

    found = {}
    for name in os.listdir("/proc"):
        # Those that end meanwhile are left out.
        with suppress(OSError):
            if name.isdigit():
                with open(f"/proc/{name}/stat", "rb") as file:
                    # After the program's name, which is in brackets and may have any character.
                    words = file.read().rpartition(b")")[2].split()
                found[int(name)] = int(words[1]), int(words[3])
    return found


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
