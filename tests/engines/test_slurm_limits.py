"""A Slurm that takes few jobs, has other resources than ours, and a node outside the partition of our jobs."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from benchmarks.matching.slurm_cluster import USER, SlurmCluster
from ebbtide.matcher.engines.slurm import Slurm
from ebbtide.matcher.errors import EngineFull
from ebbtide.matcher.match.attempts import AttemptState
from ebbtide.matcher.match.tasks import TaskOrder
from tests.engines.engine_hosts import EngineHost, settings_of
from tests.waiting import until

pytestmark = [pytest.mark.service, pytest.mark.timeout(240)]

MOST_JOBS = 20
#: Changes to the configuration of the other tests' cluster.
CHANGES = {
    "GresTypes=vcore": f"GresTypes=vcore,other\nMaxJobCount={MOST_JOBS}\nMinJobAge=2",
    "Gres=vcore:4": "Gres=other:2,vcore:4",
    "PartitionName=all Nodes=n1,n2,n3": "PartitionName=last Nodes=n3 State=UP\nPartitionName=all Nodes=n1,n2",
}


class LimitedCluster(SlurmCluster):
    def _prepare(self) -> None:
        super()._prepare()
        text = self.conf.read_text()
        for before, after in CHANGES.items():
            assert before in text
            text = text.replace(before, after)
        self.conf.write_text(text)
        with (self.directory / "gres.conf").open("a") as file:
            file.write("Name=other Count=2 Flags=CountOnly\n")

    def gres(self, node: str) -> set[str]:
        (found,) = (row for row in json.loads(self.command("sinfo", "--json"))["nodes"] if row["name"] == node)
        return set(found["gres"].split(","))


@pytest.fixture(scope="module")
def limited() -> Iterator[LimitedCluster]:
    with LimitedCluster(nodes=3) as cluster:
        yield cluster


@pytest_asyncio.fixture
async def engine_host(limited: LimitedCluster) -> AsyncIterator[EngineHost]:
    made = EngineHost(limited)
    await made.engine.start()
    await made.ready()
    yield made
    for user in ("root", USER):
        limited.command("scancel", f"--user={user}")

    async def empty() -> bool:
        return not limited.command("squeue", "--noheader").strip()

    await until(empty)
    await made.engine.stop()


async def test_a_node_keeps_its_other_resources_when_its_cores_change(
    engine_host: EngineHost, limited: LimitedCluster
) -> None:
    for cores in (2, 0, 4):
        await engine_host.engine.set_usable_cores("n1", cores)
        assert (await engine_host.look()).machines["n1"].usable_cores == cores
        assert "other:2" in limited.gres("n1")


async def test_the_cores_of_anothers_job_on_several_nodes_are_taken(
    engine_host: EngineHost, limited: LimitedCluster
) -> None:
    words = ("--nodes=2", "--ntasks=5", "--output=/dev/null", "--chdir=/", "--wrap=sleep 60")
    limited.command("sbatch", *words)

    async def taken() -> bool:
        machines = (await engine_host.look()).machines
        return sorted(machines[name].foreign_cores for name in ("n1", "n2")) == [1, 4]

    await until(taken)


async def test_an_attempt_that_was_released_to_a_node_of_another_partition_is_not_held(engine_host: EngineHost) -> None:
    attempt = await engine_host.held(0.1)
    await engine_host.engine.release(attempt, "n3")

    async def refused() -> bool:
        seen = (await engine_host.look(attempt)).attempts[attempt]
        assert (seen.state, seen.machine) in ((AttemptState.RELEASED, "n3"), (AttemptState.HELD, None))
        return seen.reason == "BadConstraints"

    await until(refused)
    seen = (await engine_host.look(attempt)).attempts[attempt]
    assert (seen.state, seen.machine, seen.never) == (AttemptState.RELEASED, "n3", True)


async def test_options_of_the_engine_file_reach_a_job(engine_host: EngineHost, limited: LimitedCluster) -> None:
    options = ("--partition=last", "--time=7", "--cpus-per-task=3")
    engine = Slurm(settings_of(limited).model_copy(update={"slurm_options": options}))
    attempt = engine_host.attempt()
    await engine.submit(attempt, TaskOrder("one", ("/bin/true",)))
    shown = limited.command("squeue", "--noheader", f"--name={attempt}", "--format=%P %l %C")
    # The manager's own word counts where both say something.
    assert shown.split() == ["last", "7:00", "1"]
    await engine.release(attempt, "n3")
    await engine_host.becomes(attempt, AttemptState.ENDED, AttemptState.GONE)
    assert (engine_host.directory / attempt / "end").read_text().startswith("0 ")


async def test_a_full_queue_refuses_at_once_for_now_and_takes_the_attempt_when_there_is_room(
    engine_host: EngineHost, limited: LimitedCluster
) -> None:
    order = TaskOrder("many", ("/bin/true",))
    attempts = [engine_host.attempt() for _ in range(MOST_JOBS + 1)]

    async def fill() -> None:
        for attempt in attempts:
            await engine_host.engine.submit(attempt, order)

    began = time.monotonic()
    with pytest.raises(EngineFull, match="temporarily unable to accept job"):
        await fill()
    assert time.monotonic() - began < engine_host.settings.answer_s
    seen = (await engine_host.look()).attempts
    held = [attempt for attempt in attempts if attempt in seen and seen[attempt].state is AttemptState.HELD]
    for attempt in held:
        await engine_host.engine.cancel(attempt)
    refused = attempts[len(held)]

    async def taken() -> bool:
        with contextlib.suppress(EngineFull):
            await engine_host.engine.submit(refused, order)
            return True
        return False

    # Slurm forgets once a minute.
    await until(taken, limit_s=150.0)
    await engine_host.becomes(refused, AttemptState.HELD)
    assert limited.command("squeue", "--noheader", "--format=%j").split().count(refused) == 1
