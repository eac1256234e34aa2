"""Applications that lie, hang, crash or answer anything: what the agent tells, and what the cascade makes of it.

Agent and hook are real and talk HTTP; the cascade is the host's own. Only the guest's size is a model.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from ebbtide.deflation.cascade.cascade import Cascade
from ebbtide.deflation.cascade.instructions import (
    ApplicationAnswered,
    ApplicationReported,
    AskApplication,
    Event,
    Outcome,
)
from ebbtide.deflation.ledger import Layer, LedgerEntry
from ebbtide.deflation.resources import ResourceVector
from ebbtide.messages.guest import ApplicationPromise, ApplicationRelease
from guestagent import calls, hooks
from tests.guestagent.bad_hooks import (
    HONEST_MIB,
    BadHook,
    continued,
    drip,
    endless,
    http,
    offer,
    open_sockets,
    promise,
    report,
)
from tests.guestagent.elastic import Elastic, Serve
from tests.guestagent.harness import Bench, Host
from tests.unit.deflation.model_vm import ModelVM, run

Register = Callable[[BadHook], BadHook]
TARGET_MIB = 700.0
BOUND_MIB = 1024.0


@pytest.fixture
def register(guest: Bench) -> Iterator[Register]:
    made: list[BadHook] = []

    def start(hook: BadHook) -> BadHook:
        made.append(hook)
        guest.register("bad", hook.port)
        return hook

    yield start
    for hook in made:
        hook.stop()


@dataclass
class AskedVM(ModelVM):
    """A model of the VM whose applications are asked through a real agent."""

    host: Host | None = None
    gives_mib: float = 0.0

    def _ask(self, instruction: AskApplication, then: float) -> Event:
        assert self.host is not None
        answer = self.host.result(
            "application.deflate",
            request_id="r",
            deadline_s=instruction.deadline_s,
            mode=instruction.mode.value,
            target={name: instruction.target[name] for name in instruction.components},
            bound_mib=instruction.bound_mib,
        )
        promised = ResourceVector(**answer["promised"])
        return ApplicationAnswered(then, instruction.step, promised, answer["expected_s"], answer["reason"])

    def _report(self, then: float, step: int) -> Event:
        assert self.host is not None
        status = self.host.result("application.status", request_id="r")
        done = status["state"] != "running"
        released = ResourceVector(**status["released"])
        if done:
            self.application_mib -= self.gives_mib
        return ApplicationReported(then, step, released, done, status["reason"])


def deflated(host: Host, gives_mib: float = 0.0) -> tuple[Outcome, dict[Layer, LedgerEntry]]:
    """A whole cascade over memory. `gives_mib`: what the application truly releases."""
    vm = AskedVM(application_mib=HONEST_MIB, host=host, gives_mib=gives_mib)
    target = ResourceVector(4.0, TARGET_MIB, 0.0, 0.0)
    outcome, _ = run(Cascade(vm.bound, target, 20.0), vm)
    rows = {entry.layer: entry for entry in outcome.ledger if entry.resource == "memory_mib"}
    assert set(rows) == set(Layer)
    # Whatever it says: the layers that take give what was taken, and nothing of the application is added to it.
    fall = outcome.before.memory_mib - outcome.after.memory_mib
    taken = rows[Layer.GUEST].verified + rows[Layer.HYPERVISOR].verified
    assert taken == pytest.approx(fall, abs=0.01)
    assert rows[Layer.APPLICATION].verified <= rows[Layer.GUEST].verified + 0.01
    assert outcome.reached, outcome.sentence
    return outcome, rows


def ask(host: Host, target_mib: float = TARGET_MIB) -> dict[str, Any]:
    return host.result(
        "application.deflate",
        request_id="r",
        deadline_s=10,
        mode="ask",
        target={"memory_mib": target_mib},
        bound_mib=BOUND_MIB,
    )


def test_an_honest_hook_is_credited_in_the_cascade(host: Host, register: Register) -> None:
    register(BadHook())
    _, rows = deflated(host, gives_mib=100.0)
    assert rows[Layer.APPLICATION].promised == 100
    assert rows[Layer.APPLICATION].verified == pytest.approx(100)


# --- lies ------------------------------------------------------------------------------------------------------------


def test_ten_times_what_it_has_is_no_more_than_it_had(host: Host, register: Register) -> None:
    register(BadHook(target=lambda id_: (202, promise(id_, 3000)), progress=lambda id_: (200, report(id_, 3000))))
    assert ask(host)["promised"] == {"memory_mib": HONEST_MIB}
    assert host.result("application.status", request_id="r")["released"] == {"memory_mib": HONEST_MIB}
    deflated(host)


@pytest.mark.parametrize("lie", [-100, "100", True, None, [100], {"mib": 100}, 1e300, 10**400])
def test_what_is_no_amount_counts_for_nothing(host: Host, register: Register, lie: Any) -> None:
    register(BadHook(target=lambda id_: (202, promise(id_, lie)), progress=lambda id_: (200, report(id_, lie))))
    answer = ask(host)
    assert (answer["state"], answer["promised"]) == ("promised", {})
    assert host.result("application.status", request_id="r")["released"] == {}
    _, rows = deflated(host)
    assert rows[Layer.APPLICATION].verified == 0


def test_nan_is_no_json(host: Host, register: Register) -> None:
    register(BadHook(target=lambda id_: (202, promise(id_, float("nan")))))
    answer = ask(host)
    assert (answer["state"], answer["reason"]) == ("refused", "bad: answered 202 without a JSON object")
    deflated(host)


@pytest.mark.parametrize("field", ["current", "minimum", "maximum"])
@pytest.mark.parametrize("lie", [1e9, 1e300, -1, "much", float("nan")])
def test_sizes_that_cannot_be_do_not_keep_another_application_from_its_share(
    host: Host, register: Register, serve: Serve, field: str, lie: Any
) -> None:
    honest = Elastic(100)
    serve("honest", honest)
    register(BadHook(capabilities=lambda: (200, offer(**{field: lie})), target=lambda id_: (409, refusal(id_))))
    answer = ask(host, 500)
    assert answer["state"] == "promised", answer
    (direction, size_mib, _) = honest.targets[-1]
    assert direction == "deflate"
    assert honest.minimum_mib <= size_mib <= 1024
    status = host.result("status")
    assert all(row["resident_mib"] <= 1024 for row in status["applications"])


def refusal(request_id: str, retry_after_s: Any = 5) -> dict[str, Any]:
    return {
        "request_id": request_id,
        "state": "refused",
        "reason": "never",
        "retry_after_s": retry_after_s,
        "floor": {"memory_mib": 300},
    }


def test_who_refuses_for_ever_is_refused_with_a_number(host: Host, register: Register) -> None:
    register(BadHook(target=lambda id_: (409, refusal(id_, 1e300))))
    answer = ask(host)
    assert (answer["state"], answer["reason"]) == ("refused", "bad: never")
    assert answer["retry_after_s"] == hooks.SECONDS_LIMIT  # the host grants no more than five minutes of it
    deflated(host)


def test_what_is_too_much_for_the_host_is_cut_so_that_it_takes_the_answer(
    guest: Bench, host: Host, register: Register
) -> None:
    most, vector = hooks.AMOUNT_LIMIT, {"memory_mib": 1e9, "cpu_cores": 1e9}
    sizes = {"current": most, "minimum": 0, "maximum": most, "step": 1}
    bad = BadHook(
        capabilities=lambda: (200, {**offer(), "resources": {"cpu_cores": sizes}, "expected_s": most}),
        target=lambda id_: (202, {**promise(id_), "promised": vector, "expected_s": most}),
        progress=lambda id_: (200, {**report(id_), "released": vector}),
    )
    register(bad)
    guest.register("bad-2", bad.port)
    asked = {"deadline_s": 10, "mode": "ask", "target": {"cpu_cores": 1}, "bound_mib": BOUND_MIB}
    told = ApplicationPromise(**host.result("application.deflate", request_id="r", **asked))
    assert (told.promised.cpu_cores, told.expected_s) == (4096, 86_400)
    # Of the second one no record is left, so that nothing bounds what is said.
    for request_id in ("r", "forgotten"):
        released = ApplicationRelease(**host.result("application.status", request_id=request_id))
        assert released.released.cpu_cores == 4096
    bad.target = lambda id_: (409, refusal(id_, most))
    assert ApplicationPromise(**host.result("application.deflate", request_id="r2", **asked)).retry_after_s == 86_400


def test_words_of_a_hook_can_be_told_and_shown(host: Host, register: Register) -> None:
    foul = "never\ud800 \x1b[2J\u202e" + "x" * 5000
    register(BadHook(target=lambda id_: (409, {**refusal(id_), "reason": foul})))
    reason = ask(host)["reason"]
    assert reason.startswith("bad: never\ufffd \ufffd[2J\ufffd")
    assert reason.isprintable()
    assert len(reason) <= hooks.REASON_LENGTH + len("bad: ")


def test_an_answer_to_another_request_is_none_to_this_one(host: Host, register: Register) -> None:
    hook = register(BadHook(target=lambda id_: (202, promise("another"))))
    answer = ask(host)
    assert (answer["state"], answer["reason"]) == ("refused", "bad: answered for another request: another")
    hook.target = lambda id_: (202, promise(id_))
    hook.progress = lambda id_: (200, report("another"))
    host.result(
        "application.deflate",
        request_id="r2",
        deadline_s=10,
        mode="ask",
        target={"memory_mib": 700},
        bound_mib=BOUND_MIB,
    )
    status = host.result("application.status", request_id="r2")
    assert (status["state"], status["released"]) == ("failed", {})
    assert "answered for another request" in status["reason"]


def test_long_words_of_many_do_not_make_the_answer_too_long_for_a_line(
    guest: Bench, host: Host, register: Register
) -> None:
    words = "\u00e9" * 4000  # 24 kB as JSON
    body = offer()
    body["version"], body["modes"] = words, [words]
    hook = register(
        BadHook(
            capabilities=lambda: (200, body),
            target=lambda id_: (202, promise(id_, reason=words)),
            progress=lambda id_: (200, report(id_, reason=words, measured_by=words)),
        )
    )
    for i in range(12):
        guest.register(f"bad-{i}", hook.port)
    assert len(host.result("application.capabilities")["adapters"]) == 13
    assert ask(host)["state"] == "promised"
    assert host.result("application.status", request_id="r")["state"] == "released"


# --- garbage ---------------------------------------------------------------------------------------------------------

GARBAGE = {
    "nothing": b"",
    "no http": b"\x00\xff\x00\xff" * 100,
    "no json": http(200, b"<html>hello</html>"),
    "no object": http(200, b"[1, 2]"),
    "deep": http(200, b"[" * 60000),
    "half a body": b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{",
    "half a header": b"HTTP/1.1 200 OK\r\nContent-Le",
    "many headers": b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 200 + b"\r\n{}",
    "bad chunks": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
    "ten megabytes": http(200, b"x" * 10_000_000),
    "redirect": http(302, b"{}", "Location: http://127.0.0.1:1/deflation/v1/capabilities\r\n"),
    "error": http(500, b'{"error": "broken"}'),
    "other state": http(202, b'{"state": "perhaps"}'),
}


@pytest.mark.parametrize("where", ["capabilities", "target", "progress"])
@pytest.mark.parametrize("kind", GARBAGE)
def test_garbage_costs_the_applications_part_only(host: Host, register: Register, kind: str, where: str) -> None:
    hook = register(BadHook())
    setattr(hook, where, lambda *_: GARBAGE[kind])
    outcome, rows = deflated(host)
    assert rows[Layer.APPLICATION].verified == 0
    assert "bad: " in rows[Layer.APPLICATION].reason
    assert not any("Location" in path or path.startswith("GET /x") for path in hook.asked)
    assert host.result("status")["boot_id"]
    assert len(json.dumps(rows[Layer.APPLICATION].reason)) < 5000, outcome.sentence


# --- time ------------------------------------------------------------------------------------------------------------

SLOW: dict[str, Callable[[], Any]] = {
    "silent": lambda: None,
    "drip of a body": lambda: drip(http(200, b'{"state": "released"}')),
    "drip of headers": lambda: drip(b"HTTP/1.1 200 OK\r\n" + b"X-Y: z\r\n" * 100),
    "endless": endless,
    "continue": continued,
}


@pytest.mark.parametrize(
    ("kind", "where"),
    [
        *((kind, "target") for kind in SLOW),
        # The same reader reads them all.
        *((kind, where) for kind in ("silent", "endless") for where in ("capabilities", "progress")),
    ],
)
def test_who_is_slow_costs_a_limited_time_and_leaves_nothing_behind(
    host: Host, register: Register, serve: Serve, monkeypatch: pytest.MonkeyPatch, kind: str, where: str
) -> None:
    honest = Elastic(100)
    serve("honest", honest)
    assert host.result("status")["applications"]
    sockets, threads = open_sockets(), _hook_threads()
    hook = register(BadHook())
    limit_calls(hook, monkeypatch)
    setattr(hook, where, lambda *_: SLOW[kind]())
    began = time.monotonic()
    answer = ask(host, 600)
    assert answer["state"] == "promised", answer
    assert honest.targets, "the other application was not asked"
    if where == "progress":
        status = host.result("application.status", request_id="r")
        assert (status["state"], "bad: " in status["reason"]) in (("running", True), ("failed", True))
    else:
        assert "bad: " in answer["reason"]
    assert time.monotonic() - began < 20
    hook.stop()
    _until(lambda: open_sockets() <= sockets and _hook_threads() <= threads, "the agent gave up its calls")


@pytest.mark.usefixtures("usual_limits")
def test_a_drip_does_not_use_up_the_calls_of_its_hook_for_ever(
    host: Host, register: Register, monkeypatch: pytest.MonkeyPatch
) -> None:
    hook = register(BadHook(capabilities=lambda: drip(http(200, b" " * 1000))))
    limit_calls(hook, monkeypatch)
    for _ in range(hooks.CALLS_PER_HOOK + 1):
        assert host.result("status")["applications"] == []
    hook.capabilities = lambda: (200, offer())
    _until(lambda: bool(host.result("status")["applications"]), "the hook is asked again once it is well")


def test_who_promises_and_never_releases_costs_its_share_of_the_deadline(host: Host, register: Register) -> None:
    register(BadHook(progress=lambda id_: (200, report(id_, 0, state="running"))))
    outcome, rows = deflated(host)
    assert "not released within its share of the deadline" in rows[Layer.APPLICATION].reason
    assert rows[Layer.APPLICATION].verified == 0
    assert outcome.seconds <= 20


def test_a_hook_that_dies_in_the_middle_is_not_waited_for(guest: Bench, host: Host) -> None:
    hook = BadHook()
    guest.register("bad", hook.port)
    assert ask(host)["state"] == "promised"
    hook.stop()
    status = host.result("application.status", request_id="r")
    assert status["state"] == "failed"
    assert "cannot be reached" in status["reason"]


def test_a_hook_that_hangs_up_in_the_middle_of_its_work_is_failed(host: Host, register: Register) -> None:
    register(BadHook(progress=lambda _: b""))
    _, rows = deflated(host)
    assert rows[Layer.APPLICATION].promised == 100
    assert rows[Layer.APPLICATION].verified == 0


def limit_calls(hook: BadHook, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of this hook take a second at most; on a busy machine those of an honest one may take longer."""
    call = calls.call

    def limited(address: Any, request: Any, headers: Any, body: Any, limit_s: float, longest: int) -> tuple[int, bytes]:
        return call(address, request, headers, body, 1.0 if address[1] == hook.port else limit_s, longest)

    monkeypatch.setattr(calls, "call", limited)


def _hook_threads() -> int:
    return sum(thread.name.startswith("hook-") for thread in threading.enumerate())


def _until(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, f"not so: {what}"
        time.sleep(0.02)
