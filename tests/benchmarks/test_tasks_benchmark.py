"""The benchmark `tasks`: what it reads in slurmctld's log, and what the logs that are kept show."""

from __future__ import annotations

import asyncio
import json
import lzma
import multiprocessing
import os
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.matching import tasks, tasks_log, tasks_replay, tasks_twin
from benchmarks.passes import Pass

LOG = """\
[2026-01-01T00:00:00.000] _update_node_gres: nodes n1 gres set to: vcore:2
[2026-01-01T00:00:01.000] _slurm_rpc_submit_batch_job: JobId=1 InitPrio=9 usec=1
[2026-01-01T00:00:01.500] sched: Allocate JobId=1 NodeList=n1 #CPUs=2 Partition=all
[2026-01-01T00:00:02.000] _slurm_rpc_submit_batch_job: JobId=2 InitPrio=0 usec=1
[2026-01-01T00:00:02.500] sched: JobId=2. State=PENDING. Reason=JobHeldUser. Priority=0.
[2026-01-01T00:00:03.000] sched: _update_job: setting req_nodes to n1 for JobId=2
[2026-01-01T00:00:03.500] sched: _release_job_rec: release hold on JobId=2 by uid 0
[2026-01-01T00:00:04.000] sched: JobId=2. State=PENDING. Reason=Resources. Priority=9. Partition=all.
[2026-01-01T00:00:05.000] sched: JobId=2. State=PENDING. Reason=Resources. Priority=9. Partition=all.
[2026-01-01T00:00:06.000] _slurm_rpc_kill_job: REQUEST_KILL_JOB JobId=1 uid 0
[2026-01-01T00:00:06.250] debug2: _slurm_rpc_epilog_complete: JobId=1 Node=n1
[2026-01-01T00:00:07.000] sched/backfill: _start_job: Started JobId=2 in all on n1
[2026-01-01T00:00:09.000] _job_complete: JobId=2 done
[2026-01-01T00:00:09.100] a line that says nothing
"""
JOBS = """\
JobId=1 UserId=nobody(65534) GroupId=root(0) Name=own.a JobState=CANCELLED Partition=all NodeCnt=1 ProcCnt=2 Tres=cpu=2
JobId=2 UserId=nobody(65534) GroupId=root(0) Name=own.b JobState=COMPLETED Partition=all NodeCnt=1 ProcCnt=1 Tres=cpu=1
"""


def test_a_start_waited_for_room_until_there_was_some() -> None:
    log = tasks_log.read(tasks_log.excerpt(LOG, JOBS), 8)
    assert [(wait.job.number, wait.seconds) for wait in tasks_log.waits(log)] == [(1, 0.5), (2, 0.75)]
    assert log.jobs[2].reasons == {"Resources"}
    assert (log.jobs[2].eligible_at or 0.0) - log.jobs[2].submitted_at == 1.5
    assert log.jobs[2].required == "n1"


def test_what_a_killed_job_did_is_lost_and_the_others_are_done() -> None:
    log = tasks_log.read(tasks_log.excerpt(LOG, JOBS), 8)
    assert tasks_log.lost_core_s(log) == pytest.approx(9.0)
    assert list(tasks_log.completed_at(log)) == ["b"]
    assert not log.odd


def test_who_had_all_its_time_when_it_was_ended_is_done() -> None:
    log = tasks_log.read(tasks_log.excerpt(LOG, JOBS), 8)
    tasks_log.settle(log, {"a": 4.6, "b": 2.0})
    assert list(tasks_log.completed_at(log)) == ["b"]
    tasks_log.settle(log, {"a": 4.5, "b": 2.0})
    assert list(tasks_log.completed_at(log)) == ["a", "b"]
    assert tasks_log.lost_core_s(log) == 0


def wrong_victims(log: tasks_log.Log, slack_s: float) -> list[tasks_log.Job]:
    """Killed jobs beside which, on their node, a job that began later was left alone.

    :param slack_s: who began so shortly before another is as new, and who ends so shortly after it goes with it.
    """
    started = log.started
    return [
        one
        for one in started
        if one.killed
        and any(
            other.node == one.node
            and tasks_log._start(one) + slack_s < tasks_log._start(other) < tasks_log._end(one) - slack_s
            and tasks_log._end(other) > tasks_log._end(one) + slack_s
            for other in started
        )
    ]


def test_a_kill_of_an_older_job_is_seen_where_a_newer_one_stays() -> None:
    newer = LOG.replace("JobId=2 in all", "JobId=3 in all").replace("07.000] sched/backfill", "03.200] sched/backfill")
    log = tasks_log.read(tasks_log.excerpt(newer, JOBS), 8)
    log.jobs[3].ended_at = (log.jobs[1].ended_at or 0.0) + 9.0
    assert [job.number for job in wrong_victims(log, 1.0)] == [1]
    assert not wrong_victims(tasks_log.read(tasks_log.excerpt(LOG, JOBS), 8), 1.0)


