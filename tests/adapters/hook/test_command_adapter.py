"""The adapter for any program: what it is asked, what it may answer, and that nothing of it stays behind."""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from app_adapters.adapter import Deadline, Promise, Refusal
from app_adapters.errors import AdapterError, ApplicationError
from app_adapters.main import build_parser
from app_adapters.processes import programs
from app_adapters.processes.command import READY, CommandAdapter
from app_adapters.server import HookServer
from tests.adapters.proc import ended
from tests.adapters.rest import Rest
from tests.waiting import until_sync

pytestmark = pytest.mark.service

Make = Callable[..., CommandAdapter]

GOOD: dict[str, Any] = {
    "capabilities": {
        "version": "7",
        "resources": {"memory_mib": {"current": 100, "minimum": 10, "maximum": 200, "step": 1}},
        "expected_s": 2,
        "modes": ["ask"],
    },
    "status": {"sizes": {"memory_mib": 99}},
    "deflate": {"promised": {"memory_mib": 40}, "expected_s": 3, "reason": "gladly"},
    "reinflate": {"promised": {}},
    "release": {"released": {"memory_mib": 38}, "measured_by": "a scale", "reason": "done"},
}


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """An adapter over a program that logs what it is asked, and answers from a table or runs a line of Python."""

    def adapter(answers: dict[str, Any] | None = None, code: str = "", **options: Any) -> CommandAdapter:
        (tmp_path / "answers").write_text(json.dumps({**GOOD, **(answers or {})}))
        program = tmp_path / "program"
        program.write_text(
            f"#!{sys.executable}\n"
            "import json, os, subprocess, sys, time\n"
            "question = json.load(sys.stdin)\n"
            f"open({str(tmp_path / 'asked')!r}, 'a').write(json.dumps(question) + '\\n')\n"
            f"{code or 'pass'}\n"
            f"print(json.dumps(json.load(open({str(tmp_path / 'answers')!r}))[question['method']]))\n"
        )
        program.chmod(0o755)
        # Starting Python may take long on a busy machine.
        return CommandAdapter([str(program)], **{"answer_limit_s": 30.0, **options})

    return adapter


def asked(tmp_path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (tmp_path / "asked").read_text().splitlines()]


