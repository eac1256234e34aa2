"""What a Dask worker that does not answer costs the others, and what counts as delivered."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from signal import SIGKILL
from typing import Any

import pytest

from ebbtide.matcher.engines.dask import Dask
from ebbtide.matcher.engines.settings import EngineSettings
from ebbtide.matcher.errors import EngineRefused
from tests.hostagent.faked_loop import FakedLoop

GONE, WELL = "tcp://10.0.0.1:1", "tcp://10.0.0.2:1"
ATTEMPT = "ebb.train.0a.1"


class Client:
    """Its scheduler has two workers, one of which hangs."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, ...]] = []
        self.answered: list[str] = []
        self.known = {"gone": GONE, "well": WELL}
        #: Where the attempt is.
        self.place = ""
        #: The attempts that its scheduler has, and what the workers were to do.
        self.tasks: dict[str, dict[str, Any]] = {}
        self.calls: list[tuple[Any, ...]] = []

    async def run(self, _: Any, *arguments: Any, workers: list[str]) -> dict[str, bool]:
        self.asked.append(tuple(workers))
        self.calls.append(arguments[1:])
        if GONE in workers:
            await asyncio.Event().wait()
        self.answered += workers
        return {worker: worker == self.place for worker in workers}

    async def run_on_scheduler(self, *_: Any) -> dict[str, Any]:
        worker = {"threads": 4, "cores": 4, "running": True, "drained": "", "others": 0}
        workers = [{**worker, "name": name, "address": at} for name, at in self.known.items()]
        return {"tasks": self.tasks, "workers": workers}


class Connected(Dask):
    def __init__(self, directory: Path) -> None:
        super().__init__(EngineSettings(engine="dask", directory=directory, dask_scheduler="tcp://127.0.0.1:1"))
        self.client = Client()
        #: What the workers had been told when each attempt was dropped.
        self.dropped: dict[str, list[tuple[Any, ...]]] = {}

    @contextlib.asynccontextmanager
    async def _connected(self) -> AsyncIterator[Any]:
        yield self.client

    async def _drop(self, attempt: str) -> None:
        self.dropped[attempt] = list(self.client.calls)


def test_a_worker_that_does_not_answer_is_waited_for_once_between_two_looks_and_keeps_no_other(tmp_path: Path) -> None:
    engine, limit_s = Connected(tmp_path), 10.0

    async def rounds() -> None:
        loop = asyncio.get_running_loop()
        for _ in range(2):
            await engine.look([])
            before = loop.time()
            # Its scheduler does not have it: it may be with any worker.
            with pytest.raises(EngineRefused, match=rf"^dask: {GONE}: no answer within 10 s$"):
                await engine.signal(ATTEMPT, "TERM", "1")
            assert loop.time() - before == pytest.approx(limit_s, abs=1.0)
            before = loop.time()
            with pytest.raises(EngineRefused, match=rf"^dask: {GONE}: it does not answer$"):
                await engine.set_usable_cores("gone", 2)
            with pytest.raises(EngineRefused, match="it does not answer"):
                await engine.signal(ATTEMPT, "TERM", "1")
            await engine.set_usable_cores("well", 2)
            assert loop.time() - before < 1.0

    with asyncio.Runner(loop_factory=FakedLoop) as runner:
        runner.run(rounds())
    assert engine.client.answered == [WELL] * 6
    assert sum(GONE in workers for workers in engine.client.asked) == 2


def test_a_notice_counts_as_told_where_any_worker_has_the_attempt_and_else_not(tmp_path: Path) -> None:
    engine, told = Connected(tmp_path), tmp_path / f"{ATTEMPT}.told"

    async def notices() -> None:
        for known in ({}, {"well": WELL}):
            engine.client.known = known
            await engine.look([])
            await engine.signal(ATTEMPT, "TERM", "1")
            assert not told.exists()
        engine.client.known = {"gone": GONE, "well": WELL}
        engine.client.place = WELL
        await engine.look([])
        await engine.signal(ATTEMPT, "TERM", "1")
        assert told.read_text() == "1"
        await engine.signal(ATTEMPT, "TERM", "1")

    with asyncio.Runner(loop_factory=FakedLoop) as runner:
        runner.run(notices())
    assert engine.client.answered == [WELL] * 2


def test_an_end_that_was_asked_for_where_no_worker_has_the_attempt_is_asked_for_again(tmp_path: Path) -> None:
    engine = Connected(tmp_path)
    (tmp_path / ATTEMPT).mkdir(mode=0o700)
    (tmp_path / ATTEMPT / "claim").write_text("begun 1700000000.5 n1\n")

    async def ends() -> None:
        await engine.cancel(ATTEMPT)
        engine.client.known, engine.client.place = {"well": WELL}, WELL
        await engine.look([])
        for _ in range(2):
            await engine.cancel(ATTEMPT)

    with asyncio.Runner(loop_factory=FakedLoop) as runner:
        runner.run(ends())
    assert engine.client.answered == [WELL]


@pytest.mark.parametrize("name", [f"ebb.{'a' * 300}.0a.1", "ebb./../../else", "ebb.train"])
async def test_a_key_that_no_attempt_of_ours_has_is_no_attempt(tmp_path: Path, name: str) -> None:
    engine = Connected(tmp_path)
    there = {"state": "processing", "worker": "well", "cores": 1, "reason": ""}
    engine.client.tasks = {ATTEMPT: there, name: there}
    assert set((await engine.look([])).attempts) == {ATTEMPT}


@pytest.mark.parametrize("begun_too", [True, False])
async def test_an_attempt_without_a_record_that_is_on_a_worker_is_killed_there_before_it_is_dropped(
    tmp_path: Path, begun_too: bool
) -> None:
    engine = Connected(tmp_path)
    engine.client.tasks = {ATTEMPT: {"state": "processing", "worker": "well", "cores": 1, "reason": ""}}
    # As of a cancelled task, by a manager that was started again: it does not say what had begun.
    await engine.look([ATTEMPT])
    await engine.cancel(ATTEMPT, begun_too)
    assert engine.dropped == {ATTEMPT: [(SIGKILL, True)]}
    assert engine.client.asked == [(WELL,)]


@pytest.mark.parametrize(
    ("recorded", "begun", "begun_too", "dropped"),
    [
        (True, [], True, True),
        # Of one that was seen to begin, or has no directory, the claim may have been lost.
        (True, [ATTEMPT], True, False),
        (False, [], True, False),
        (False, [], False, True),
    ],
)
def test_only_what_has_surely_not_begun_is_dropped_while_its_worker_does_not_answer(
    tmp_path: Path, recorded: bool, begun: list[str], begun_too: bool, dropped: bool
) -> None:
    if recorded:
        (tmp_path / ATTEMPT).mkdir(mode=0o700)

    async def cancels() -> None:
        # The second time by a manager that was started again.
        for engine in (Connected(tmp_path), Connected(tmp_path)):
            engine.client.tasks = {ATTEMPT: {"state": "processing", "worker": "gone", "cores": 1, "reason": ""}}
            await engine.look([ATTEMPT], begun)
            refused = contextlib.nullcontext() if dropped else pytest.raises(EngineRefused, match="no answer")
            with refused:
                await engine.cancel(ATTEMPT, begun_too)
            assert set(engine.dropped) == ({ATTEMPT} if dropped else set())

    with asyncio.Runner(loop_factory=FakedLoop) as runner:
        runner.run(cancels())
