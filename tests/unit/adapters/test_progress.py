"""What an adapter's operation says while its work runs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from app_adapters import operations
from app_adapters.adapter import Adapter, Answer, Capabilities, Deadline, Promise, Release, SizeRange
from app_adapters.errors import ApplicationError
from app_adapters.messages import TargetRequest, TargetStatus
from app_adapters.operations import Operations

LIMIT_S = 10.0


class Service(Adapter):
    """Has what the test says; its work begins and ends when the test says so."""

    def __init__(self) -> None:
        self.has_mib = 1000.0
        self.fails: Exception | None = None
        self.asked = 0
        self.begun, self.ends = threading.Event(), threading.Event()

    def capabilities(self) -> Capabilities:
        self.asked += 1
        if self.fails is not None:
            raise self.fails
        return Capabilities(
            "service", "1", {"memory_mib": SizeRange(self.has_mib, 0.0, 2000.0, 1.0)}, 1.0, True, ["ask"]
        )

    def deflate(self, target: dict[str, float], mode: str, deadline: Deadline) -> Answer:
        def work() -> Release:
            self.begun.set()
            assert self.ends.wait(LIMIT_S)
            return Release({"memory_mib": 123.0}, "the test", "done")

        return Promise({"memory_mib": 400.0}, 1.0, work)

    def reinflate(self, target: dict[str, float], deadline: Deadline) -> Answer:
        return self.deflate(target, "ask", deadline)


@contextmanager
def at_work(service: Service, direction: str = "deflate") -> Iterator[Operations]:
    """Its work has begun; it ends at the end."""
    running = Operations(service, lambda sentence: None)
    running.submit(TargetRequest("r", 30.0, "ask", direction, {"memory_mib": 600.0}, ""))
    assert service.begun.wait(LIMIT_S)
    try:
        yield running
    finally:
        service.ends.set()
        running.stop()


@pytest.fixture(autouse=True)
def asked_as_often_as_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "LOOK_EVERY_S", 0.0)


def said(running: Operations) -> TargetStatus:
    status = running.status("r")
    assert status is not None
    return status


def test_what_has_come_free_so_far_is_said_while_the_work_runs() -> None:
    service = Service()
    with at_work(service) as running:
        assert (said(running).state, said(running).released) == ("running", {"memory_mib": 0.0})
        service.has_mib = 850.0
        assert (said(running).state, said(running).released) == ("running", {"memory_mib": 150.0})
        # What it has taken again is not free, and more than was promised is not its doing.
        service.has_mib = 1100.0
        assert said(running).released == {"memory_mib": 0.0}
        service.has_mib = 100.0
        assert said(running).released == {"memory_mib": 400.0}
    ended = said(running)
    assert (ended.state, ended.released, ended.measured_by) == ("released", {"memory_mib": 123.0}, "the test")


@pytest.mark.parametrize("error", [ApplicationError("busy"), ValueError("a fault")])
def test_one_that_cannot_say_what_it_has_is_not_asked_again(error: Exception) -> None:
    service = Service()
    with at_work(service) as running:
        service.fails = error
        assert said(running).released == {}
        asked = service.asked
        assert (said(running).state, said(running).released) == ("running", {})
        assert service.asked == asked
    assert said(running).state == "released"


def test_one_that_takes_too_long_to_say_so_is_not_asked_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "LOOK_LIMIT_S", -1.0)
    service = Service()
    with at_work(service) as running:
        service.has_mib = 850.0
        assert said(running).released == {}
        assert service.asked == 1


def test_nothing_comes_free_by_growing() -> None:
    service = Service()
    with at_work(service, "reinflate") as running:
        service.has_mib = 850.0
        assert said(running).released == {}
        assert service.asked == 0