def test_the_program_is_asked_by_the_documented_json(make: Make, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("t")
    server = HookServer(make(), port=0, token_file=str(tmp_path / "token")).start()
    try:
        rest = Rest(server.address, "t")
        assert rest.capabilities() == {"name": "command", "reversible": True, **GOOD["capabilities"]}
        assert rest.send("GET", "/deflation/v1/status")[1] == {"sizes": {"memory_mib": 99.0}}
        status, answer = rest.target("r", "deflate", 60, mode="force")
        assert (status, answer["promised"], answer["reason"]) == (202, {"memory_mib": 40.0}, "gladly")
        done = rest.finished("r")
        assert (done["released"], done["measured_by"]) == ({"memory_mib": 38.0}, "the program: a scale")
        assert rest.target("up", "reinflate", 100)[0] == 202
        rest.finished("up")
    finally:
        server.stop()
    questions = asked(tmp_path)
    assert all(0 < question.pop("deadline_s", 60) <= 60 for question in questions)
    # When a release begins and while it goes on, too: as often as somebody asks how far it is.
    assert questions.index({"method": "status"}, 2) == 3
    assert [
        question for number, question in enumerate(questions) if number < 2 or question != {"method": "status"}
    ] == [
        {"method": "capabilities"},
        {"method": "status"},
        {"method": "deflate", "target": {"memory_mib": 60.0}, "mode": "force"},
        {"method": "release", "direction": "deflate", "target": {"memory_mib": 60.0}, "mode": "force"},
        {"method": "reinflate", "target": {"memory_mib": 100.0}, "mode": "ask"},
        {"method": "release", "direction": "reinflate", "target": {"memory_mib": 100.0}, "mode": "ask"},
    ]


def test_a_refusal_is_one_with_reason_time_and_floor(make: Make) -> None:
    adapter = make({"deflate": {"refused": "busy season", "retry_after_s": 9, "floor": {"memory_mib": 80}}})
    assert adapter.deflate({"memory_mib": 10}, "ask", Deadline(30)) == Refusal("busy season", 9.0, {"memory_mib": 80.0})
    adapter = make({"reinflate": {"refused": "it never grows", "for_good": True}})
    assert adapter.reinflate({"memory_mib": 10}, Deadline(30)) == Refusal("it never grows", for_good=True)


def test_what_is_not_refused_may_say_so(make: Make) -> None:
    adapter = make({"deflate": {"refused": False, "promised": {"memory_mib": 40}}})
    promise = adapter.deflate({"memory_mib": 10}, "ask", Deadline(30))
    assert isinstance(promise, Promise)
    assert promise.promised == {"memory_mib": 40.0}


def test_work_that_is_not_complete_is_told_so(make: Make) -> None:
    adapter = make({"release": {"released": {"memory_mib": 3}, "complete": False, "reason": "half of it"}})
    promise = adapter.deflate({"memory_mib": 10}, "ask", Deadline(30))
    assert isinstance(promise, Promise)
    release = promise.work()
    assert (release.released, release.complete, release.reason) == ({"memory_mib": 3.0}, False, "half of it")


RANGE = {"current": 1, "minimum": 1, "maximum": 1, "step": 1}


@pytest.mark.parametrize(
    ("method", "answer", "sentence"),
    [
        ("capabilities", {}, "resources: must be an object"),
        ("capabilities", {"resources": {"disk": RANGE}}, "resources.disk: was not named by --component"),
        ("capabilities", {"resources": {"memory_mib": {"current": 1}}}, "resources.memory_mib.minimum: is missing"),
        ("capabilities", {"resources": {"memory_mib": {**RANGE, "step": -1}}}, "resources.memory_mib.step: must be"),
        ("capabilities", {"resources": {"memory_mib": {**RANGE, "size": 1}}}, "resources.memory_mib.size: there is"),
        ("capabilities", {"resources": {"memory_mib": RANGE}, "modes": ["beg"]}, "modes: must be"),
        ("deflate", {}, "promised: is missing"),
        ("deflate", {"promised": {"memory_mib": "40"}}, "promised.memory_mib: must be a finite number"),
        ("deflate", {"promised": {"cpu_cores": 1}}, "promised.cpu_cores: there is memory_mib only"),
        ("deflate", {"promised": {"memory_mib": 10**400}}, "promised.memory_mib: must be a finite number"),
        ("deflate", {"promised": {}, "expected_s": True}, "expected_s: must be a finite number"),
        ("deflate", {"refused": "no", "retry_after_s": "soon"}, "retry_after_s: must be a finite number"),
        ("deflate", {"refused": True}, "refused: must be the reason, a text"),
        ("deflate", {"refused": 0, "promised": {}}, "refused: must be the reason, a text"),
        ("deflate", [1], "did not write a JSON object"),
        ("release", {}, "released: must be an object"),
        ("release", {"released": {}, "complete": 1}, "complete: must be true or false"),
        ("status", {"sizes": 5}, "sizes: must be an object"),
    ],
)
def test_an_answer_that_is_wrong_names_its_field(make: Make, method: str, answer: Any, sentence: str) -> None:
    adapter = make({method: answer})
    with pytest.raises(ApplicationError, match=sentence):
        ask(adapter, method)


def ask(adapter: CommandAdapter, method: str, deadline_s: float = 30.0) -> object:
    if method == "capabilities":
        return adapter.capabilities()
    if method == "status":
        return adapter.status()
    answer = adapter.deflate({"memory_mib": 60.0}, "ask", Deadline(deadline_s))
    assert isinstance(answer, Promise)
    return answer.work() if method == "release" else answer


@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        ("sys.exit('the cache does not answer')", "ended with status 1: the cache does not answer"),
        ("os.kill(os.getpid(), 9)", "was ended by signal 9"),
        ("print('hello')", "did not write JSON"),
        ('print(\'{"promised": {"memory_mib": NaN}}\'); sys.exit(0)', "did not write JSON"),
        ("print('[' * 60000); sys.exit(0)", "did not write JSON"),
        ("os.write(1, b'x' * 70000)", "wrote more than 65536 bytes"),
        ("while True: os.write(1, b'x' * 70000)", "wrote more than 65536 bytes"),
        ("sys.stderr.write('x' * 1000000 + ' the end'); sys.exit(3)", "ended with status 3: x+ the end"),
        ("os.close(1); time.sleep(0.1); os._exit(0)", "did not write JSON"),
    ],
)
def test_a_program_that_fails_is_a_sentence(make: Make, code: str, sentence: str) -> None:
    with pytest.raises(ApplicationError, match=sentence) as caught:
        make(code=code).capabilities()
    assert str(caught.value).startswith("program capabilities: ")
    assert len(str(caught.value)) < 500