def test_a_reason_is_kept_once_and_a_requeue_or_a_refused_setting_is_seen() -> None:
    kept = tasks_log.excerpt(LOG, JOBS)
    assert kept.count("Reason=Resources") == 1
    assert "says nothing" not in kept
    odd = LOG + (
        "[2026-01-01T00:00:10.000] error: AuthInfo=cred_expire=2 invalid\n[2026-01-01T00:00:11.000] Requeuing JobId=2\n"
    )
    assert len(tasks_log.read(tasks_log.excerpt(odd, JOBS), 8).odd) == 2


def test_a_plan_has_no_moment_at_which_slurm_would_refuse_a_task_for_ever() -> None:
    for number in range(10):
        plan = tasks_replay.plan_for(number)
        assert len(plan.arrivals) >= 60
        assert all(change.cores_after >= tasks_replay.LEAST_CORES for change in plan.changes)
        most = [max(tasks_replay.cores_at(plan, at_s).values()) for at_s in (arrival.at_s for arrival in plan.arrivals)]
        assert min(most) >= max(tasks_replay.TASK_CORES)


def test_in_simulation_the_same_tasks_come_to_their_ends_and_work_is_lost_by_kills_only() -> None:
    plan = tasks_replay.plan_for(0, 12, 40.0)
    found = {name: tasks_twin.simulate(plan, tasks_twin.SHOWN[name]) for name in ("own", "oracle-no-kill")}
    for one in found.values():
        assert len(one.completions_s) == 12
        assert (one.kills > 0) == (one.lost_core_s > 0)
        assert all(
            completion_s >= arrival.duration_s - 0.01
            for completion_s, arrival in zip(one.completions_s, plan.arrivals, strict=True)
        )
    assert found["own"].kills > found["oracle-no-kill"].kills == 0


def test_in_the_logs_that_are_kept_no_start_waited_for_anything_but_room() -> None:
    kept = sorted((Path(__file__).parents[2] / "benchmarks/results/tasks").glob("*.log.xz"))
    assert [path.name for path in kept] == [f"{run:02}-{side}.log.xz" for run in range(10) for side in tasks.SIDES]
    for path in kept:
        log = tasks_log.read(lzma.decompress(path.read_bytes()).decode(), tasks_replay.CORES)
        seconds = sorted(wait.seconds for wait in tasks_log.waits(log))
        assert len(seconds) >= 120
        # Slurm looks once a second; a requeued job would have stood for 6 s at the least.
        assert seconds[-1] < 1.5
        assert {reason for job in log.jobs.values() for reason in job.reasons} <= {"None", "Resources"}
        assert not log.odd
        assert not wrong_victims(log, 1.0)


def test_the_figures_that_are_quoted_are_those_of_the_logs() -> None:
    results = Path(__file__).parents[2] / "benchmarks/results"
    kept = {
        side: [lzma.decompress(path.read_bytes()).decode() for path in sorted(results.glob(f"tasks/*-{side}.log.xz"))]
        for side in tasks.SIDES
    }
    quoted = json.loads((results / "tasks.json").read_text(encoding="utf-8"))["figures"]
    found = tasks.figures_of(kept)
    assert found.keys() == quoted.keys()
    for name, figure in found.items():
        assert quoted[name]["runs"] == pytest.approx(figure.runs, abs=1e-5), name


def test_what_ends_the_benchmark_ends_all_that_goes_on_with_its_clusters_and_begins_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    came_up = multiprocessing.get_context("fork").Semaphore(0)

    class Cluster:
        directory = tmp_path

        def __init__(self, *given: Any, **named: Any) -> None:
            pass

        def __enter__(self) -> Cluster:
            (tmp_path / f"{os.getpid()}.begun").touch()
            came_up.release()
            return self

        def __exit__(self, *given: object) -> None:
            (tmp_path / f"{os.getpid()}.ended").touch()

    async def side(*given: Any) -> None:
        await asyncio.Event().wait()

    def interrupted(running: Collection[Any]) -> Iterator[Any]:
        # So many as there are workers.
        for _ in tasks.SIDES:
            came_up.acquire()
        yield from ()
        raise KeyboardInterrupt

    monkeypatch.setattr(tasks, "AT_ONCE", 1)
    monkeypatch.setattr(tasks, "SlurmCluster", Cluster)
    monkeypatch.setattr(tasks, "as_completed", interrupted)
    for name in tasks.SIDES:
        monkeypatch.setitem(tasks.SIDES, name, side)
    with pytest.raises(KeyboardInterrupt):
        tasks.run(Pass(runs=3, quick=True))
    begun, ended = ({path.stem for path in tmp_path.glob(f"*.{end}")} for end in ("begun", "ended"))
    assert begun == ended
    assert len(begun) == len(tasks.SIDES)
    assert not multiprocessing.active_children()
