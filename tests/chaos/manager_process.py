"""``ebb-manager`` as a process that is impatient, and that can kill itself at a record of its store.

Usage: python -m tests.chaos.manager_process DIRECTORY ADDRESS PORT

EBB_CHAOS_RECORD=N:before or N:after kills it (SIGKILL) at the N-th record of a plan, before or after it is stored.
EBB_CHAOS_PATIENCE_S makes it wait longer for agents. A gate (`tests.chaos.gates`) stands before each command.
"""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from cluster_manager import configured, serving
from cluster_manager import main as manager_main
from cluster_manager.execution import operations
from cluster_manager.inventory.agents import Agents
from cluster_manager.plans import growth, returns
from cluster_manager.settings import AgentLimits, Settings
from cluster_manager.store.store import Store
from ebbtide.deflation.sharing.hysteresis import Pace
from ebbtide.deflation.sharing.return_queue import ReturnPace
from ebbtide.messages.commands import Command
from ebbtide.messages.operations import Operation
from ebbtide.rest.gate import Gate
from ebbtide.rest.logs import configure_logs
from tests.chaos.gates import Gates
from tests.manager.cluster import TOKEN
from tests.manager.fake_agent import HOSTS_KEY

RECORD = "EBB_CHAOS_RECORD"
PATIENCE = "EBB_CHAOS_PATIENCE_S"
#: Answers come late here, and agents come back.
LIMITS = AgentLimits(answer_s=0.8, absence_s=1.2, poll_s=0.3, pause_s=0.02, grace_s=1.0, start_stop_s=2.0, retry_s=0.3)
SILENT_AFTER_S = 1.5
RETRY_S = 0.3
PACE = Pace(hold_s=0.6, rest_s=0.6)
RETURN_PACE = ReturnPace(hold_s=0.6, rest_s=0.6, pause_s=0.6, longest_s=2.0)


def kill_at_record(number: int, before: bool) -> None:
    """Count the records of plans of this process, and end it at one of them."""
    counted = 0

    def counting(save: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def save_or_die(*arguments: Any, **options: Any) -> Any:
            nonlocal counted
            counted += 1
            if counted == number and before:
                os.kill(os.getpid(), signal.SIGKILL)
            stored = await save(*arguments, **options)
            if counted >= number:
                os.kill(os.getpid(), signal.SIGKILL)
            return stored

        return save_or_die

    Store.add_plan = counting(Store.add_plan)  # type: ignore[method-assign, assignment]
    Store.save_step = counting(Store.save_step)  # type: ignore[method-assign, assignment]


def gate_commands(gates: Gates) -> None:
    """Wait before a command leaves, while the gate is closed."""
    send = Agents.command

    async def waiting(
        self: Agents, host: str, method: str, path: str, command: Command, without: frozenset[str] = frozenset()
    ) -> Operation:
        await gates.pass_through("command")
        return await send(self, host, method, path, command, without)

    Agents.command = waiting  # type: ignore[method-assign]


def settings_of(directory: Path, address: str, port: int) -> tuple[Settings, Gate]:
    """As the command's own, but for the limits; nobody here is slowed down."""
    limits = LIMITS
    if patience := os.environ.get(PATIENCE):
        patience_s = float(patience)
        limits = replace(limits, absence_s=patience_s, grace_s=patience_s, start_stop_s=patience_s)
    for name, token in (("token", TOKEN), ("hosts.key", HOSTS_KEY)):
        (directory / name).write_text(token)
        (directory / name).chmod(0o600)
    arguments = ["--listen", f"127.0.0.1:{port}", "--database", str(directory / "manager.sqlite")]
    arguments += ["--token-file", str(directory / "token"), "--hosts-key-file", str(directory / "hosts.key")]
    arguments += ["--requests-per-s", "10000", "--reports-per-s", "10000", "--policy", "first-fit"]
    settings, gate = configured.settings_of_all(manager_main.options_of(arguments).options)
    # In network namespaces of the test's own, where no other program listens.
    settings = replace(settings, host=address, insecure=True)
    return replace(settings, silent_after_s=SILENT_AFTER_S, agents=limits), gate


def main() -> None:
    configure_logs()
    operations.RETRY_S = operations.LONGEST_RETRY_S = RETRY_S
    operations.SHARE_S = RETRY_S
    vars(growth)["FIRST_PAUSE_S"] = RETRY_S
    vars(operations)["Growth"] = functools.partial(growth.Growth, PACE)
    vars(operations)["Returns"] = functools.partial(returns.Returns, RETURN_PACE)
    if where := os.environ.get(RECORD):
        number, _, when = where.partition(":")
        kill_at_record(int(number), when == "before")
    gate_commands(Gates(Path(sys.argv[1])))
    asyncio.run(serving.serve(*settings_of(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))))


if __name__ == "__main__":
    main()
