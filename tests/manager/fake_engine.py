"""An engine in memory: held attempts, machines with cores, attempts that run until a test ends them."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ebbtide.matcher.engines.settings import EngineSettings
from ebbtide.matcher.errors import EngineFull, EngineRefused, EngineUnreachable
from ebbtide.matcher.match.attempts import AttemptState, Claim, EngineMachine, Look, Seen
from ebbtide.matcher.match.tasks import TaskOrder

SETTINGS = EngineSettings(engine="slurm", directory=Path("/nowhere"), user="nobody", period_s=0.05)


@dataclass
class Running:
    order: TaskOrder
    seen: Seen


class FakeEngine:
    """What survives its manager."""

    kind = "fake"

    def __init__(self, **cores: int) -> None:
        self.machines = {name: EngineMachine(name, most, most) for name, most in cores.items()}
        self.attempts: dict[str, Running] = {}
        self.begun: list[str] = []
        #: Where attempts print; None: nowhere.
        self.prints_in: Path | None = None
        self.calls: list[tuple[str, ...]] = []
        #: What each attempt was told last, and all that commands got.
        self.told: dict[str, tuple[str, str]] = {}
        self.signals: list[tuple[str, str]] = []
        #: Names of methods that fail now.
        self.unreachable: set[str] = set()
        self.refusing: set[str] = set()
        #: Of tasks, those that it does not take.
        self.refusing_tasks: set[str] = set()
        #: Users whom it does not know now.
        self.unknown_users: set[str] = set()
        #: Machines where no attempt can write its record.
        self.unwritable: set[str] = set()
        #: Which machines are up; those of VMs are as long as their VMs run.
        self.lives: Callable[[str], bool] = lambda name: True
        #: Called before each command, with its name.
        self.before: Callable[[str], None] = lambda name: None

    def _called(self, *words: str) -> None:
        self.calls.append(words)
        self.before(words[0])
        if words[0] in self.unreachable:
            raise EngineUnreachable("the engine is away")
        if words[0] in self.refusing:
            raise EngineRefused("the engine does not want to")

    async def start(self) -> None:
        self._called("start")

    async def stop(self) -> None:
        pass

    async def look(self, wanted: Collection[str], begun: Collection[str] = ()) -> Look:
        self._called("look")
        self._begin()
        machines = {name: replace(one, up=one.up and self.lives(name)) for name, one in self.machines.items()}
        return Look(machines, {name: running.seen for name, running in self.attempts.items()})

    async def submit(self, attempt: str, order: TaskOrder) -> None:
        self._called("submit", attempt)
        if attempt.split(".")[1] in self.refusing_tasks:
            raise EngineRefused("it has DOS line breaks")
        if order.user in self.unknown_users:
            raise EngineFull(f"there is no user {order.user} on the manager's machine")
        self.attempts.setdefault(attempt, Running(order, Seen(AttemptState.HELD)))

    async def release(self, attempt: str, machine: str) -> None:
        self._called("release", attempt, machine)
        running = self.attempts.get(attempt)
        if running is not None and running.seen.state is AttemptState.HELD:
            running.seen = replace(running.seen, state=AttemptState.RELEASED, machine=machine)

    async def cancel(self, attempt: str, begun_too: bool = True) -> None:
        self._called("cancel", attempt)
        running = self.attempts.setdefault(attempt, Running(TaskOrder("?", ("?",)), Seen(AttemptState.GONE)))
        if running.seen.claim is Claim.NONE:
            running.seen = replace(running.seen, state=AttemptState.ENDED, claim=Claim.SEALED)
        elif begun_too:
            running.seen = replace(running.seen, state=AttemptState.ENDED, exit_code=143)

    async def signal(self, attempt: str, signal: str, notice: str) -> None:
        self._called("signal", attempt)
        if self.told.get(attempt, ("", ""))[1] != notice:
            self.signals.append((attempt, signal))
        self.told[attempt] = (signal, notice)

    async def forget(self, attempt: str) -> None:
        self._called("forget", attempt)
        running = self.attempts.get(attempt)
        if running is not None and not running.seen.lives:
            del self.attempts[attempt]

    async def set_usable_cores(self, machine: str, cores: int) -> None:
        self._called("set_usable_cores", machine, str(cores))
        self.machines[machine] = replace(self.machines[machine], usable_cores=cores)

    async def drain(self, machine: str, reason: str) -> None:
        self._called("drain", machine)
        self.machines[machine] = replace(self.machines[machine], drained=reason)

    async def undrain(self, machine: str) -> None:
        self._called("undrain", machine)
        self.machines[machine] = replace(self.machines[machine], drained="")

    def _begin(self) -> None:
        """Released attempts begin where there is room."""
        for name, running in self.attempts.items():
            if running.seen.state is not AttemptState.RELEASED or running.seen.machine is None:
                continue
            machine = self.machines[running.seen.machine]
            if machine.name in self.unwritable:
                running.seen = replace(running.seen, state=AttemptState.ENDED, unrecorded=True)
                continue
            held = sum(
                other.order.cores
                for other in self.attempts.values()
                if other.seen.state is AttemptState.RUNNING and other.seen.machine == machine.name
            )
            if machine.up and not machine.drained and held + running.order.cores <= machine.usable_cores:
                running.seen = replace(
                    running.seen, state=AttemptState.RUNNING, claim=Claim.BEGUN, begun_at=time.time()
                )
                self.begun.append(name)
                if self.prints_in is not None:
                    (self.prints_in / name).mkdir(0o700, parents=True, exist_ok=True)
                    (self.prints_in / name / "out").write_text(f"{name} begins\n")

    def end(self, task: str, exit_code: int | None = 0) -> None:
        """The attempt of a task ends: by itself, or (None) with its machine."""
        for name, running in self.attempts.items():
            if name.split(".")[1] == task and running.seen.state is AttemptState.RUNNING:
                running.seen = replace(running.seen, state=AttemptState.ENDED, exit_code=exit_code)

    def lose_everything(self) -> None:
        """It comes back without its state; what had begun has its record."""
        for name, running in list(self.attempts.items()):
            if running.seen.claim is Claim.NONE:
                del self.attempts[name]
            else:
                running.seen = replace(running.seen, state=AttemptState.GONE)


def settings(engine: FakeEngine | None = None, **changes: Any) -> dict[str, Any]:
    """For `cluster_manager.settings.Settings`."""
    made = engine or FakeEngine(far=4)
    made.prints_in = changes.get("directory")
    return {"engine": SETTINGS.model_copy(update=changes), "make_engine": lambda settings: made}
