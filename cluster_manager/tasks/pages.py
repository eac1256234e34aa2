"""Tasks as clients see them."""

from __future__ import annotations

import asyncio
from typing import Final

from cluster_manager.inventory.lists import position_of
from cluster_manager.store.store import Store
from cluster_manager.store.tasks import StoredTask, stored_task, tasks_query
from cluster_manager.tasks.tasks import TaskService
from ebbtide.matcher.match.tasks import Task, TaskPhase
from ebbtide.messages.tasks import (
    CheckpointSignal,
    EngineMachineStatus,
    EngineStatus,
    MachineOffer,
    ManagedTask,
    TaskExplanation,
    TaskPage,
    TaskState,
)
from ebbtide.rest.pages import cursor_of, key_of

#: A page ends before its limit where the commands on it have so many characters, but for what is read at once.
MOST_CHARACTERS: Final = 4 * 2**20
READ_AT_ONCE: Final = 50


class TaskPages:
    """Reads the service and the store."""

    def __init__(self, service: TaskService, store: Store) -> None:
        self._service = service
        self._store = store

    async def tasks(
        self,
        limit: int,
        after: str | None,
        *,
        state: TaskState | None = None,
        machine: str | None = None,
        prefix: str | None = None,
    ) -> TaskPage:
        """Newest first. A page of long commands has fewer than ``limit``.

        :raises InvalidField: a cursor of something else.
        """
        key = key_of("tasks", after, (int,))
        position = await position_of(self._store)
        phase = TaskPhase(state.value) if state is not None else None
        found: list[StoredTask] = []
        before, more, characters = key[0] if key else None, True, 0
        while more and len(found) <= limit and characters < MOST_CHARACTERS:
            count = min(limit + 1 - len(found), READ_AT_ONCE)
            query = tasks_query(count, before, state=phase, machine=machine, prefix=prefix)
            rows = [stored_task(row) for row in await self._store.rows(query)]
            found += rows
            more = len(rows) == count
            before = rows[-1].number if rows else None
            characters += sum(len(word) for row in rows for word in row.task.order.command)
        if more:
            # The last one says that there is another page, and begins it.
            found.pop()
        following = cursor_of("tasks", (found[-1].number,)) if more else None
        return TaskPage(tasks=tuple(self.shown(row.task) for row in found), next=following, position=position)

    def shown(self, task: Task) -> ManagedTask:
        """One task."""
        order = task.order
        return ManagedTask(
            name=order.name,
            state=TaskState(task.phase.value),
            cores=order.cores,
            duration_s=order.duration_s,
            restartable=order.restartable,
            max_attempts=order.max_attempts,
            preemption_aversion=order.preemption_aversion,
            checkpoint_s=order.checkpoint_s,
            checkpoint_signal=CheckpointSignal(order.checkpoint_signal) if order.checkpoint_signal else None,
            checkpoint_grace_s=order.checkpoint_grace_s,
            command=order.command,
            machine=task.machine,
            attempts=task.begun,
            preemptions=task.preemptions,
            submitted_at=task.submitted_at,
            started_at=task.began_at,
            told_at=task.told_at,
            ended_at=task.ended_at,
            exit_code=task.exit_code,
            output=self._service.output(task),
            sentence=self._sentence(task),
        )

    def explanation(self, task: Task) -> TaskExplanation:
        """Why it waits, and what it waits for."""
        waiting = [name for name, one in self._service.unfinished.items() if one.phase is TaskPhase.WAITING]
        waits = task.phase is TaskPhase.WAITING and not task.stop
        choice = self._service.choices.get(task.name) if waits else None
        return TaskExplanation(
            task=self.shown(task),
            waits_for=choice.waits_for if choice is not None else None,
            sentence=self._sentence(task),
            ahead=waiting.index(task.name) if waits and task.name in waiting else 0,
            offers=tuple(
                MachineOffer(
                    machine=offer.machine,
                    wait_s=offer.wait_s,
                    expected_s=offer.expected_s,
                    compared_s=offer.compared_s,
                    completion_probability=offer.completion_probability,
                )
                for offer in (choice.offers if choice is not None else ())
            ),
        )

    async def engine(self, machines: bool = True) -> EngineStatus:
        """What runs the tasks.

        :param machines: with its machines, which may be many.
        """
        service = self._service
        shown = await self._engine_machines() if machines else ()
        if service.kind == "none":
            sentence = "no engine is configured, so that no task can be submitted"
        else:
            asked = "it has not been asked yet" if service.looked_at is None else "it answers"
            refused = f"it answers, and refused something: {service.refused}" if service.refused else ""
            sentence = service.trouble or service.stuck or refused or asked
        return EngineStatus(
            kind=service.kind,
            reachable=service.looked_at is not None and not service.trouble,
            sentence=sentence,
            looked_at=service.looked_at,
            machines=shown,
        )

    async def _engine_machines(self) -> tuple[EngineMachineStatus, ...]:
        """All of one moment, by name; other work gets its turn in between."""
        held: dict[str, list[str]] = {}
        for task in self._service.unfinished.values():
            if task.occupies is not None:
                held.setdefault(task.occupies, []).append(task.name)
        known, shown = self._service.known, []
        for machine in sorted(self._service.machines.values(), key=lambda machine: machine.name):
            shown.append(
                EngineMachineStatus(
                    name=machine.name,
                    up=machine.up,
                    cores=machine.usable_cores,
                    most_cores=machine.most_cores,
                    known=machine.name in known,
                    drained=machine.drained,
                    tasks=tuple(held.get(machine.name, ())),
                    foreign_cores=machine.foreign_cores,
                )
            )
            if not len(shown) % READ_AT_ONCE:
                await asyncio.sleep(0)
        return tuple(shown)

    def _sentence(self, task: Task) -> str:
        choice = self._service.choices.get(task.name)
        waits = task.phase is TaskPhase.WAITING and not task.stop
        sentence = choice.sentence if waits and choice is not None else task.sentence
        if waits and task.preemptions and choice is not None:
            sentence = f"{task.sentence}; {sentence}"
        if not task.final and self._service.trouble:
            sentence += f"; the engine cannot be used: {self._service.trouble}"
        elif not task.final and self._service.stuck:
            sentence += f"; {self._service.stuck}"
        return sentence
