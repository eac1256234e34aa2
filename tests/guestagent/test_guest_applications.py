"""What the host asks of the applications, through the agent and their hooks."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from app_adapters.adapter import Adapter, Answer, Capabilities, Deadline, Promise, Refusal, Release, SizeRange
from app_adapters.errors import ApplicationError
from app_adapters.processes.inelastic import InelasticAdapter
from app_adapters.server import HookServer
from guestagent import applications
from guestagent.hooks import in_parallel
from tests.guestagent.elastic import Elastic, Serve, Workers
from tests.guestagent.harness import Bench, Host


class Both(Adapter):
    """Has memory and cores, refuses its first reinflation, and gives when `go` is set."""

    components = ("memory_mib", "cpu_cores")

    def __init__(self) -> None:
        self.targets: list[tuple[str, dict[str, float]]] = []
        self.go = threading.Event()

    def capabilities(self) -> Capabilities:
        memory, cpu = SizeRange(100.0, 10.0, 350.0, 1.0), SizeRange(4.0, 0.0, 4.0, 1.0)
        return Capabilities("both", "1", {"memory_mib": memory, "cpu_cores": cpu}, 0.5, True, ["ask", "force"])

    def deflate(self, target: dict[str, float], mode: str, deadline: Deadline) -> Answer:
        self.targets.append(("deflate", target))

        def work() -> Release:
            while not self.go.wait(0.01) and not deadline.passed:
                pass
            return Release(dict.fromkeys(target, 0.0), "itself", "done", complete=self.go.is_set())

        return Promise(dict.fromkeys(target, 0.0), 0.5, work)

    def reinflate(self, target: dict[str, float], deadline: Deadline) -> Answer:
        self.targets.append(("reinflate", target))
        if len(self.targets) == 1:
            return Refusal("not now", 1.0)
        return Promise({}, 0.5, lambda: Release({}, "itself", "done"))


def deflate(host: Host, request_id: str = "r1", target_mib: float = 800, **more: Any) -> dict[str, Any]:
    params = {"deadline_s": 60, "mode": "ask", "target": {"memory_mib": target_mib}, "bound_mib": 1024, **more}
    return host.result("application.deflate", request_id=request_id, **params)


def grow(host: Host, request_id: str, target_mib: float) -> dict[str, Any]:
    params = {"deadline_s": 60, "target": {"memory_mib": target_mib}, "bound_mib": 1024}
    return host.result("application.reinflate", request_id=request_id, **params)


def finished(host: Host, request_id: str) -> dict[str, Any]:
    while (status := host.result("application.status", request_id=request_id))["state"] == "running":
        pass
    return status


def test_without_adapters_the_answer_is_none(host: Host) -> None:
    assert deflate(host)["state"] == "none"
    assert host.result("application.capabilities") == {"adapters": []}
    assert host.result("application.status", request_id="r1")["state"] == "failed"
    assert host.result("application.status", request_id="never")["state"] == "unknown"


def test_a_deflation_reaches_the_application_with_its_part_and_comes_back_measured(host: Host, serve: Serve) -> None:
    app = Elastic(300)
    serve("app", app)
    # 1024 - (1024 - 800) - (424 used - 300 of the application) - 51.2 reserve = 624.8: no need to shrink.
    answer = deflate(host, "easy", 800)
    assert (answer["state"], answer["promised"], app.targets[-1]) == (
        "promised",
        {"memory_mib": 0},
        ("deflate", 624.8, "ask"),
    )
    finished(host, "easy")
    app.size_mib = 300
    answer = deflate(host, "hard", 400, mode="force")
    assert answer == {
        "request_id": "hard",
        "state": "promised",
        "promised": {"memory_mib": pytest.approx(300 - 224.8)},
        "expected_s": 0.5,
        "reason": "app: gladly",
        "retry_after_s": None,
    }
    assert app.targets[-1] == ("deflate", 224.8, "force")
    status = finished(host, "hard")
    assert (status["state"], status["measured_by"]) == ("released", "itself")
    assert status["released"]["memory_mib"] == pytest.approx(300 - 224.8)


def test_two_hooks_of_one_process_are_not_asked_for_what_need_not_go(guest: Bench, host: Host, serve: Serve) -> None:
    guest.tree.meminfo(4096, 1596)
    beside, inside = Elastic(2000, maximum_mib=4000), Elastic(2000, maximum_mib=4000)
    serve("jvm", beside)
    serve("shop", inside)
    deflate(host, "easy", 3072, bound_mib=4096)
    assert min(app.targets[-1][1] for app in (beside, inside)) >= 2000
    finished(host, "easy")
    deflate(host, "hard", 1536, bound_mib=4096)
    assert max(app.targets[-1][1] for app in (beside, inside)) < 2000


def test_a_question_waits_until_the_application_has_done(host: Host, serve: Serve) -> None:
    app = Elastic(300)
    serve("app", app)
    app.go.clear()
    deflate(host, target_mib=400)
    over = host.result("application.status", request_id="r1", until_released_mib=1, wait_s=0.1)
    assert over["state"] == "running", "its time is over"
    asked = host.ask("application.status", request_id="r1", until_released_mib=1, wait_s=5)
    app.go.set()
    answer = host.receive()
    assert (answer["id"], answer["result"]["state"]) == (asked, "released")


def test_the_same_request_again_starts_nothing_and_another_under_its_id_is_refused(host: Host, serve: Serve) -> None:
    app = Elastic(300)
    serve("app", app)
    first = deflate(host, "same", 400)
    assert deflate(host, "same", 400) == first
    host.hello("later")
    assert deflate(host, "same", 400) == first
    assert len(app.targets) == 1
    params = {"deadline_s": 60, "mode": "ask", "target": {"memory_mib": 300}, "bound_mib": 1024}
    code, message = host.error("application.deflate", request_id="same", **params)
    assert (code, message.split(":")[0]) == (-32602, "request_id")


def test_a_newer_attempt_takes_the_place_of_one_that_runs(host: Host, serve: Serve) -> None:
    app = Elastic(300)
    serve("app", app)
    app.go.clear()
    request_id = "a" * 80
    assert deflate(host, request_id, 400)["state"] == "promised"
    assert host.result("application.status", request_id=request_id)["state"] == "running"
    assert deflate(host, request_id + "#2", 450)["state"] == "promised"
    older = finished(host, request_id)
    assert older["state"] == "failed"
    assert older["reason"].startswith(f"app: called off for {request_id}#2: not in time")
    app.go.set()
    assert finished(host, request_id + "#2")["state"] == "released"
    assert app.size_mib == pytest.approx(274.8)


def test_a_refusing_application_is_a_refusal_with_its_reason(host: Host, serve: Serve) -> None:
    serve("rigid", InelasticAdapter("rigid", "the buffers are pinned"))
    answer = deflate(host)
    assert (answer["state"], answer["promised"]) == ("refused", {})
    assert "rigid: the buffers are pinned" in answer["reason"]
    assert host.result("application.status", request_id="r1")["state"] == "failed"


def test_of_several_applications_each_gives_by_its_size_and_a_refusal_hides_none(host: Host, serve: Serve) -> None:
    large, small = Elastic(200), Elastic(100)
    serve("large", large)
    serve("small", small)
    serve("rigid", InelasticAdapter("rigid", "never"))
    answer = deflate(host, target_mib=400)
    assert large.targets[0][1] == pytest.approx(224.8 * 2 / 3, abs=0.01)
    assert small.targets[0][1] == pytest.approx(224.8 / 3, abs=0.01)
    assert answer["promised"]["memory_mib"] == pytest.approx(300 - 224.8, abs=0.01)
    assert "rigid: never" in answer["reason"]
    status = finished(host, "r1")
    assert status["state"] == "released"
    assert status["released"]["memory_mib"] == pytest.approx(300 - 224.8, abs=0.01)


def test_cores_are_asked_of_those_that_give_them_by_what_each_has_at_full_size(host: Host, serve: Serve) -> None:
    workers, single, cache = Workers(4.0), Workers(1.0), Elastic(300)
    serve("workers", workers)
    serve("single", single)
    serve("cache", cache)
    # The guest has four CPUs at full size.
    answer = deflate(host, "cpu", target={"cpu_cores": 2.0})
    assert (workers.targets, single.targets, cache.targets) == ([{"cpu_cores": 2.0}], [{"cpu_cores": 0.5}], [])
    assert answer["promised"] == {"cpu_cores": 2.5}
    assert "cache: gives nothing of what is asked" in answer["reason"]
    assert finished(host, "cpu")["released"] == {"cpu_cores": 2.5}
    both = deflate(host, "both", target={"cpu_cores": 1.0, "memory_mib": 400})
    assert workers.targets[-1] == {"cpu_cores": 1.0}
    assert cache.targets[-1] == ("deflate", 224.8, "ask")
    assert both["promised"] == {"cpu_cores": pytest.approx(1.25), "memory_mib": pytest.approx(75.2)}
    host.result("application.reinflate", request_id="back", deadline_s=60, target={"cpu_cores": 4.0}, bound_mib=1024)
    assert (workers.targets[-1], single.targets[-1]) == ({"cpu_cores": 4.0}, {"cpu_cores": 1.0})


def test_a_vm_whose_size_is_no_whole_number_of_cores_has_all_of_its_applications_again(
    host: Host, serve: Serve
) -> None:
    workers = Workers(4.0)
    serve("workers", workers)
    deflate(host, "down", target={"cpu_cores": 1.75}, full_cores=3.5)
    assert workers.targets[-1] == {"cpu_cores": 2.0}
    finished(host, "down")
    back = {"deadline_s": 60, "target": {"cpu_cores": 3.5}, "full_cores": 3.5}
    host.result("application.reinflate", request_id="back", **back)
    assert workers.targets[-1] == {"cpu_cores": 4.0}


def test_where_nobody_gives_what_is_asked_it_is_refused_and_nobody_is_asked(host: Host, serve: Serve) -> None:
    cache = Elastic(300)
    serve("cache", cache)
    answer = deflate(host, target={"cpu_cores": 2.0})
    assert (answer["state"], answer["reason"]) == ("refused", "cache: gives nothing of what is asked")
    assert cache.targets == []


@pytest.mark.slow
@pytest.mark.usefixtures("usual_limits")
def test_a_hung_hook_is_refused_in_the_end_and_holds_up_no_status(host: Host, serve: Serve) -> None:
    app = Elastic(300)
    app.hang = threading.Event()
    serve("hung", app)
    asked = host.ask(
        "application.deflate", request_id="h", deadline_s=9, mode="ask", target={"memory_mib": 400}, bound_mib=1024
    )
    status_id = host.ask("status")
    first, second = host.receive(), host.receive()
    app.hang.set()
    assert (first["id"], second["id"]) == (status_id, asked)
    assert second["result"]["state"] == "refused"
    assert "hung: no answer within" in second["result"]["reason"]


@pytest.mark.parametrize(
    ("deadline_s", "offers_s", "answers_s"), [(60.0, 5.0, 6.0), (10.0, 1.5, 2.5), (2.5, 1.0, 2.25), (1.0, 0.4, 0.9)]
)
@pytest.mark.usefixtures("usual_limits")
def test_an_answer_to_a_short_deadline_comes_before_its_end(
    host: Host, serve: Serve, monkeypatch: pytest.MonkeyPatch, deadline_s: float, offers_s: float, answers_s: float
) -> None:
    limits_s: list[float] = []

    def waits(calls: Any, limit_s: float) -> Any:
        limits_s.append(limit_s)
        return in_parallel(calls, 20.0)

    monkeypatch.setattr(applications, "in_parallel", waits)
    monkeypatch.setattr(time, "monotonic", lambda: 7.0)
    serve("cache", Elastic(300))
    assert deflate(host, target_mib=400, deadline_s=deadline_s)["state"] == "promised"
    assert limits_s == pytest.approx([offers_s, answers_s])


@pytest.mark.slow
@pytest.mark.usefixtures("usual_limits")
def test_an_application_that_promises_after_its_time_is_followed_all_the_same(host: Host, serve: Serve) -> None:
    late = Elastic(200)
    serve("late", late)
    for request_id, state in (("alone", "refused"), ("both", "promised")):
        late.hang = threading.Event()
        late.go.clear()
        assert deflate(host, request_id, 400)["state"] == state
        late.hang.set()
        end = time.monotonic() + 20
        while (said := host.result("application.status", request_id=request_id)["state"]) != "running":
            assert time.monotonic() < end, said
            time.sleep(0.02)
        late.go.set()
        status = finished(host, request_id)
        assert (status["state"], status["released"]["memory_mib"] > 0) == ("released", True), status
        serve("quick", Elastic(100))


def test_a_wrong_token_at_the_hook_is_a_refusal_that_says_so(guest: Bench, host: Host, tmp_path: Path) -> None:
    (tmp_path / "other").write_text("another")
    server = HookServer(Elastic(300), port=0, token_file=str(tmp_path / "other")).start()
    guest.register("app", server.address[1])
    answer = deflate(host)
    server.stop()
    assert answer["state"] == "refused"
    assert "401" in answer["reason"]


def test_an_application_that_is_gone_is_refused_or_failed(guest: Bench, host: Host, serve: Serve) -> None:
    server = HookServer(Elastic(300), port=0, token_file=str(guest.run_dir / "token")).start()
    guest.register("app", server.address[1])
    assert deflate(host, "before", 400)["state"] == "promised"
    server.stop()
    assert host.result("application.status", request_id="before")["state"] == "failed"
    answer = deflate(host, "after", 400)
    assert answer["state"] == "refused"
    assert "cannot be reached" in answer["reason"]


def test_a_reinflation_gives_the_application_its_part_again(host: Host, serve: Serve) -> None:
    app = Elastic(100, maximum_mib=350)
    serve("app", app)
    answer = host.result(
        "application.reinflate", request_id="back", deadline_s=60, target={"memory_mib": 1024}, bound_mib=1024
    )
    assert answer == {"request_id": "back", "state": "promised", "reason": "app: gladly"}
    assert app.targets == [("reinflate", 350.0, "")]
    assert finished(host, "back")["released"] == {"memory_mib": 0.0}


@pytest.mark.parametrize("full", [True, False, None])
def test_at_full_size_each_application_has_its_own_maximum_again_where_the_host_says_that_it_is(
    host: Host, serve: Serve, full: bool | None
) -> None:
    # Beside what is not theirs there is no room for both maximums, nor would the smaller one grow by its share.
    large, small = Elastic(290, maximum_mib=500), Elastic(10, maximum_mib=400)
    serve("large", large)
    serve("small", small)
    said = {} if full is None else {"full": full}
    target = {"memory_mib": 1024}
    host.result("application.reinflate", request_id="back", deadline_s=60, target=target, bound_mib=1024, **said)
    found = [app.targets[-1][1] for app in (large, small)]
    assert (found == [500.0, 400.0]) == bool(full), found


def test_an_application_that_cannot_take_a_reinflation_now_is_told_again(
    host: Host, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(applications, "AGAIN_S", (0.05, 0.1))
    busy, other = Elastic(100, maximum_mib=350), Elastic(50, maximum_mib=200)
    serve("busy", busy)
    serve("other", other)
    busy.go.clear()
    grow(host, "first", 900)
    answer = grow(host, "second", 1024)
    assert "busy: another operation is under way" in answer["reason"]
    targets = list(other.targets)
    busy.go.set()
    while len(busy.targets) < 2:
        time.sleep(0.01)
    assert busy.targets[-1][:2] == ("reinflate", 350.0)
    assert other.targets == targets, "who has taken it on is not told again"


@pytest.mark.parametrize("fails", ["decision", "work", "refusal"])
def test_an_application_that_fails_in_a_reinflation_is_told_again(
    host: Host, serve: Serve, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    monkeypatch.setattr(applications, "AGAIN_S", (0.05, 0.1))

    class Failing(Elastic):
        def reinflate(self, target: dict[str, float], deadline: Deadline) -> Answer:
            answer = super().reinflate(target, deadline)
            if len(self.targets) > 1:
                return answer
            if fails == "decision":
                raise ApplicationError("it starts just now")
            if fails == "refusal":
                return Refusal("its file is not included")

            def work() -> Release:
                raise ApplicationError("it has just ended")

            return Promise({}, 0.1, work)

    app = Failing(100, maximum_mib=350)
    serve("app", app)
    grow(host, "back", 1024)
    while app.size_mib != 350:
        time.sleep(0.01)
    while any(thread.name == "reinflation owed" for thread in threading.enumerate()):
        time.sleep(0.01)
    assert len(app.targets) == 2


def test_an_application_that_refuses_a_reinflation_for_good_is_not_told_again(host: Host, serve: Serve) -> None:
    class Final(Elastic):
        def reinflate(self, target: dict[str, float], deadline: Deadline) -> Answer:
            return Refusal("it never grows", for_good=True)

    serve("app", Final(100, maximum_mib=350))
    others = threading.enumerate()  # of other tests
    assert grow(host, "back", 1024)["state"] == "refused"
    begun = [thread.name for thread in threading.enumerate() if thread not in others]
    assert "reinflation owed" not in begun


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize(("total_mib", "less"), [(2048, False), (1200, True)])
def test_what_a_reinflation_owes_is_no_more_for_being_told_later(
    guest: Bench, host: Host, serve: Serve, monkeypatch: pytest.MonkeyPatch, total_mib: int, less: bool, full: bool
) -> None:
    monkeypatch.setattr(applications, "AGAIN_S", (0.05, 0.1))

    class Late(Elastic):
        """Refuses the first time; then the guest plugs what it was given, or more is taken without a word."""

        def reinflate(self, target: dict[str, float], deadline: Deadline) -> Answer:
            if self.targets:
                return super().reinflate(target, deadline)
            self.targets.append(("reinflate", target["memory_mib"], ""))
            guest.tree.meminfo(total_mib, total_mib - 600)
            return Refusal("not now", 1.0)

    guest.tree.meminfo(1500, 900)
    app = Late(300, maximum_mib=5000)
    serve("app", app)
    back = {"deadline_s": 60, "target": {"memory_mib": 2048}, "bound_mib": 1500, "full": full}
    host.result("application.reinflate", request_id="back", **back)
    while len(app.targets) < 2:
        time.sleep(0.01)
    assert app.targets[0][1] == 5000.0 or not full
    assert app.targets[1][1] <= app.targets[0][1]
    assert not less or app.targets[1][1] < app.targets[0][1]


def test_what_a_reinflation_owes_is_not_told_after_the_next_deflation(
    host: Host, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(applications, "AGAIN_S", (0.05, 0.1))
    app = Elastic(300)
    serve("app", app)
    app.go.clear()
    grow(host, "first", 900)
    assert "under way" in grow(host, "second", 1024)["reason"]
    assert deflate(host, "then", 400)["state"] == "refused"
    app.go.set()
    finished(host, "first")
    while any(thread.name == "reinflation owed" for thread in threading.enumerate()):
        time.sleep(0.01)
    assert [direction for direction, *_ in app.targets] == ["reinflate"]


def test_what_a_reinflation_owes_of_memory_outlives_a_deflation_of_cpus(
    guest: Bench, host: Host, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(applications, "AGAIN_S", (0.05, 0.1))
    app, workers = Elastic(100, maximum_mib=350), Workers(4.0)
    serve("app", app)
    serve("workers", workers)
    app.go.clear()
    grow(host, "first", 900)
    params = {"deadline_s": 60, "target": {"memory_mib": 1024, "cpu_cores": 4.0}, "bound_mib": 1024}
    assert "under way" in host.result("application.reinflate", request_id="second", **params)["reason"]
    deflate(host, "then", target={"cpu_cores": 2.0})
    app.go.set()
    while len(app.targets) < 2:
        time.sleep(0.01)
    assert app.targets[-1][:2] == ("reinflate", 350.0)
    assert workers.targets[-1] == {"cpu_cores": 2.0}


def test_what_a_reinflation_owes_calls_off_no_deflation_of_another_component(
    host: Host, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(applications, "AGAIN_S", (0.05, 0.1))
    both = Both()
    serve("both", both)
    params = {"deadline_s": 60, "target": {"memory_mib": 1024, "cpu_cores": 4.0}, "bound_mib": 1024}
    host.result("application.reinflate", request_id="back", **params)
    assert deflate(host, "then", target={"cpu_cores": 2.0})["state"] == "promised"
    time.sleep(0.5)
    assert host.result("application.status", request_id="then")["state"] == "running"
    both.go.set()
    assert finished(host, "then")["state"] == "released"
    while len(both.targets) < 3:
        time.sleep(0.01)
    assert both.targets[2] == ("reinflate", {"memory_mib": 350.0, "cpu_cores": 2.0})


def test_a_target_without_memory_asks_nobody(host: Host, serve: Serve) -> None:
    app = Elastic(100)
    serve("app", app)
    answer = deflate(host, target={"cpu_cores": 1.5})
    assert (answer["state"], app.targets) == ("refused", [])


def test_a_restarted_agent_still_tells_how_a_request_ended(
    guest: Bench, host: Host, serve: Serve, tmp_path: Path
) -> None:
    serve("app", Elastic(300))
    deflate(host, "r1", 400)
    finished(host, "r1")
    guest.agent._applications._records.clear()
    status = host.result("application.status", request_id="r1")
    assert (status["state"], status["measured_by"]) == ("released", "itself")
    assert deflate(host, "r1", 400)["reason"] == "app: is at it already"
