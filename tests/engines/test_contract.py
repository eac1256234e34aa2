"""What every engine does, on a real Slurm and on a real Dask."""

from __future__ import annotations

import contextlib
import gc

import pytest

from task_matcher.attempts import AttemptState, Claim
from task_matcher.engines.settings import engine_of
from task_matcher.errors import EngineRefused, EngineUnreachable
from task_matcher.tasks import TaskOrder
from tests.engines.beds import Bed, until

pytestmark = [pytest.mark.service, pytest.mark.timeout(240)]

HELD, RELEASED, RUNNING = AttemptState.HELD, AttemptState.RELEASED, AttemptState.RUNNING
ENDED, GONE = AttemptState.ENDED, AttemptState.GONE


async def test_machines_are_shown_with_their_cores(bed: Bed) -> None:
    machine = (await bed.look()).machines["n1"]
    assert (machine.most_cores, machine.usable_cores, machine.up, machine.drained) == (4, 4, True, "")


async def test_what_is_held_begins_nowhere_and_what_is_released_begins_on_its_machine(bed: Bed) -> None:
    attempt = await bed.held(0.1, cores=2)
    await bed.quiet()
    assert bed.lines(attempt) == []
    await bed.engine.release(attempt, "n2")
    seen = await bed.becomes(attempt, ENDED)
    assert (seen.machine, seen.claim, seen.exit_code) == ("n2", Claim.BEGUN, 0)
    assert seen.begun_at is not None
    assert seen.ended_at is not None
    assert seen.begun_at < seen.ended_at
    assert bed.lines(attempt) == ["begun", "ended"]


async def test_words_and_output_and_exit_codes_pass_unharmed(bed: Bed) -> None:
    words = ("a b", 'it\'s "$HOME"', "", "*", "\\n", "ünï\nsecond line")
    command = ("/bin/sh", "-c", 'printf "<%s>" "$@"; echo wrong >&2; exit 7', "name", *words)
    attempt = await bed.held(0, command=command)
    await bed.engine.release(attempt, "n1")
    assert (await bed.becomes(attempt, ENDED)).exit_code == 7
    printed = (bed.directory / f"{attempt}.out").read_text()
    assert printed == "".join(f"<{word}>" for word in words) + "wrong\n"


async def test_a_program_that_does_not_exist_is_the_tasks_own_failure(bed: Bed) -> None:
    attempt = await bed.held(0, command=("/no/such/program",))
    await bed.engine.release(attempt, "n1")
    assert (await bed.becomes(attempt, ENDED)).exit_code == 127


async def test_everything_may_be_asked_twice(bed: Bed) -> None:
    attempt = await bed.held(0.5)
    order = TaskOrder("any", ("/bin/false",))
    await bed.engine.submit(attempt, order)
    await bed.engine.release(attempt, "n1")
    await bed.engine.release(attempt, "n1")
    await bed.becomes(attempt, ENDED)
    for _ in range(2):
        await bed.engine.cancel(attempt)
        await bed.engine.forget(attempt)
        await bed.engine.drain("n1", "ebbtide: a test")
    for _ in range(2):
        await bed.engine.undrain("n1")
        await bed.engine.set_usable_cores("n1", 4)
    await bed.quiet()
    assert bed.lines(attempt) == ["begun", "ended"]


async def test_another_manager_sees_the_same_and_goes_on(bed: Bed) -> None:
    held, running = await bed.held(0.1), await bed.running("n1")
    await bed.engine.stop()
    bed.engine = bed.new_engine()
    await bed.engine.start()
    attempts = (await bed.look(held, running)).attempts
    assert (attempts[held].state, attempts[running].state) == (HELD, RUNNING)
    assert (attempts[running].claim, attempts[running].machine) == (Claim.BEGUN, "n1")
    await bed.engine.release(held, "n2")
    assert (await bed.becomes(held, ENDED)).exit_code == 0
    await bed.engine.cancel(running)
    await bed.becomes(running, ENDED, GONE)
    assert bed.lines(running) == ["begun"]


async def test_a_held_attempt_that_is_cancelled_never_begins(bed: Bed) -> None:
    attempt = await bed.held(0.1)
    await bed.engine.cancel(attempt)
    seen = await bed.becomes(attempt, ENDED, GONE)
    assert (seen.claim, seen.exit_code) == (Claim.SEALED, None)
    await bed.engine.submit(attempt, TaskOrder("again", ("/bin/sh", "-c", f"echo begun >> {bed.runs(attempt)}")))
    await bed.engine.release(attempt, "n1")
    await bed.becomes(attempt, ENDED, GONE)
    await bed.quiet()
    assert bed.lines(attempt) == []


