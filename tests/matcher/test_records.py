"""Records of attempts against a command that writes into its directory whatever it likes."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import math
import os
import pwd
import resource
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ebbtide.matcher.engines import records as records_module
from ebbtide.matcher.engines.dask import Dask
from ebbtide.matcher.engines.records import CLAIMED, UNRECORDED, Record, Records, merged, shell_of
from ebbtide.matcher.engines.settings import EngineSettings
from ebbtide.matcher.errors import EngineFull, EngineRefused, EngineSettingsError, EngineUnreachable
from ebbtide.matcher.match.attempts import AttemptState, Claim, Look, Seen
from ebbtide.matcher.match.silences import Silences, measured
from ebbtide.matcher.match.tasks import SILENCE_LIMIT_S

ATTEMPT = "ebb.train.0a.1"
BEGUN = "begun 1700000000.5 n1\n"


@pytest.fixture
async def records(tmp_path: Path) -> Records:
    made = Records(tmp_path / "records")
    made.directory.mkdir(mode=0o711)
    await made.check()
    await made.prepare(ATTEMPT)
    return made


def write(records: Records, name: str, text: str) -> Path:
    path = records.directory / ATTEMPT / name
    path.write_text(text)
    return path


async def read(records: Records) -> Record:
    async with asyncio.timeout(5):
        return (await records.read([ATTEMPT]))[ATTEMPT]


@pytest.mark.parametrize("by_s", [3600.0, -3600.0])
async def test_an_end_is_dated_as_the_managers_clock_has_it_whatever_that_of_a_file_server_says(
    records: Records, monkeypatch: pytest.MonkeyPatch, by_s: float
) -> None:
    write(records, "claim", BEGUN)
    ended_at, wall = write(records, "end", "7 1700000001.25\n").stat().st_mtime, time.time
    monkeypatch.setattr(time, "time", lambda: wall() + by_s)
    found = await read(records)
    assert found.ended_at == pytest.approx(ended_at + by_s, abs=60.0)
    assert found.silent_s is not None
    assert found.silent_s < 60.0


async def test_what_an_attempt_writes_is_read(records: Records) -> None:
    assert await read(records) == Record()
    write(records, "claim", BEGUN)
    # A guest that was suspended: its clock stands where that was done.
    os.utime(write(records, "end", "7 1699990001.25\n"), (1700000001.25, 1700000001.25))
    found = await read(records)
    assert (found.claim, found.machine, found.begun_at) == (Claim.BEGUN, "n1", 1700000000.5)
    assert (found.exit_code, found.ended_at) == (7, 1700000001.25)
    assert found.silent_s is not None
    assert found.silent_s < 5


async def test_a_directory_with_no_record_of_what_has_begun_is_another_one(records: Records) -> None:
    gone = "ebb.gone.0a.1"
    with pytest.raises(EngineUnreachable, match="is that mounted here"):
        await records.read([ATTEMPT, gone], [gone])
    assert (await records.read([ATTEMPT, gone], [gone, ATTEMPT]))[gone] == Record()


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(path))


def _terabyte(path: Path) -> None:
    with path.open("w") as file:
        file.truncate(2**40)


THINGS: dict[str, Callable[[Path], object]] = {
    "a link to /dev/zero": lambda path: path.symlink_to("/dev/zero"),
    "a link to a file": lambda path: path.symlink_to("/etc/passwd"),
    "a link to itself": lambda path: path.symlink_to(path),
    "a FIFO": os.mkfifo,
    "a directory": lambda path: path.mkdir(),
    "a socket": _socket,
    "a terabyte": _terabyte,
    "nothing": lambda path: path.touch(),
    "zeros": lambda path: path.write_bytes(bytes(4096)),
    "no text": lambda path: path.write_bytes(b"begun \xff\xfe \xed\xa0\x80"),
}


@pytest.mark.parametrize("name", ["claim", "end"])
@pytest.mark.parametrize("thing", THINGS)
async def test_what_is_no_record_costs_no_time_and_no_memory(records: Records, name: str, thing: str) -> None:
    if name == "end":
        write(records, "claim", BEGUN)
    THINGS[thing](records.directory / ATTEMPT / name)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = await read(records)
    # What stands in the place of a claim keeps every attempt from beginning, so it is one.
    assert (found.claim, found.exit_code, found.ended_at) == (Claim.BEGUN, None, None)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20_000
    assert (await records.seal(ATTEMPT)).claim is Claim.BEGUN


@pytest.mark.parametrize(
    "text",
    ["begun nan n1", "begun 1e308 n1", "begun -1 n1", "begun 1 \x1b[31m", "begun 1 " + "n" * 300, "begun",
     "begun 1 n1 4"],
)  # fmt: skip
async def test_figures_of_a_claim_that_cannot_be_are_no_figures(records: Records, text: str) -> None:
    write(records, "claim", text)
    found = await read(records)
    assert (found.claim, found.begun_at, found.machine) == (Claim.BEGUN, None, None)


@pytest.mark.parametrize(
    "text", ["nan 1", "0 nan", "0 inf", "-1 1", "256 1", "9" * 4000 + " 1", "0", "0 1 2", "\u0664 1"]
)
async def test_figures_of_an_end_that_cannot_be_are_no_end(records: Records, text: str) -> None:
    write(records, "claim", BEGUN)
    write(records, "end", text)
    assert (await read(records)).exit_code is None


@pytest.mark.service
async def test_a_file_of_another_user_is_no_record(records: Records) -> None:
    """Needs root, as all of `make test`: only root gives files away."""
    os.chown(write(records, "claim", BEGUN), 12345, 12345)
    assert (await read(records)).machine is None


async def test_a_claim_that_is_dated_ahead_does_not_make_its_command_run_for_ever(records: Records) -> None:
    ahead = time.time() + 3600
    os.utime(write(records, "claim", BEGUN), (ahead, ahead))
    silences: Silences = {}
    for now in range(0, 130, 5):
        found = await read(records)
        assert found.silent_s == math.inf
        assert found.touched_at == pytest.approx(ahead)
        (seen,) = merged({}, {}, {ATTEMPT: found}).values()
        look, silences = measured(Look({}, {ATTEMPT: seen}), silences, float(now))
        silent_s = look.attempts[ATTEMPT].silent_s
        # From one look nothing follows: a clock may have been set back.
        assert silent_s == now
    assert silent_s is not None
    assert silent_s > SILENCE_LIMIT_S


async def test_a_directory_that_is_a_link_is_not_followed(records: Records, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "end").write_text("0 1700000001")
    os.rmdir(records.directory / ATTEMPT)
    (records.directory / ATTEMPT).symlink_to(elsewhere)
    found = await read(records)
    assert (found.claim, found.exit_code) == (Claim.BEGUN, None)


async def test_a_sealed_attempt_stays_sealed_and_its_directory_is_its_users_only(records: Records) -> None:
    assert (await records.seal(ATTEMPT)).claim is Claim.SEALED
    assert (await records.seal(ATTEMPT)).claim is Claim.SEALED
    assert (await read(records)).claim is Claim.SEALED
    assert (records.directory / ATTEMPT).stat().st_mode & 0o777 == 0o700
    assert os.listdir(records.directory / ATTEMPT) == ["claim"]


async def test_a_seal_says_again_and_again_whether_there_was_a_directory(records: Records) -> None:
    lost = "ebb.train.0a.2"
    for _ in range(2):
        assert [(await records.seal(name)).anew for name in (ATTEMPT, lost)] == [False, True]
    assert (await records.read([lost]))[lost].claim is Claim.SEALED


async def test_a_file_that_its_owner_keeps_by_a_lease_is_no_record_and_keeps_no_other_attempt(
    records: Records,
) -> None:
    other = "ebb.train.0b.1"
    await records.prepare(other)
    (records.directory / other / "claim").write_text(BEGUN)
    told = signal.signal(signal.SIGIO, signal.SIG_IGN)
    try:
        with write(records, "claim", BEGUN).open("r+") as file:
            fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
            found = await records.read([ATTEMPT, other])
            fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    finally:
        signal.signal(signal.SIGIO, told)
    assert (found[ATTEMPT].claim, found[ATTEMPT].machine) == (Claim.BEGUN, None)
    assert found[other].machine == "n1"


async def test_a_seal_is_made_where_no_command_can_remove_it(records: Records, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a command that empties its own directory whenever something comes into it."""
    link = os.link

    def after_its_command(*args: Any, **options: Any) -> None:
        for path in (records.directory / ATTEMPT).iterdir():
            path.unlink()
        link(*args, **options)

    monkeypatch.setattr(os, "link", after_its_command)
    assert (await records.seal(ATTEMPT)).claim is Claim.SEALED
    assert os.listdir(records.directory) == [ATTEMPT]


