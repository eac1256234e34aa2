"""Tasks at the manager, over HTTP, on both kinds of stores: with an engine in memory that fails as it is told to."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cluster_manager.plans.plans import VMPhase
from ebbtide.matcher.match import tasks as matched
from ebbtide.matcher.match.attempts import EngineMachine
from ebbtide.matcher.match.tasks import BEGIN_LIMIT_S, TaskOrder
from tests.manager.cluster import Cluster, cluster_of, vm
from tests.manager.fake_agent import FakeAgent
from tests.manager.fake_engine import FakeEngine, settings
from tests.manager.plan_events import record
from tests.waiting import until

each_store = pytest.mark.usefixtures("each_store")


def body(name: str, request_id: str | None = None, **fields: Any) -> Any:
    task = {"name": name, "command": ["sleep", "1"], "cores": 2, "duration_s": 100.0, **fields}
    return {"request_id": request_id or f"submit-{name}", "task": task}


async def submit(cluster: Cluster, name: str, **fields: Any) -> Any:
    status, answer = await cluster.call("POST", "/v1/tasks", json=body(name, **fields))
    assert status == 202, answer
    return answer


async def task(cluster: Cluster, name: str) -> Any:
    return await cluster.get(f"/v1/tasks/{name}")


async def becomes(cluster: Cluster, name: str, state: str) -> Any:
    async def is_so() -> bool:
        return bool((await task(cluster, name))["state"] == state)

    await until(is_so)
    return await task(cluster, name)


def condition(test: Callable[[], bool]) -> Callable[[], Awaitable[bool]]:
    async def asked() -> bool:
        return test()

    return asked


async def looked_since(cluster: Cluster, engine: FakeEngine) -> None:
    """Until the engine was looked at after a report of each host, and what followed was done."""
    await cluster.ready()
    looks = engine.calls.count(("look",))
    await until(condition(lambda: engine.calls.count(("look",)) > looks + 2))


@each_store
async def test_a_task_goes_elsewhere_where_a_machine_cannot_write_records_and_the_machine_is_reported(
    tmp_path: Path,
) -> None:
    engine = FakeEngine(far=4)
    engine.unwritable.add("far")
    async with cluster_of(tmp_path, **settings(engine)) as cluster:
        await submit(cluster, "train")

        async def said() -> bool:
            found = [row["drained"] for row in (await cluster.get("/v1/engine"))["machines"]]
            return found != [] and "could not write their records there" in found[0]

        await until(said)
        await looked_since(cluster, engine)
        assert (await task(cluster, "train"))["state"] == "waiting"
        assert len([call for call in engine.calls if call[0] == "release"]) == 1
        assert ("drain", "far") not in engine.calls
        engine.machines["near"] = EngineMachine("near", 4, 4)
        assert (await becomes(cluster, "train", "running"))["machine"] == "near"


@each_store
async def test_a_task_is_matched_runs_and_is_done(tmp_path: Path) -> None:
    engine = FakeEngine(far=4)
    async with cluster_of(tmp_path, **settings(engine)) as cluster:
        answer = await submit(cluster, "train", restartable=True)
        assert (answer["state"], answer["attempts"], answer["output"]) == ("waiting", 0, None)
        running = await becomes(cluster, "train", "running")
        assert (running["machine"], running["attempts"], running["cores"]) == ("far", 1, 2)
        assert running["output"].startswith("/nowhere/ebb.train.")
        status = await cluster.get("/v1/engine")
        assert (status["kind"], status["reachable"], status["sentence"]) == ("fake", True, "it answers")
        assert [(row["name"], row["tasks"], row["known"]) for row in status["machines"]] == [("far", ["train"], False)]
        engine.end("train")
        done = await becomes(cluster, "train", "done")
        assert (done["exit_code"], done["machine"]) == (0, "far")
        events = (await cluster.get("/v1/events"))["events"]
        assert [row["kind"] for row in events] == ["task-done", "task-started", "task-submitted"]
        assert engine.begun == list(dict.fromkeys(engine.begun))


@each_store
async def test_the_same_submission_again_is_one_task_and_another_one_is_refused(tmp_path: Path) -> None:
    async with cluster_of(tmp_path, **settings(FakeEngine(far=4))) as cluster:
        first = await submit(cluster, "train")
        assert (await submit(cluster, "train"))["submitted_at"] == first["submitted_at"]
        status, problem = await cluster.call("POST", "/v1/tasks", json=body("other", "submit-train"))
        assert (status, problem["field"]) == (409, "request_id")
        status, problem = await cluster.call("POST", "/v1/tasks", json=body("train", "anew"))
        assert (status, problem["field"]) == (409, "task.name")
        assert [row["name"] for row in (await cluster.get("/v1/tasks"))["tasks"]] == ["train"]


@each_store
@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"cores": 0}, "task.cores"),
        ({"duration_s": -1.0}, "task.duration_s"),
        ({"command": []}, "task.command"),
        ({"command": ["a\x00b"]}, "task.command.0"),
        ({"max_attempts": 0}, "task.max_attempts"),
        ({"restartable": "yes"}, "task.restartable"),
        ({"memory": 3}, "task.memory"),
        ({"preemption_aversion": 1.5}, "task.preemption_aversion"),
        ({"preemption_aversion": -0.1}, "task.preemption_aversion"),
        ({"checkpoint_s": 0.0}, "task.checkpoint_s"),
    ],
)
async def test_bad_input_names_the_field(tmp_path: Path, fields: dict[str, Any], field: str) -> None:
    async with cluster_of(tmp_path, **settings(FakeEngine(far=4))) as cluster:
        status, problem = await cluster.call("POST", "/v1/tasks", json=body("train", **fields))
        assert (status, problem["field"]) == (400, field)
        assert (await cluster.get("/v1/tasks"))["tasks"] == []


@each_store
async def test_without_an_engine_tasks_are_refused_and_said_to_be(tmp_path: Path) -> None:
    async with cluster_of(tmp_path) as cluster:
        status, problem = await cluster.call("POST", "/v1/tasks", json=body("train"))
        assert status == 409
        assert "--engine-file" in problem["detail"]
        assert (await cluster.get("/v1/engine"))["kind"] == "none"
        for method, path in (("GET", "/v1/tasks/none"), ("DELETE", "/v1/tasks/none")):
            assert (await cluster.call(method, path))[0] == 404


@each_store
async def test_lists_are_filtered_and_come_in_pages(tmp_path: Path) -> None:
    engine = FakeEngine(far=2)
    async with cluster_of(tmp_path, **settings(engine)) as cluster:
        for number in range(5):
            await submit(cluster, f"t-{number}")
        await becomes(cluster, "t-0", "running")
        rows, after = [], ""
        while True:
            page = await cluster.get(f"/v1/tasks?limit=2{after}")
            rows += [row["name"] for row in page["tasks"]]
            if page["next"] is None:
                break
            after = f"&after={page['next']}"
        assert rows == ["t-4", "t-3", "t-2", "t-1", "t-0"]
        assert [row["name"] for row in (await cluster.get("/v1/tasks?machine=far"))["tasks"]] == ["t-0"]
        assert len((await cluster.get("/v1/tasks?state=waiting"))["tasks"]) == 4
        assert [row["name"] for row in (await cluster.get("/v1/tasks?prefix=t-3"))["tasks"]] == ["t-3"]
        assert (await cluster.call("GET", "/v1/tasks?after=x"))[0] == 400


@each_store
async def test_an_explanation_says_what_a_task_waits_for(tmp_path: Path) -> None:
    # A machine that is no VM may have a name that no VM can have.
    far = "Far_3.example"
    engine = FakeEngine(**{far: 3})
    async with cluster_of(tmp_path, **settings(engine)) as cluster:
        began_s = asyncio.get_running_loop().time()
        await submit(cluster, "first")
        await becomes(cluster, "first", "running")
        await submit(cluster, "second")
        await submit(cluster, "third", cores=3)
        # Its VM was deflated.
        engine.machines[far] = EngineMachine(far, 3, 2)

        async def explained() -> bool:
            second, third = [await cluster.get(f"/v1/tasks/{name}/explanation") for name in ("second", "third")]
            return bool(second["waits_for"]) and "no machine" in third["sentence"]

        await until(explained)
        second = await cluster.get("/v1/tasks/second/explanation")
        assert (second["waits_for"], second["ahead"]) == (far, 0)
        assert f"it waits for {far}, free in" in second["sentence"]
        assert [(offer["machine"], offer["completion_probability"]) for offer in second["offers"]] == [(far, None)]
        elapsed_s = asyncio.get_running_loop().time() - began_s
        assert 199 - elapsed_s < second["offers"][0]["expected_s"] <= 200
        third = await cluster.get("/v1/tasks/third/explanation")
        assert (third["waits_for"], third["ahead"], third["offers"]) == (None, 1, [])
        assert "no machine has 3 usable cores; the largest has 2" in third["sentence"]


@each_store
async def test_what_a_task_says_of_preemption_is_kept_and_a_silent_one_is_the_same_as_before(tmp_path: Path) -> None:
    async with cluster_of(tmp_path, **settings(FakeEngine(far=4))) as cluster:
        await submit(cluster, "averse", preemption_aversion=0.5, checkpoint_s=60.0)
        found = await task(cluster, "averse")
        assert (found["preemption_aversion"], found["checkpoint_s"]) == (0.5, 60.0)
        # Said or not, it is the same request.
        first = await submit(cluster, "plain")
        again = await submit(cluster, "plain", preemption_aversion=0.0, checkpoint_s=None)
        assert (again["submitted_at"], again["preemption_aversion"], again["checkpoint_s"]) == (
            first["submitted_at"],
            0.0,
            None,
        )
        status, problem = await cluster.call("POST", "/v1/tasks", json=body("plain", preemption_aversion=0.1))
        assert (status, problem["field"]) == (409, "request_id")
        assert cluster.manager is not None
        stored = await cluster.manager.store.task(name="plain")
        assert stored is not None
        # As stores of earlier versions have it.
        assert "preemption_aversion" not in stored.fingerprint
        assert "checkpoint_s" not in stored.fingerprint


@each_store
async def test_an_explanation_has_the_probability_that_a_machine_keeps_its_cores(tmp_path: Path) -> None:
    agent = FakeAgent("host-a", cpu_cores=6.0, memory_mib=2400.0)
    engine = FakeEngine(**{"low-1": 4, "low-2": 4})
    async with cluster_of(tmp_path, agent, **settings(engine)) as cluster:
        now = time.time()
        assert cluster.manager is not None
        await record(cluster.manager.store, "old", agent.id, VMPhase.ENDED)
        # Others have taught that after a growth comes a shrink, after 300 s on average.
        for number in range(20):
            before, after = (1.0, 2.0) if number % 2 else (2.0, 1.0)
            agent.add_change("old", before, after, at=now - 8000.0 + (200.0 if number % 3 else 400.0) * number)
        for name in ("low-1", "low-2"):
            await cluster.create(vm(name))
        await until(condition(lambda: [m.usable_cores for m in engine.machines.values()] == [3, 3]))

        async def known() -> bool:
            ranked = (await cluster.get("/v1/machines?duration_s=60"))["machines"]
            return [row["completion_probability"] is not None for row in ranked] == [True, True]

        await until(known)
        for name in ("first", "second"):
            await submit(cluster, name, cores=3)
            await becomes(cluster, name, "running")
        await submit(cluster, "averse", cores=3, preemption_aversion=0.5)

        async def explained() -> bool:
            return bool((await cluster.get("/v1/tasks/averse/explanation"))["waits_for"])

        await until(explained)
        found = await cluster.get("/v1/tasks/averse/explanation")
        assert found["waits_for"] == found["offers"][0]["machine"]
        assert {offer["machine"] for offer in found["offers"]} == {"low-1", "low-2"}
        for offer in found["offers"]:
            assert 0.0 <= offer["completion_probability"] < 1.0
            averse_s = 100.0 * (1.0 - offer["completion_probability"])
            assert offer["compared_s"] == pytest.approx(offer["expected_s"] + averse_s)
        assert f"keeps its cores with {found['offers'][0]['completion_probability']:.0%}" in found["sentence"]
        # Of the second: what is promised to one counts as taken for those behind it.
        await submit(cluster, "behind", cores=3)

        async def behind() -> bool:
            return bool((await cluster.get("/v1/tasks/behind/explanation"))["waits_for"])

        await until(behind)
        assert (await cluster.get("/v1/tasks/behind/explanation"))["waits_for"] != found["waits_for"]


@each_store
async def test_cancelling_ends_what_waits_and_what_runs(tmp_path: Path) -> None:
    engine = FakeEngine(far=2)
    async with cluster_of(tmp_path, **settings(engine)) as cluster:
        for name in ("runs", "waits"):
            await submit(cluster, name)
        await becomes(cluster, "runs", "running")
        for name in ("runs", "waits", "runs"):
            assert (await cluster.call("DELETE", f"/v1/tasks/{name}"))[0] == 202
        assert "before it began" in (await becomes(cluster, "waits", "cancelled"))["sentence"]
        assert "while it ran on far" in (await becomes(cluster, "runs", "cancelled"))["sentence"]
        await until(condition(lambda: not any(one.seen.lives for one in engine.attempts.values())))
        assert len(engine.begun) == 1


# --- cores -----------------------------------------------------------------------------------------------------------


@each_store
async def test_the_cores_of_the_vms_are_the_cores_of_the_machines(tmp_path: Path) -> None:
    agent = FakeAgent("host-a", cpu_cores=6.0, memory_mib=2400.0)
    engine = FakeEngine(**{"low-1": 4, "low-2": 4})
    async with cluster_of(tmp_path, agent, **settings(engine)) as cluster:
        for name in ("low-1", "low-2"):
            await cluster.create(vm(name))
        await until(condition(lambda: [m.usable_cores for m in engine.machines.values()] == [3, 3]))
        await submit(cluster, "safe", cores=3, restartable=True)
        await submit(cluster, "once", cores=3)
        for name in ("safe", "once"):
            await becomes(cluster, name, "running")
        await cluster.create(vm("high-1", "fixed", 3.0, 800.0))
        # 1.5 cores are left to each: who may be begun again waits for room, who may not goes on.
        preempted = await becomes(cluster, "safe", "waiting")
        assert (preempted["preemptions"], preempted["attempts"]) == (1, 1)
        assert "shrank to 1 cores" in preempted["sentence"]
        assert (await task(cluster, "once"))["state"] == "running"
        assert [m.usable_cores for m in engine.machines.values()] == [1, 1]
        await cluster.delete("high-1")
        again = await becomes(cluster, "safe", "running")
        assert (again["attempts"], again["preemptions"]) == (2, 1)
        assert [row["kind"] for row in (await cluster.get("/v1/events?kind=task-preempted"))["events"]] == [
            "task-preempted"
        ]
        # A host that is silent has not lost its cores.
        await agent.die()
        engine.end("once")
        await becomes(cluster, "once", "done")
        assert [m.usable_cores for m in engine.machines.values()] == [3, 3]


@each_store
async def test_a_vm_that_is_stopped_has_no_cores(tmp_path: Path) -> None:
    agent = FakeAgent("host-a", cpu_cores=6.0, memory_mib=2400.0)
    engine = FakeEngine(**{"low-1": 4})
    async with cluster_of(tmp_path, agent, **settings(engine)) as cluster:
        await cluster.create(vm("low-1"))
        await until(condition(lambda: engine.machines["low-1"].usable_cores == 3))
        await cluster.call("POST", "/v1/vms/low-1/stop", json={"request_id": "stop"})
        await until(condition(lambda: engine.machines["low-1"].drained != ""))
        assert engine.machines["low-1"].usable_cores == 0


# --- failures --------------------------------------------------------------------------------------------------------


@each_store
async def test_an_engine_that_is_away_is_said_and_tasks_wait_for_it(tmp_path: Path) -> None:
    engine = FakeEngine(far=4)
    engine.unreachable = {"start", "look"}
    async with cluster_of(tmp_path, **settings(engine)) as cluster:
        await submit(cluster, "train")

        async def said() -> bool:
            return "the engine is away" in (await cluster.get("/v1/engine"))["sentence"]

        await until(said)
        assert "the engine is away" in (await task(cluster, "train"))["sentence"]
        assert (await cluster.get("/v1/engine"))["reachable"] is False
        engine.unreachable = set()
        await becomes(cluster, "train", "running")
        assert (await cluster.get("/v1/engine"))["reachable"] is True


@each_store
async def test_what_one_machine_is_refused_keeps_no_other_task(tmp_path: Path) -> None:
    engine = FakeEngine(far=4)
    engine.refusing = {"set_usable_cores", "forget"}
    async with cluster_of(tmp_path, **settings(engine)) as cluster:
        await submit(cluster, "first")
        await becomes(cluster, "first", "running")
        engine.end("first")
        await becomes(cluster, "first", "done")
        await submit(cluster, "second")
        await becomes(cluster, "second", "running")


@each_store
async def test_an_engine_that_refuses_something_can_be_used(tmp_path: Path) -> None:
    engine = FakeEngine(**{"low-1": 4})
    engine.refusing = {"set_usable_cores"}
    agent = FakeAgent("host-a", cpu_cores=6.0, memory_mib=2400.0)
    async with cluster_of(tmp_path, agent, **settings(engine)) as cluster:
        await cluster.create(vm("low-1"))

        async def said() -> bool:
            return "refused something: the engine does not want to" in (await cluster.get("/v1/engine"))["sentence"]

        await until(said)
        assert (await cluster.get("/v1/engine"))["reachable"] is True
        await submit(cluster, "train")
        assert "cannot be used" not in (await becomes(cluster, "train", "running"))["sentence"]
        engine.refusing = set()
        await until(condition(lambda: engine.machines["low-1"].usable_cores == 3))
        await looked_since(cluster, engine)
        assert (await cluster.get("/v1/engine"))["sentence"] == "it answers"


@each_store
async def test_a_round_that_takes_long_takes_nothing_back_that_it_has_just_released(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, late = FakeEngine(far=4), {"s": 0.0}
    monkeypatch.setattr(engine, "_begin", lambda: None)
    engine.before = lambda name: late.update(s=2 * BEGIN_LIMIT_S) if name == "release" else None
    async with cluster_of(tmp_path, **settings(engine)) as cluster:
        assert cluster.manager is not None
        monkeypatch.setattr(cluster.manager.tasks, "_clock", lambda: time.time() + late["s"])
        await submit(cluster, "train")
        await becomes(cluster, "train", "released")
        await looked_since(cluster, engine)
        await looked_since(cluster, engine)
        assert (await task(cluster, "train"))["state"] == "released"
        assert not any(call[0] == "cancel" for call in engine.calls)


@each_store
async def test_a_task_that_the_engine_does_not_take_keeps_nobody_behind_it_and_is_failed_at_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = FakeEngine(far=2)
    engine.refusing_tasks = {"bad"}
    async with cluster_of(tmp_path, **settings(engine)) as cluster:
        await submit(cluster, "bad")
        await submit(cluster, "good")
        await becomes(cluster, "good", "running")
        status = await cluster.get("/v1/engine")
        assert (status["reachable"], status["sentence"]) == (True, "it answers")
        assert "did not take it: it has DOS line breaks" in (await becomes(cluster, "bad", "waiting"))["sentence"]
        tries = sum(call[0] == "submit" and ".bad." in call[1] for call in engine.calls)
        await looked_since(cluster, engine)
        assert sum(call[0] == "submit" and ".bad." in call[1] for call in engine.calls) == tries == 1
        monkeypatch.setattr(matched, "REFUSED_PAUSE_S", 0.01)
        failed = await becomes(cluster, "bad", "failed")
        assert failed["sentence"] == "it could not be begun 5 times: it has DOS line breaks"
        assert [row["vm"] for row in await cluster.events("task-failed")] == [None]
        # Whoever was refused for another reason, and is taken then, runs.
        engine.refusing_tasks = {"late"}
        await submit(cluster, "late")
        await until(condition(lambda: any(".late." in call[1] for call in engine.calls if call[1:])))
        engine.refusing_tasks = set()
        engine.end("good")
        await becomes(cluster, "late", "running")


@each_store
async def test_what_is_nobodys_is_ended_also_while_the_engine_refuses_something_else(tmp_path: Path) -> None:
    engine = FakeEngine(far=4)
    engine.refusing = {"forget"}
    async with cluster_of(tmp_path, **settings(engine)) as cluster:
        await submit(cluster, "train")
        await becomes(cluster, "train", "running")
        engine.end("train")
        await becomes(cluster, "train", "done")
        engine.machines["far"] = replace(engine.machines["far"], usable_cores=5)
        engine.refusing = {"set_usable_cores"}
        stray = engine.begun[0].removesuffix(".1") + ".9"
        await engine.submit(stray, TaskOrder("train", ("true",)))
        await until(condition(lambda: ("cancel", stray) in engine.calls))


@each_store
@pytest.mark.parametrize("call", ["submit", "release", "cancel", "look", "forget"])
@pytest.mark.parametrize("done", [False, True])
async def test_a_manager_killed_at_any_call_loses_and_doubles_nothing(tmp_path: Path, call: str, done: bool) -> None:
    """``done``: whether the engine had done what it was asked for."""
    engine = FakeEngine(far=2)
    reached = asyncio.Event()

    def stop_here(name: str) -> None:
        if name == call and not reached.is_set():
            reached.set()
            raise asyncio.CancelledError

    def set_trap() -> None:
        if not done:
            engine.before = stop_here
            return
        real = getattr(engine, call)

        async def then_stop(*words: Any) -> Any:
            if reached.is_set():
                return await real(*words)
            await real(*words)
            reached.set()
            raise asyncio.CancelledError

        setattr(engine, call, then_stop)

    async with cluster_of(tmp_path, **settings(engine)) as cluster:
        late = call in ("cancel", "forget")
        if not late:
            set_trap()
        for name, restartable in (("safe", True), ("once", False)):
            await submit(cluster, name, restartable=restartable)
        if late:
            await becomes(cluster, "safe", "running")
            set_trap()
        if call == "cancel":
            engine.machines["far"] = replace(engine.machines["far"], usable_cores=0)
        if call == "forget":
            engine.end("safe")
        async with asyncio.timeout(20):
            await reached.wait()
        await cluster.kill_manager()
        engine.machines["far"] = replace(engine.machines["far"], usable_cores=2, drained="")
        await cluster.start_manager()
        await all_done(cluster, engine, "safe", "once")
        assert sum(".once." in name for name in engine.begun) == 1
        assert len(engine.begun) == len(set(engine.begun))
        # Cancelled means shrunk here, so that it began twice.
        assert sum(".safe." in name for name in engine.begun) == (2 if call == "cancel" else 1)


async def all_done(cluster: Cluster, engine: FakeEngine, *names: str) -> None:
    """Let everything run to its end."""

    async def ended() -> bool:
        for name in names:
            engine.end(name)
        states = {(await task(cluster, name))["state"] for name in names}
        assert not states & {"failed", "cancelled"}
        return states == {"done"}

    await until(ended)


@each_store
async def test_an_engine_and_a_manager_that_die_again_and_again_lose_and_double_nothing(tmp_path: Path) -> None:
    chance = random.Random(11)
    engine = FakeEngine(near=2, far=4)
    names = []
    async with cluster_of(tmp_path, **settings(engine)) as cluster:
        for turn in range(8):
            for number in range(3):
                names.append(f"t-{turn}-{number}")
                await submit(cluster, names[-1], cores=chance.choice([1, 2]), restartable=number > 0)
            await until(condition(partial(called, engine, len(engine.calls) + chance.randrange(12))))
            for name in names:
                if chance.random() < 0.3:
                    engine.end(name, chance.choice([0, None]))
            if turn % 2:
                engine.lose_everything()
            await cluster.kill_manager()
            await cluster.start_manager()

        async def ended() -> bool:
            for name in names:
                engine.end(name)
            rows = (await cluster.get("/v1/tasks?limit=100"))["tasks"]
            return all(row["state"] in ("done", "failed") for row in rows)

        await until(ended)
        rows = {row["name"]: row for row in (await cluster.get("/v1/tasks?limit=100"))["tasks"]}
        assert set(rows) == set(names)
        assert len(engine.begun) == len(set(engine.begun))
        for name, row in rows.items():
            runs = sum(f".{name}." in attempt for attempt in engine.begun)
            assert runs == row["attempts"]
            assert runs == 1 or row["restartable"]


def called(engine: FakeEngine, many: int) -> bool:
    """Whether it was called more often than that."""
    return len(engine.calls) > many


@each_store
async def test_strays_of_ended_tasks_are_ended_and_those_of_nobody_left_alone(tmp_path: Path) -> None:
    engine = FakeEngine(far=4)
    async with cluster_of(tmp_path, **settings(engine)) as cluster:
        await submit(cluster, "train")
        await becomes(cluster, "train", "running")
        engine.end("train")
        await becomes(cluster, "train", "done")
        # The key may begin with a 1, too.
        stray = engine.begun[0].removesuffix(".1") + ".9"
        doubled = TaskOrder("train", ("true",))
        await engine.submit(stray, doubled)
        await engine.submit("ebb.nobody.0a.1", doubled)
        await until(condition(lambda: ("cancel", stray) in engine.calls))
        assert ("cancel", "ebb.nobody.0a.1") not in engine.calls
