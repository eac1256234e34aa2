"""What every engine does, on a real Slurm and on a real Dask."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import pwd
import shutil

import psutil
import pytest

from ebbtide.matcher.engines.interface import engine_of
from ebbtide.matcher.errors import EngineRefused, EngineUnreachable
from ebbtide.matcher.match.attempts import AttemptState, Claim
from ebbtide.matcher.match.tasks import TaskOrder
from tests.engines.engine_hosts import EngineHost
from tests.waiting import until

pytestmark = [pytest.mark.service, pytest.mark.timeout(240)]

HELD, RELEASED, RUNNING = AttemptState.HELD, AttemptState.RELEASED, AttemptState.RUNNING
ENDED, GONE = AttemptState.ENDED, AttemptState.GONE


async def test_machines_are_shown_with_their_cores(engine_host: EngineHost) -> None:
    machine = (await engine_host.look()).machines["n1"]
    assert (machine.most_cores, machine.usable_cores, machine.up, machine.drained) == (4, 4, True, "")


async def test_what_is_held_begins_nowhere_and_what_is_released_begins_on_its_machine(engine_host: EngineHost) -> None:
    attempt = await engine_host.held(0.1, cores=2)
    await engine_host.quiet()
    assert engine_host.lines(attempt) == []
    await engine_host.engine.release(attempt, "n2")
    seen = await engine_host.becomes(attempt, ENDED)
    assert (seen.recorded_machine, seen.claim, seen.exit_code) == ("n2", Claim.BEGUN, 0)
    assert seen.begun_at is not None
    assert seen.ended_at is not None
    assert seen.begun_at < seen.ended_at
    assert engine_host.lines(attempt) == ["begun", "ended"]


async def test_words_and_output_and_exit_codes_pass_unharmed(engine_host: EngineHost) -> None:
    words = ("a b", 'it\'s "$HOME"', "", "*", "\\n", "ünï\nsecond line")
    command = ("/bin/sh", "-c", 'printf "<%s>" "$@"; echo wrong >&2; exit 7', "name", *words)
    attempt = await engine_host.held(0, command=command)
    await engine_host.engine.release(attempt, "n1")
    assert (await engine_host.becomes(attempt, ENDED)).exit_code == 7
    printed = (engine_host.directory / attempt / "out").read_text()
    assert printed == "".join(f"<{word}>" for word in words) + "wrong\n"


async def test_a_command_begins_at_the_root_and_not_among_the_records(engine_host: EngineHost) -> None:
    attempt = await engine_host.held(0, command=("/bin/pwd",))
    await engine_host.engine.release(attempt, "n1")
    await engine_host.becomes(attempt, ENDED)
    assert (engine_host.directory / attempt / "out").read_text() == "/\n"


async def test_a_command_knows_its_user_and_nothing_of_the_manager(
    engine_host: EngineHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EBBTIDE_SECRET", "secret")
    attempt = await engine_host.held(0, command=("/usr/bin/env",))
    await engine_host.engine.release(attempt, "n1")
    await engine_host.becomes(attempt, ENDED)
    printed = (engine_host.directory / attempt / "out").read_text()
    found = dict(line.partition("=")[::2] for line in printed.splitlines())
    user = pwd.getpwuid((engine_host.directory / attempt).stat().st_uid)
    assert (found["USER"], found["LOGNAME"], found["HOME"]) == (user.pw_name, user.pw_name, user.pw_dir)
    assert "EBBTIDE_SECRET" not in found
    if engine_host.engine.kind == "slurm":
        assert found["PATH"] == "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        assert "LC_ALL" not in found


async def test_a_program_that_does_not_exist_is_the_tasks_own_failure(engine_host: EngineHost) -> None:
    attempt = await engine_host.held(0, command=("/no/such/program",))
    await engine_host.engine.release(attempt, "n1")
    assert (await engine_host.becomes(attempt, ENDED)).exit_code == 127


async def test_what_a_command_writes_into_its_records_does_not_outvote_the_engine(engine_host: EngineHost) -> None:
    attempt = engine_host.attempt()
    script = 'cd "$1" && mkdir end && rm claim && ln -s /dev/zero claim && exit 7'
    command = ("/bin/sh", "-c", script, "task", str(engine_host.directory / attempt))
    await engine_host.engine.submit(attempt, TaskOrder("forger", command))
    await engine_host.engine.release(attempt, "n1")
    seen = await engine_host.becomes(attempt, ENDED)
    assert (seen.claim, seen.exit_code) == (Claim.BEGUN, 7)


async def test_a_fifo_in_the_place_of_a_record_holds_up_no_look(engine_host: EngineHost) -> None:
    attempt = engine_host.attempt()
    script = f"cd {engine_host.directory / attempt} && rm claim && mkfifo claim end && sleep 1; exit 3"
    await engine_host.engine.submit(attempt, TaskOrder("forger", ("/bin/sh", "-c", script)))
    await engine_host.engine.release(attempt, "n1")
    async with asyncio.timeout(30):
        seen = await engine_host.becomes(attempt, ENDED)
    assert (seen.claim, seen.exit_code) == (Claim.BEGUN, 3)


async def test_a_forged_record_turns_no_signal_against_another_process(engine_host: EngineHost) -> None:
    bystander = await asyncio.create_subprocess_exec("/bin/sleep", "60", start_new_session=True)
    try:
        attempt = engine_host.attempt()
        claim = engine_host.directory / attempt / "claim"
        begun = engine_host.runs(attempt)
        script = f"echo begun 1 {bystander.pid} n1 > {claim}; echo begun > {begun}; exec sleep 60"
        await engine_host.engine.submit(attempt, TaskOrder("forger", ("/bin/sh", "-c", script)))
        await engine_host.engine.release(attempt, "n1")

        async def runs() -> bool:
            await engine_host.look(attempt)
            return engine_host.lines(attempt) == ["begun"]

        await until(runs)
        await engine_host.engine.cancel(attempt)
        seen = await engine_host.becomes(attempt, ENDED, GONE)
        assert seen.exit_code != 0
        assert bystander.returncode is None
    finally:
        bystander.kill()
        await bystander.wait()


@pytest.mark.parametrize("engine_host", ["slurm"], indirect=True)  # all tasks of a Dask are one user's
async def test_a_task_of_another_user_reaches_no_record(engine_host: EngineHost) -> None:
    victim = await engine_host.running("n1", seconds=3.0)
    following = engine_host.attempt()
    directory, forger = engine_host.directory, engine_host.attempt()
    script = f"""
        cd {directory} && ls . && exit 10
        cat {victim}/claim && exit 11
        echo '0 1700000000' > {victim}/end && exit 12
        ln -s /dev/zero {victim}/end && exit 13
        mkdir {following} && exit 14
        ln -s /etc/passwd {following}.held && exit 15
        test "$(id -un)" = daemon"""
    order = TaskOrder("forger", ("/bin/sh", "-c", script), user="daemon")
    await engine_host.engine.submit(forger, order)
    await engine_host.engine.release(forger, "n2")
    assert (await engine_host.becomes(forger, ENDED)).exit_code == 0
    await engine_host.engine.cancel(victim)
    assert (await engine_host.becomes(victim, ENDED, GONE)).exit_code != 0
    assert engine_host.lines(victim) == ["begun"]


@pytest.mark.parametrize("engine_host", ["slurm"], indirect=True)  # a Dask's worker is root here, and can write
async def test_a_machine_where_no_record_can_be_written_says_so(engine_host: EngineHost) -> None:
    attempt = await engine_host.held(0.1)
    (engine_host.directory / attempt).chmod(0o500)
    await engine_host.engine.release(attempt, "n1")
    seen = await engine_host.becomes(attempt, ENDED)
    assert (seen.claim, seen.machine, seen.exit_code, seen.unrecorded) == (Claim.NONE, "n1", None, True)
    assert engine_host.lines(attempt) == []


async def test_everything_may_be_asked_twice(engine_host: EngineHost) -> None:
    attempt = await engine_host.held(0.5)
    order = TaskOrder("any", ("/bin/false",))
    await engine_host.engine.submit(attempt, order)
    await engine_host.engine.release(attempt, "n1")
    await engine_host.engine.release(attempt, "n1")
    await engine_host.becomes(attempt, ENDED)
    for _ in range(2):
        await engine_host.engine.cancel(attempt)
        await engine_host.engine.forget(attempt)
        await engine_host.engine.drain("n1", "ebbtide: a test")
    for _ in range(2):
        await engine_host.engine.undrain("n1")
        await engine_host.engine.set_usable_cores("n1", 4)
    await engine_host.quiet()
    assert engine_host.lines(attempt) == ["begun", "ended"]


async def test_another_manager_sees_the_same_and_goes_on(engine_host: EngineHost) -> None:
    held, running = await engine_host.held(0.1), await engine_host.running("n1")
    await engine_host.engine.stop()
    engine_host.engine = engine_host.new_engine()
    await engine_host.engine.start()
    attempts = (await engine_host.look(held, running)).attempts
    assert (attempts[held].state, attempts[running].state) == (HELD, RUNNING)
    assert (attempts[running].claim, attempts[running].machine) == (Claim.BEGUN, "n1")
    await engine_host.engine.release(held, "n2")
    assert (await engine_host.becomes(held, ENDED)).exit_code == 0
    await engine_host.engine.cancel(running)
    await engine_host.becomes(running, ENDED, GONE)
    assert engine_host.lines(running) == ["begun"]


async def test_a_held_attempt_that_is_cancelled_never_begins(engine_host: EngineHost) -> None:
    attempt = await engine_host.held(0.1)
    await engine_host.engine.cancel(attempt)
    seen = await engine_host.becomes(attempt, ENDED, GONE)
    assert (seen.claim, seen.exit_code) == (Claim.SEALED, None)
    await engine_host.engine.submit(
        attempt, TaskOrder("again", ("/bin/sh", "-c", f"echo begun >> {engine_host.runs(attempt)}"))
    )
    await engine_host.engine.release(attempt, "n1")
    await engine_host.becomes(attempt, ENDED, GONE)
    await engine_host.quiet()
    assert engine_host.lines(attempt) == []


async def test_cancelling_ends_what_has_begun_unless_it_is_to_be_spared(engine_host: EngineHost) -> None:
    attempt = await engine_host.running("n1")
    await engine_host.engine.cancel(attempt, begun_too=False)
    await engine_host.quiet()
    assert (await engine_host.becomes(attempt, RUNNING)).claim is Claim.BEGUN
    await engine_host.engine.cancel(attempt)
    seen = await engine_host.becomes(attempt, ENDED, GONE)
    assert seen.claim is Claim.BEGUN
    assert seen.exit_code != 0
    assert engine_host.lines(attempt) == ["begun"]


async def test_cancelling_ends_what_has_begun_also_where_its_record_is_lost(engine_host: EngineHost) -> None:
    attempt = await engine_host.running("n1")
    await engine_host.engine.look([attempt], [attempt])
    shutil.rmtree(engine_host.directory / attempt)
    await engine_host.engine.cancel(attempt)

    async def is_over() -> bool:
        return not [one for one in psutil.process_iter(["cmdline"]) if f"{attempt}.runs" in str(one.info["cmdline"])]

    await until(is_over, limit_s=15.0)
    await engine_host.becomes(attempt, ENDED, GONE)
    assert engine_host.lines(attempt) == ["begun"]


@pytest.mark.parametrize("signal", ["USR1", "TERM"])
async def test_a_signal_reaches_a_command_once_for_each_notice_and_its_record_stays_fresh(
    engine_host: EngineHost, signal: str
) -> None:
    attempt = engine_host.attempt()
    script = f'trap "echo told >> $1" {signal}; echo begun >> $1; until [ -e $1.go ]; do sleep 0.1; done'
    order = TaskOrder("told", ("/bin/sh", "-c", script, "task", str(engine_host.runs(attempt))))
    await engine_host.engine.submit(attempt, order)
    await engine_host.engine.release(attempt, "n1")
    await engine_host.becomes(attempt, RUNNING)

    async def wrote(*lines: str) -> None:
        async def so() -> bool:
            return engine_host.lines(attempt) == list(lines)

        await until(so)

    await wrote("begun")
    for _ in range(2):
        await engine_host.engine.signal(attempt, signal, "100.000")
    await wrote("begun", "told")
    another = engine_host.new_engine()
    await another.start()
    await another.look([attempt])
    await another.signal(attempt, signal, "100.000")
    await another.signal(attempt, signal, "200.000")
    await another.stop()
    await wrote("begun", "told", "told")
    claim = engine_host.directory / attempt / "claim"
    touched = claim.stat().st_mtime

    async def beats() -> bool:
        return claim.stat().st_mtime > touched

    await until(beats)
    assert (await engine_host.becomes(attempt, RUNNING)).silent_s is not None
    assert engine_host.lines(attempt) == ["begun", "told", "told"]
    # It would keep its cores from the next test.
    engine_host.runs(attempt).with_name(f"{engine_host.runs(attempt).name}.go").touch()
    await engine_host.becomes(attempt, ENDED)


async def test_usable_cores_hold_for_what_comes_and_not_for_what_runs(engine_host: EngineHost) -> None:
    running = await engine_host.running("n1", seconds=150.0, cores=2)
    await engine_host.engine.set_usable_cores("n1", 2)
    assert (await engine_host.look()).machines["n1"].usable_cores == 2
    waiting = await engine_host.held(0.1, cores=2)
    await engine_host.engine.release(waiting, "n1")
    await engine_host.quiet()
    attempts = (await engine_host.look(running, waiting)).attempts
    assert (attempts[running].state, attempts[waiting].state) == (RUNNING, RELEASED)
    assert engine_host.lines(waiting) == []
    await engine_host.engine.set_usable_cores("n1", 4)
    assert (await engine_host.becomes(waiting, ENDED)).exit_code == 0
    assert (await engine_host.becomes(running, RUNNING)).machine == "n1"
    await engine_host.engine.cancel(running)
    await engine_host.becomes(running, ENDED, GONE)


async def test_a_machine_without_cores_runs_nothing_new(engine_host: EngineHost) -> None:
    await engine_host.engine.set_usable_cores("n2", 0)
    assert (await engine_host.look()).machines["n2"].usable_cores == 0
    attempt = await engine_host.held(0.1)
    await engine_host.engine.release(attempt, "n2")
    await engine_host.quiet()
    assert engine_host.lines(attempt) == []
    await engine_host.engine.cancel(attempt)
    assert (await engine_host.becomes(attempt, ENDED, GONE)).claim is Claim.SEALED


async def test_a_drained_machine_begins_nothing_and_ends_what_it_has(engine_host: EngineHost) -> None:
    running = await engine_host.running("n1", seconds=2.0)
    await engine_host.engine.drain("n1", "ebbtide: a test")
    assert (await engine_host.look()).machines["n1"].drained == "ebbtide: a test"
    attempt = await engine_host.held(0.1)
    # Either it is refused at once, or it waits there.
    with contextlib.suppress(EngineRefused):
        await engine_host.engine.release(attempt, "n1")
    await engine_host.quiet()
    assert engine_host.lines(attempt) == []
    assert (await engine_host.becomes(running, ENDED)).exit_code == 0
    await engine_host.engine.undrain("n1")
    assert (await engine_host.look()).machines["n1"].drained == ""
    await engine_host.engine.release(attempt, "n1")
    assert (await engine_host.becomes(attempt, ENDED)).exit_code == 0


async def test_a_machine_that_dies_takes_its_task_with_it_and_begins_it_never_again(engine_host: EngineHost) -> None:
    attempt = await engine_host.running("n2", seconds=5.0)
    engine_host.kill_machine("n2")
    try:
        seen = await engine_host.becomes(attempt, ENDED, GONE)
        assert (seen.claim, seen.recorded_machine) == (Claim.BEGUN, "n2")
    finally:
        engine_host.start_machine("n2")

    async def back() -> bool:
        machine = (await engine_host.look()).machines.get("n2")
        return machine is not None and machine.up and not machine.drained

    await until(back)
    await engine_host.quiet()
    assert engine_host.lines(attempt).count("begun") == 1
    attempt = await engine_host.held(0.1)
    await engine_host.engine.release(attempt, "n2")
    assert (await engine_host.becomes(attempt, ENDED)).exit_code == 0


async def test_a_machine_that_nobody_has_is_refused(engine_host: EngineHost) -> None:
    attempt = await engine_host.held(0.1)
    with pytest.raises(EngineRefused):
        await engine_host.engine.release(attempt, "nowhere")


async def test_an_engine_that_is_not_there_is_said_to_be_unreachable(engine_host: EngineHost) -> None:
    changes: dict[str, object] = {"answer_s": 3.0, "dask_scheduler": "tcp://127.0.0.1:1"}
    if engine_host.settings.slurm_conf is not None:
        conf = engine_host.settings.slurm_conf.with_name("elsewhere.conf")
        text = engine_host.settings.slurm_conf.read_text().replace("SlurmctldPort=", "SlurmctldPort=1 #")
        conf.write_text(text + "SlurmctldTimeout=3\n")
        changes = {"answer_s": 3.0, "slurm_conf": conf}
    away = engine_of(engine_host.settings.model_copy(update=changes))
    assert away is not None
    with pytest.raises(EngineUnreachable):
        await away.look([])
    await away.stop()
    del away
    # A connection that nobody closed would complain now.
    gc.collect()
