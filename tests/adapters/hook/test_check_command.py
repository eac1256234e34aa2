"""`ebb-adapter check`: what it asks of an application it gives back, whatever comes between."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from app_adapters import conformance
from app_adapters.adapter import Adapter, Answer, Deadline, Promise, Refusal, Release
from app_adapters.memcached.adapter import MemcachedAdapter
from app_adapters.redis.adapter import RedisAdapter
from app_adapters.server import HookServer
from tests.adapters.cache import Cache
from tests.adapters.redis_server import RedisServer
from tests.guestagent.elastic import Elastic

FULL_MIB = 400.0
#: Ctrl-C also where this run was started without it, as in the background of a shell.
PROGRAM = (
    "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    "from app_adapters.main import main; sys.exit(main())"
)


@contextlib.contextmanager
def served(adapter: Adapter, folder: Path) -> Iterator[list[str]]:
    """The arguments of a check of its hook."""
    (folder / "token").write_text("t")
    server = HookServer(adapter, port=0, token_file=str(folder / "token")).start()
    try:
        yield [server.url, "--token-file", str(folder / "token")]
    finally:
        server.stop()


@pytest.mark.service
@pytest.mark.parametrize("more", [[], ["--memory-mib", "80"]])
def test_memcached_has_its_limit_after_a_check_and_its_items_unless_it_was_shrunk(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str]
) -> None:
    cache = Cache(512)
    try:
        count = cache.fill(80)
        with served(MemcachedAdapter(port=cache.port), tmp_path) as arguments:
            assert conformance.main([*arguments, *more]) == 0, capsys.readouterr().out
        assert cache.limit_mib() == 512
        assert (cache.right(range(count)) == count) == (not more)
    finally:
        cache.stop()


@pytest.mark.service
@pytest.mark.parametrize("more", [[], ["--memory-mib", "60"]])
def test_redis_has_its_limit_and_policy_after_a_check_and_its_keys_unless_it_was_shrunk(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str]
) -> None:
    server = RedisServer(tmp_path)
    adapter = RedisAdapter(
        ("127.0.0.1", server.port), str(tmp_path / "state.json"), minimum_mib=16, policy="allkeys-lru", decay_s=0.5
    )
    try:
        count = server.fill(70)
        with served(adapter, tmp_path) as arguments:
            assert conformance.main([*arguments, *more]) == 0, capsys.readouterr().out
        assert (server.limit_mib(), server.config("maxmemory-policy")) == (0, "noeviction")
        assert (server.call("DBSIZE") == count) == (not more)
    finally:
        server.stop()


def test_a_check_without_a_size_asks_for_nothing_but_growth(tmp_path: Path) -> None:
    elastic = Elastic(300.0, maximum_mib=FULL_MIB)
    with served(elastic, tmp_path) as arguments:
        assert conformance.main(arguments) == 0
    assert {(direction, size_mib) for direction, size_mib, _ in elastic.targets} == {("reinflate", FULL_MIB)}


def test_one_that_has_grown_by_the_check_itself_may_promise_that_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of 300 MiB it grows to 400 first, and has 350 to give then."""
    with served(Elastic(300.0, maximum_mib=FULL_MIB), tmp_path) as arguments:
        assert conformance.main([*arguments, "--memory-mib", "50"]) == 0, capsys.readouterr().out


def test_an_application_has_grown_again_where_a_check_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Boastful(Elastic):
        def deflate(self, target: dict[str, float], mode: str, deadline: Deadline) -> Answer:
            answer = super().deflate(target, mode, deadline)
            assert isinstance(answer, Promise)
            return Promise({"memory_mib": 9999.0}, 0.5, answer.work)

    elastic = Boastful(300.0, maximum_mib=FULL_MIB)
    with served(elastic, tmp_path) as arguments:
        assert conformance.main([*arguments, "--memory-mib", "100"]) == 1
    said = capsys.readouterr().out
    assert len(re.findall("^FAIL.*: promised.memory_mib: 9999", said, re.MULTILINE)) == 2, said
    assert elastic.targets[-1][:2] == ("reinflate", FULL_MIB)
    assert elastic.size_mib == FULL_MIB


def test_what_is_owed_is_told_until_it_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conformance, "AGAIN_S", 0.01)

    class Reluctant(Elastic):
        """Grows only at the fourth telling: it refuses, has a fault, and fails in it before."""

        told = 0

        def reinflate(self, target: dict[str, float], deadline: Deadline) -> Answer:
            if self.targets and self.targets[0][0] == "deflate":
                self.told += 1
                if self.told == 1:
                    return Refusal("not now")
                if self.told == 2:
                    raise ValueError("a fault")
                if self.told == 3:
                    return Promise({}, 0.1, lambda: Release({}, "itself", "not in time", complete=False))
            return super().reinflate(target, deadline)

    elastic = Reluctant(300.0, maximum_mib=FULL_MIB)
    with served(elastic, tmp_path) as (url, _, token_file):
        check = conformance.Conformance(url, Path(token_file).read_text(), {"memory_mib": 100.0}, 30.0)
        check.capabilities()
        with pytest.raises(conformance.Wrong, match="500"):
            check.shrinks()
        check.give_back()
    assert elastic.told == 4
    assert elastic.size_mib == FULL_MIB


def test_one_that_refuses_to_grow_for_good_is_told_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Stubborn(Elastic):
        def reinflate(self, target: dict[str, float], deadline: Deadline) -> Answer:
            return Refusal("never", for_good=True)

    with served(Stubborn(300.0), tmp_path) as arguments:
        assert conformance.main([*arguments, "--memory-mib", "100", "--limit-s", "0.05"]) == 1
    said = capsys.readouterr().out
    assert "FAIL  shrinks and grows: it does not grow again: never" in said
    assert "FAIL  what was taken is not given back: it does not grow again: never" in said


def test_nothing_is_taken_of_what_it_does_not_say_that_it_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    elastic = Elastic(300.0, maximum_mib=FULL_MIB)
    with served(elastic, tmp_path) as arguments:
        assert conformance.main([*arguments, "--memory-mib", "100", "--cpu-cores", "1"]) == 1
    assert "FAIL  shrinks and grows: resources.cpu_cores: not known, so nothing is taken" in capsys.readouterr().out
    assert {direction for direction, *_ in elastic.targets} == {"reinflate"}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_check_that_is_stopped_gives_back_what_it_took(tmp_path: Path, number: signal.Signals) -> None:
    class Slow(Elastic):
        def deflate(self, target: dict[str, float], mode: str, deadline: Deadline) -> Answer:
            self.go.clear()
            return super().deflate(target, mode, deadline)

    elastic, never = Slow(300.0, maximum_mib=FULL_MIB), threading.Event()

    def asked(direction: str) -> None:
        end = time.monotonic() + 60
        while not elastic.targets or elastic.targets[-1][0] != direction:
            assert time.monotonic() < end, f"no {direction}"
            never.wait(0.01)

    with served(elastic, tmp_path) as arguments:
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, "check", *arguments, "--memory-mib", "100"], stdout=subprocess.PIPE
        )
        try:
            asked("deflate")
            process.send_signal(number)
            asked("reinflate")
            elastic.go.set()
            said = process.communicate(timeout=60)[0].decode()
        finally:
            process.kill()
            process.communicate()
    assert (process.returncode, said.splitlines()[-1]) == (130, "stopped"), said
    assert not re.findall(r"^FAIL", said, re.MULTILINE)
    assert elastic.size_mib == FULL_MIB