async def test_an_attempt_that_cannot_be_sealed_is_refused_by_itself(records: Records, tmp_path: Path) -> None:
    os.rmdir(records.directory / ATTEMPT)
    (records.directory / ATTEMPT).symlink_to(tmp_path)
    with pytest.raises(EngineRefused, match=f"attempt {ATTEMPT} cannot be sealed"):
        await records.seal(ATTEMPT)
    assert (await records.seal("ebb.train.0a.2")).claim is Claim.SEALED


async def test_what_is_removed_may_be_deeper_than_any_path_and_links_are_not_followed(
    records: Records, tmp_path: Path
) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").touch()
    here = os.open(records.directory / ATTEMPT, os.O_RDONLY)
    for _ in range(3000):
        os.mkdir("below", dir_fd=here)
        os.symlink(precious, "link", dir_fd=here)
        below = os.open("below", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
    try:
        await records.remove(ATTEMPT)
        assert (os.listdir(records.directory), os.listdir(precious)) == ([], ["file"])
    finally:
        # Python's own removal of the test's directory would not get that deep.
        await (await asyncio.create_subprocess_exec("rm", "-rf", records.directory / ATTEMPT)).wait()


@pytest.mark.service
async def test_an_attempt_of_a_user_that_is_gone_is_refused_and_its_directory_can_be_sealed(records: Records) -> None:
    """Needs root, as all of `make test`: no other manager looks its tasks' users up."""
    with pytest.raises(EngineFull, match="there is no user nobody-knows on the manager's machine"):
        await records.prepare("ebb.train.0a.2", "nobody-knows")
    assert (await records.seal("ebb.train.0a.2")).claim is Claim.SEALED


async def test_a_user_whose_quota_is_full_keeps_only_its_own_attempts_and_a_full_disk_all(
    records: Records, monkeypatch: pytest.MonkeyPatch
) -> None:
    def given(handle: int, user: int, group: int) -> None:
        if user == 1001:
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    uids = {"hoarder": 1001, "other": 1002}
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(pwd, "getpwnam", lambda name: SimpleNamespace(pw_uid=uids[name], pw_gid=uids[name]))
    monkeypatch.setattr(os, "fchown", given)
    with pytest.raises(EngineFull, match="cannot be given to hoarder: Disk quota exceeded"):
        await records.prepare("ebb.train.0b.1", "hoarder")
    await records.prepare("ebb.train.0c.1", "other")
    monkeypatch.setattr(os, "mkdir", full)
    with pytest.raises(EngineUnreachable, match="No space left on device"):
        await records.prepare("ebb.train.0d.1", "other")


def test_a_directory_of_others_or_that_they_may_write_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for mode in (0o777, 0o775, 0o722):
        tmp_path.chmod(mode)
        with pytest.raises(EngineSettingsError, match="writable by no other"):
            asyncio.run(Records(tmp_path).check())
    tmp_path.chmod(0o711)
    asyncio.run(Records(tmp_path).check())
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(EngineSettingsError, match="must belong to the manager's own user"):
        asyncio.run(Records(tmp_path).check())


@pytest.mark.parametrize(
    ("engine", "record", "code", "claim"),
    [
        (7, Record(Claim.BEGUN, exit_code=0), 7, Claim.BEGUN),
        (0, Record(Claim.BEGUN, exit_code=7), 0, Claim.BEGUN),
        (0, Record(), 0, Claim.BEGUN),
        (None, Record(Claim.BEGUN, exit_code=7), 7, Claim.BEGUN),
        (1, Record(), 1, Claim.NONE),
        (7, Record(Claim.BEGUN), 7, Claim.BEGUN),
        # Its node was killed under it.
        (137, Record(Claim.BEGUN), None, Claim.BEGUN),
        # The engine ended it: an administrator, a time limit.
        (None, Record(Claim.BEGUN, exit_code=143), None, Claim.BEGUN),
        (139, Record(Claim.BEGUN, exit_code=139), 139, Claim.BEGUN),
    ],
)
def test_the_exit_code_of_the_engine_comes_before_that_of_a_file(
    engine: int | None, record: Record, code: int | None, claim: Claim
) -> None:
    seen = Seen(AttemptState.ENDED, "n1", exit_code=engine)
    found = merged({ATTEMPT: seen}, {ATTEMPT: record}, {ATTEMPT: record})[ATTEMPT]
    assert (found.exit_code, found.claim) == (code, claim)


@contextlib.contextmanager
def no_room() -> Iterator[None]:
    """Files can be made, and nothing be written into them."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


class Signalled(Dask):
    """An engine whose workers have every attempt."""

    def __init__(self, directory: Path) -> None:
        super().__init__(EngineSettings(engine="dask", directory=directory, dask_scheduler="tcp://127.0.0.1:1"))
        self.sent: list[int] = []

    async def _signal(self, attempt: str, number: int, all_of_it: bool) -> bool:
        self.sent.append(number)
        return True


async def test_a_notice_that_a_full_disk_does_not_take_is_signalled_once_and_keeps_no_other(records: Records) -> None:
    engine = Signalled(records.directory)
    with no_room():
        for _ in range(3):
            # A refusal, which keeps no instruction behind it.
            with pytest.raises(EngineRefused, match="that it was signalled cannot be written down: File too large"):
                await engine.signal(ATTEMPT, "USR1", "1.000")
        assert len(engine.sent) == 1
        with pytest.raises(EngineRefused):
            await engine.signal(ATTEMPT, "USR1", "2.000")
        assert len(engine.sent) == 2, "another notice"
    await engine.signal(ATTEMPT, "USR1", "2.000")
    await Signalled(records.directory).signal(ATTEMPT, "USR1", "2.000")
    assert len(engine.sent) == 2
    assert await records.told(ATTEMPT, "2.000"), "written as soon as there is room"


def run_attempt(directory: Path, *command: str, path: str = "/usr/bin:/bin") -> int:
    argv = [*shell_of(directory, ATTEMPT), "n1", *command]
    return subprocess.run(argv, env={"PATH": path}, capture_output=True, check=False, timeout=60).returncode


def test_an_attempt_that_cannot_make_its_claim_is_another_than_one_whose_claim_is_there(tmp_path: Path) -> None:
    assert run_attempt(tmp_path / "not-mounted", "true") == UNRECORDED
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/ln").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "bin/ln").chmod(0o755)
    (tmp_path / ATTEMPT).mkdir()
    assert run_attempt(tmp_path, "true", path=f"{tmp_path}/bin:/usr/bin:/bin") == UNRECORDED
    assert [path.name for path in (tmp_path / ATTEMPT).iterdir()] == ["out"]
    assert run_attempt(tmp_path, "true") == 0
    assert run_attempt(tmp_path, "true") == CLAIMED


def test_an_attempt_whose_output_cannot_be_opened_has_not_begun(tmp_path: Path) -> None:
    """As where its user has no file left: else the shell's own code would count as its command's, and end its task."""
    (tmp_path / ATTEMPT / "out").mkdir(parents=True)
    assert run_attempt(tmp_path, "true") == UNRECORDED
    assert [path.name for path in (tmp_path / ATTEMPT).iterdir()] == ["out"]


@pytest.mark.parametrize("code", [0, 7])
def test_an_attempt_whose_end_cannot_be_written_still_ends_with_its_commands_code(tmp_path: Path, code: int) -> None:
    (tmp_path / ATTEMPT).mkdir()
    assert run_attempt(tmp_path, "/bin/sh", "-c", f"rm -r {tmp_path / ATTEMPT}; exit {code}") == code


def test_signals_that_come_while_an_end_is_written_are_ignored(tmp_path: Path) -> None:
    (tmp_path / ATTEMPT).mkdir()
    (tmp_path / "bin").mkdir()
    # Once the command has run it gets all of them itself: it ignores what its shell ignores.
    told = "for one in TERM INT HUP USR1 USR2; do kill -$one $$; done"
    (tmp_path / "bin/sync").write_text(f"#!/bin/sh\n[ -e {tmp_path / 'ran'} ] && {told}\nexit 0\n")
    (tmp_path / "bin/sync").chmod(0o755)
    ran = run_attempt(tmp_path, "touch", str(tmp_path / "ran"), path=f"{tmp_path}/bin:/usr/bin:/bin")
    assert ran == 0
    assert (tmp_path / ATTEMPT / "end").read_text().startswith("0 ")


async def test_a_directory_that_hangs_keeps_nobody_else_from_threads_and_is_not_reachable(
    records: Records, monkeypatch: pytest.MonkeyPatch
) -> None:
    hung, back, hanging = Records(records.directory, 0.2), threading.Event(), list[str]()

    @contextlib.contextmanager
    def hangs(*_: Any) -> Iterator[int]:
        hanging.append(threading.current_thread().name)
        assert back.wait(60)
        raise FileNotFoundError
        yield 0

    with monkeypatch.context() as patched:
        patched.setattr(records_module, "_directory", hangs)
        try:
            reads = [asyncio.create_task(hung.output(ATTEMPT, 0, 9), name=f"output-{n}") for n in range(40)]
            _, pending = await asyncio.wait(reads, timeout=0.01)
            for one in pending:
                one.cancel()
            await asyncio.gather(*reads, return_exceptions=True)
            # On a slow machine they were called off before all threads had one.
            while len(hanging) < 4:
                with contextlib.suppress(EngineUnreachable):
                    await hung.output(ATTEMPT, 0, 9)
            async with asyncio.timeout(20):
                assert await asyncio.to_thread(lambda: 1) == 1
                for use in (hung.read([ATTEMPT]), hung.output(ATTEMPT, 0, 9), hung.check(), hung.tell(ATTEMPT, "x")):
                    with pytest.raises(EngineUnreachable, match=r"no answer within 0\.2 s"):
                        await use
            # Those who come while all threads hang are refused at once, and wait in no line.
            with pytest.raises(EngineUnreachable, match="no answer"):
                await Records(records.directory, 3600.0).output(ATTEMPT, 0, 9)
        finally:
            back.set()
    async with asyncio.timeout(20):
        while True:
            with contextlib.suppress(EngineUnreachable):
                assert await records.read([ATTEMPT]) == {ATTEMPT: Record()}
                return
            await asyncio.sleep(0)


async def test_more_attempts_than_one_answer_may_take_are_read_in_parts(
    records: Records, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    read_all = Records._read_all

    def counted(self: Records, attempts: Any, begun: Any) -> dict[str, Record]:
        calls.append(len(attempts))
        return read_all(self, attempts, begun)

    monkeypatch.setattr(Records, "_read_all", counted)
    names = [f"ebb.t-{number}.0a.1" for number in range(1200)]
    assert (await records.read(names)).keys() == set(names)
    assert calls == [500, 500, 200]