async def test_cancelling_ends_what_has_begun_unless_it_is_to_be_spared(bed: Bed) -> None:
    attempt = await bed.running("n1")
    await bed.engine.cancel(attempt, begun_too=False)
    await bed.quiet()
    assert (await bed.becomes(attempt, RUNNING)).claim is Claim.BEGUN
    await bed.engine.cancel(attempt)
    seen = await bed.becomes(attempt, ENDED, GONE)
    assert seen.claim is Claim.BEGUN
    assert seen.exit_code != 0
    assert bed.lines(attempt) == ["begun"]


async def test_usable_cores_hold_for_what_comes_and_not_for_what_runs(bed: Bed) -> None:
    running = await bed.running("n1", cores=2)
    await bed.engine.set_usable_cores("n1", 2)
    assert (await bed.look()).machines["n1"].usable_cores == 2
    waiting = await bed.held(0.1, cores=2)
    await bed.engine.release(waiting, "n1")
    await bed.quiet()
    attempts = (await bed.look(running, waiting)).attempts
    assert (attempts[running].state, attempts[waiting].state) == (RUNNING, RELEASED)
    assert bed.lines(waiting) == []
    await bed.engine.set_usable_cores("n1", 4)
    assert (await bed.becomes(waiting, ENDED)).exit_code == 0
    assert (await bed.becomes(running, RUNNING)).machine == "n1"


async def test_a_machine_without_cores_runs_nothing_new(bed: Bed) -> None:
    await bed.engine.set_usable_cores("n2", 0)
    assert (await bed.look()).machines["n2"].usable_cores == 0
    attempt = await bed.held(0.1)
    await bed.engine.release(attempt, "n2")
    await bed.quiet()
    assert bed.lines(attempt) == []
    await bed.engine.cancel(attempt)
    assert (await bed.becomes(attempt, ENDED, GONE)).claim is Claim.SEALED


async def test_a_drained_machine_begins_nothing_and_ends_what_it_has(bed: Bed) -> None:
    running = await bed.running("n1", seconds=2.0)
    await bed.engine.drain("n1", "ebbtide: a test")
    assert (await bed.look()).machines["n1"].drained == "ebbtide: a test"
    attempt = await bed.held(0.1)
    # Either it is refused at once, or it waits there.
    with contextlib.suppress(EngineRefused):
        await bed.engine.release(attempt, "n1")
    await bed.quiet()
    assert bed.lines(attempt) == []
    assert (await bed.becomes(running, ENDED)).exit_code == 0
    await bed.engine.undrain("n1")
    assert (await bed.look()).machines["n1"].drained == ""
    await bed.engine.release(attempt, "n1")
    assert (await bed.becomes(attempt, ENDED)).exit_code == 0


async def test_a_machine_that_dies_takes_its_task_with_it_and_begins_it_never_again(bed: Bed) -> None:
    attempt = await bed.running("n2", seconds=5.0)
    bed.kill_machine("n2")
    try:
        seen = await bed.becomes(attempt, ENDED, GONE)
        assert (seen.claim, seen.machine) == (Claim.BEGUN, "n2")
    finally:
        bed.start_machine("n2")

    async def back() -> bool:
        machine = (await bed.look()).machines.get("n2")
        return machine is not None and machine.up and not machine.drained

    await until(back)
    await bed.quiet()
    assert bed.lines(attempt).count("begun") == 1
    attempt = await bed.held(0.1)
    await bed.engine.release(attempt, "n2")
    assert (await bed.becomes(attempt, ENDED)).exit_code == 0


async def test_a_machine_that_nobody_has_is_refused(bed: Bed) -> None:
    attempt = await bed.held(0.1)
    with pytest.raises(EngineRefused):
        await bed.engine.release(attempt, "nowhere")


async def test_an_engine_that_is_not_there_is_said_to_be_unreachable(bed: Bed) -> None:
    changes: dict[str, object] = {"answer_s": 3.0, "dask_scheduler": "tcp://127.0.0.1:1"}
    if bed.settings.slurm_conf is not None:
        conf = bed.settings.slurm_conf.with_name("elsewhere.conf")
        text = bed.settings.slurm_conf.read_text().replace("SlurmctldPort=", "SlurmctldPort=1 #")
        conf.write_text(text + "SlurmctldTimeout=3\n")
        changes = {"answer_s": 3.0, "slurm_conf": conf}
    away = engine_of(bed.settings.model_copy(update=changes))
    assert away is not None
    with pytest.raises(EngineUnreachable):
        await away.look([])
    await away.stop()
    del away
    # A connection that nobody closed would complain now.
    gc.collect()
