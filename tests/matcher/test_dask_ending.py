"""How the Dask engine ends an attempt that has begun: one SIGTERM, time to end, SIGKILL."""

from __future__ import annotations

from pathlib import Path
from signal import SIGKILL, SIGTERM, Signals

import pytest

from ebbtide.matcher.engines.dask import KILL_AFTER_S, Dask
from ebbtide.matcher.engines.settings import EngineSettings
from ebbtide.matcher.errors import EngineRefused

ATTEMPT = "ebb.train.0a.1"


class Ending(Dask):
    """An engine with an attempt that has begun, and a clock that a test sets."""

    def __init__(self, directory: Path) -> None:
        self.now = 1000.0
        self.sent: list[Signals] = []
        #: What a signal fails with.
        self.refused = ""
        settings = EngineSettings(engine="dask", directory=directory, dask_scheduler="tcp://127.0.0.1:1")
        super().__init__(settings, lambda: self.now)

    async def _signal(self, attempt: str, number: Signals, all_of_it: bool) -> None:
        assert (attempt, all_of_it) == (ATTEMPT, True)
        if self.refused:
            raise EngineRefused(self.refused)
        self.sent.append(number)


@pytest.fixture
async def engine(tmp_path: Path) -> Ending:
    made = Ending(tmp_path)
    await made._records.prepare(ATTEMPT)
    (tmp_path / ATTEMPT / "claim").write_text("begun 1700000000.5 n1\n")
    return made


async def test_looks_that_follow_one_another_at_once_neither_kill_nor_signal_again(engine: Ending) -> None:
    for _ in range(20):
        await engine.cancel(ATTEMPT)
        engine.now += 0.05
    assert engine.sent == [SIGTERM]
    engine.now = 1000.0 + KILL_AFTER_S
    await engine.cancel(ATTEMPT)
    assert engine.sent == [SIGTERM, SIGKILL]


async def test_a_signal_that_did_not_arrive_is_sent_again_and_puts_off_no_kill(engine: Ending) -> None:
    engine.refused = "a worker does not answer"
    with pytest.raises(EngineRefused):
        await engine.cancel(ATTEMPT)
    engine.refused, engine.now = "", 1001.0
    await engine.cancel(ATTEMPT)
    engine.now = 1000.0 + KILL_AFTER_S
    await engine.cancel(ATTEMPT)
    assert engine.sent == [SIGTERM, SIGKILL]