def test_one_that_is_not_there_or_is_no_program_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ApplicationError, match="cannot be started: No such file"):
        CommandAdapter([str(tmp_path / "absent")]).capabilities()
    (tmp_path / "text").write_text("hello")
    with pytest.raises(ApplicationError, match="cannot be started: Permission denied"):
        CommandAdapter([str(tmp_path / "text")]).capabilities()


@pytest.mark.parametrize("stubborn", [False, True])
def test_one_that_hangs_is_ended_with_its_children(make: Make, tmp_path: Path, stubborn: bool) -> None:
    deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" if stubborn else ""
    pids = tmp_path / "pids"
    child = f"{deaf}import time; time.sleep(3600)"
    code = (
        f"{deaf}child = subprocess.Popen([sys.executable, '-c', {child!r}])\n"
        f"open({str(pids) + '.new'!r}, 'w').write(f'{{os.getpid()}} {{child.pid}}')\n"
        f"os.rename({str(pids) + '.new'!r}, {str(pids)!r})\n"
        "time.sleep(3600)"
    )
    with pytest.raises(ApplicationError, match=r"did not answer within 5\.0 s"):
        make(code=code, answer_limit_s=5.0).capabilities()
    assert pids.exists(), "the program did not come so far in 5 s"
    for pid in map(int, pids.read_text().split()):
        until_sync(functools.partial(ended, pid), f"process {pid} has ended")


def test_a_child_that_outlives_its_program_is_ended_and_not_waited_for(make: Make, tmp_path: Path) -> None:
    pid_file = tmp_path / "child"
    code = (
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(3600)'])\n"
        f"open({str(pid_file)!r}, 'w').write(str(child.pid))"
    )
    began = time.monotonic()
    assert make(code=code).capabilities().version == "7"
    assert time.monotonic() - began < 25
    until_sync(lambda: ended(int(pid_file.read_text())), "the child has ended")


def test_work_is_ended_at_its_deadline_and_when_it_is_called_off(make: Make, tmp_path: Path) -> None:
    adapter = make(code="time.sleep(3600 if question['method'] == 'release' else 0)")
    deadline = Deadline(60)
    promise = adapter.deflate({"memory_mib": 60.0}, "ask", deadline)
    assert isinstance(promise, Promise)
    deadline.cancel()
    began = time.monotonic()
    with pytest.raises(ApplicationError, match=r"release: (was called off|did not answer)"):
        promise.work()
    assert time.monotonic() - began < 25


def test_its_input_may_be_left_unread(make: Make, tmp_path: Path) -> None:
    program = tmp_path / "deaf"
    program.write_text('#!/bin/sh\nexec </dev/null\necho \'{"sizes": {"memory_mib": 5}}\'\n')
    program.chmod(0o755)
    question = {"method": "status", "filler": "x" * 1_000_000}
    assert programs.ask_program([str(program)], question, 30.0, lambda: False) == {"sizes": {"memory_mib": 5}}


def test_no_shell_sees_the_command_and_bad_options_name_themselves(tmp_path: Path) -> None:
    parser = build_parser("command")
    mark = tmp_path / "mark"
    options = parser.parse_args(["command", "--run", f"/bin/echo '$(touch {mark})' ; touch {mark}"])
    with pytest.raises(ApplicationError, match="did not write JSON"):
        READY.build(options).capabilities()
    assert not mark.exists()
    for run in ("", "'open"):
        with pytest.raises(AdapterError, match="--run: "):
            READY.build(parser.parse_args(["command", "--run", run]))
    both = parser.parse_args(["command", "--run", "x", "--component", "cpu_cores", "--component", "memory_mib"])
    assert READY.build(both).components == ("cpu_cores", "memory_mib")


def test_a_pid_file_without_a_process_is_a_sentence(make: Make, tmp_path: Path) -> None:
    with pytest.raises(ApplicationError, match="--pid-file: "):
        make(pid_file=str(tmp_path / "absent")).capabilities()
    (tmp_path / "pid").write_text(str(os.getpid()))
    adapter = make(pid_file=str(tmp_path / "pid"))
    assert adapter.capabilities().resources["memory_mib"].current != 100
    assert adapter.status()["memory_mib"] > 5
