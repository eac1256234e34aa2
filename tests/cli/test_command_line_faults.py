"""What goes wrong around a command: Ctrl-C, an output that cannot be written, a reader that goes, wrong words."""

from __future__ import annotations

import http.server
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ebbtide.cli.commands import options
from ebbtide.cli.main import app, main
from ebbtide.deflation.allocations import Priority
from ebbtide.messages.common import Problem, Vector
from ebbtide.messages.operations import Operation, OperationState
from ebbtide.messages.tasks import ManagedTask, TaskState
from ebbtide.messages.vms import ClusterVM

SENTENCE = "no host has room for web"


class StandIn(http.server.ThreadingHTTPServer):
    """A manager that takes every creation on, under the state that a test wants."""

    state = OperationState.RUNNING

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.begun = list[str]()
        self.requests = list[str]()
        #: How it fails to answer the next requests: `lost`: it takes one on and goes away, `elected`: none leads yet.
        self.away = list[str]()
        #: The name of a VM for which none ever leads.
        self.away_for = ""
        self.asked = threading.Event()
        #: The names of its VMs.
        self.vms = list[str]()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def operation(self, request_id: str) -> Any:
        over = self.state is not OperationState.RUNNING
        told = ("it is looked at", SENTENCE) if over else ("it is looked at",)
        made = Operation(
            request_id=request_id,
            kind="create",
            state=self.state,
            progress=told,
            sentence=SENTENCE if over else "it runs",
            started_at=1.0,
        )
        return made.model_dump(mode="json")


def vm(name: str) -> Any:
    size = Vector(cpu_cores=1.0, memory_mib=512.0)
    made = ClusterVM(
        name=name, host="host-a", state="running", priority=Priority.DEFLATABLE, nominal=size, minimum=size,
        current=size, generation=1, sentence="it runs",
    )  # fmt: skip
    return made.model_dump(mode="json")


def task(name: str) -> Any:
    made = ManagedTask(
        name=name, state=TaskState.WAITING, cores=1, duration_s=None, restartable=False, max_attempts=1,
        command=("true",), attempts=0, preemptions=0, submitted_at=1.0, sentence="it waits",
    )  # fmt: skip
    return made.model_dump(mode="json")


class _Handler(http.server.BaseHTTPRequestHandler):
    server: StandIn

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append(body["request_id"])
        name = (body.get("vm") or body.get("task") or {}).get("name", "")
        if self.server.away or (name and name == self.server.away_for):
            self.close_connection = True
            if not self.server.away or self.server.away.pop(0) == "elected":
                self.send_response(503)
                self.send_header("Retry-After", "1")
                self.end_headers()
                self.wfile.write(Problem.of(503, "no manager leads yet").model_dump_json().encode())
            return
        self.server.begun.append(name)
        self._answer(task(name) if "task" in body else self.server.operation(body["request_id"]))

    do_PUT = do_POST

    def do_GET(self) -> None:
        if self.path == "/healthz":
            self._answer({"status": "ok", "role": "leader"})
            return
        if self.path.startswith("/v1/tasks/"):
            self._answer(task(self.path.split("/")[3].partition("?")[0]))
            self.server.asked.set()
            return
        if self.path.startswith("/v1/vms?"):
            self._answer({"vms": [vm(name) for name in self.server.vms], "next": None, "position": 0})
            return
        request_id = self.path.rpartition("/")[2].partition("?")[0]
        self._answer(self.server.operation(request_id))
        self.server.asked.set()

    def _answer(self, body: Any) -> None:
        content = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Not in a test's output."""


@pytest.fixture
def manager() -> Iterator[StandIn]:
    server = StandIn()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def token(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text("secret")
    return path


def begin(manager: StandIn | str, token: Path, *words: str, **options: Any) -> subprocess.Popen[str]:
    url = manager if isinstance(manager, str) else manager.url
    environment = {"PATH": "/usr/bin:/bin", "EBB_MANAGER": url, "EBB_TOKEN_FILE": str(token), "HOME": str(token.parent)}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    return subprocess.Popen([sys.executable, "-m", "ebbtide.cli.main", *words], env=environment, text=True, **pipes)


Ran = Callable[..., tuple[int, str, str]]


def run(manager: StandIn | str, token: Path, *words: str, **options: Any) -> tuple[int, str, str]:
    with begin(manager, token, *words, **options) as process:
        out, err = process.communicate(timeout=60)
    assert "Traceback" not in err, err
    return process.returncode, out or "", err


@pytest.fixture
def ebb(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Ran:
    """`run` within this process, which saves the start of an interpreter; with the parameter True `run` itself."""
    if getattr(request, "param", False):
        return run

    def within(manager: StandIn | str, token: Path, *words: str) -> tuple[int, str, str]:
        for name in [name for name in os.environ if name.startswith(("EBB_", "XDG_"))]:
            monkeypatch.delenv(name)
        url = manager if isinstance(manager, str) else manager.url
        for name, value in (("EBB_MANAGER", url), ("EBB_TOKEN_FILE", token), ("HOME", token.parent)):
            monkeypatch.setenv(name, str(value))
        monkeypatch.setattr(sys, "argv", ["ebb", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        assert isinstance(ended.value.code, int)
        return ended.value.code, *capsys.readouterr()

    return within


def each(*rows: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """Rows for `ebb` and other parameters: the first one in a process of its own, as people run it."""
    return [(at == 0, *row) for at, row in enumerate(rows)]


CREATE = ("vm", "create", "web", "--cpu-cores", "1", "--memory-mib", "512")
PRINTING = [("--help",), ("token", "new", "--role", "viewer", "--name", "x"), ("health",)]


@pytest.mark.parametrize("words", [CREATE, ("host", "pause", "host-a")], ids=lambda words: words[1])
def test_ctrl_c_says_that_the_operation_goes_on_and_how_to_look_at_it(
    manager: StandIn, token: Path, words: tuple[str, ...]
) -> None:
    with begin(manager, token, *words) as process:
        if not manager.asked.wait(30):
            process.kill()
            raise AssertionError(process.communicate())
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (130, "")
    assert "the operation goes on: `ebb plan show " in err
    assert ("to call it off: `ebb vm delete web --yes`" in err) == (words is CREATE)
    assert ("--host host-a" in err) == (words is not CREATE)
    assert "Traceback" not in err


def test_a_creation_whose_answer_is_lost_is_asked_for_again_under_its_request_id(
    manager: StandIn, token: Path, ebb: Ran
) -> None:
    manager.state, manager.away = OperationState.DONE, ["lost"]
    code, _, err = ebb(manager, token, *CREATE)
    assert (code, manager.begun) == (0, ["web"]), err
    assert len(manager.requests) > 1
    assert len(set(manager.requests)) == 1


SUBMIT = ("task", "submit", "train", "--", "true")


def test_a_task_whose_answer_is_lost_is_asked_for_again_under_its_request_id(
    manager: StandIn, token: Path, ebb: Ran
) -> None:
    manager.away = ["lost"]
    code, out, err = ebb(manager, token, *SUBMIT)
    assert (code, manager.begun) == (0, ["train"]), err
    assert "it waits" in out
    assert len(manager.requests) > 1
    assert len(set(manager.requests)) == 1


def test_ctrl_c_while_a_task_is_waited_for_says_that_it_goes_on(manager: StandIn, token: Path) -> None:
    with begin(manager, token, "task", "submit", "train", "--wait", "--", "true") as process:
        assert manager.asked.wait(30)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (130, "")
    assert "it goes on: `ebb task show train` shows it; to end it: `ebb task cancel train`" in err


def test_a_task_whose_answer_never_comes_is_said_to_be_taken_perhaps(
    manager: StandIn, token: Path, ebb: Ran, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ebbtide.client.manager.AWAY_S", 0.2)
    monkeypatch.setattr(options, "AWAY_LOOK_S", 0.15)
    manager.away = ["lost"] * 100
    code, _, err = ebb(manager, token, *SUBMIT)
    assert code == 1
    assert "it was asked again for 0.2 s; the manager may have taken it: `ebb task show train` shows it if so" in err
    # Of a manager that was not reached, nothing is said to be taken.
    code, _, err = ebb("http://127.0.0.1:9", token, *SUBMIT)
    assert (code, "may have" in err, "asked again" in err) == (1, False, False)


def test_a_refusal_is_said_once(manager: StandIn, token: Path) -> None:
    manager.state = OperationState.FAILED
    code, out, err = run(manager, token, *CREATE)
    assert code == 1
    assert (out + err).count(SENTENCE) == 1
    assert f"error: the operation ended failed: {SENTENCE}" in err


@pytest.mark.parametrize("words", PRINTING, ids=str)
def test_an_output_that_cannot_be_written_is_one_sentence(
    manager: StandIn, token: Path, words: tuple[str, ...]
) -> None:
    with open("/dev/full", "w") as full:
        code, _, err = run(manager, token, *words, stdout=full)
    assert (code, err) == (1, "error: the output cannot be written: No space left on device\n")


def test_what_a_disk_refuses_is_one_sentence_with_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "lab.json").mkdir()
    for name, value in (("EBB_STATE_DIR", tmp_path), ("HOME", tmp_path)):
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(sys, "argv", ["ebb", "lab", "status"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    assert capsys.readouterr().err == f"error: {tmp_path / 'lab.json'}: Is a directory\n"


@pytest.mark.parametrize("words", [*PRINTING, ("vm", "list", "-o", "name")], ids=str)
def test_a_reader_that_has_gone_changes_no_exit_code(manager: StandIn, token: Path, words: tuple[str, ...]) -> None:
    manager.vms = ["web", "db"]
    reader, writer = os.pipe()
    os.close(reader)
    assert run(manager, token, *words, stdout=writer) == (0, "", "")
    os.close(writer)


def test_what_fails_without_a_reader_still_fails(manager: StandIn, token: Path) -> None:
    manager.state = OperationState.FAILED
    reader, writer = os.pipe()
    os.close(reader)
    assert run(manager, token, *CREATE, "-o", "json", stdout=writer)[0] == 1
    os.close(writer)


def test_a_reader_of_the_progress_that_has_gone_breaks_nothing_off(
    manager: StandIn, token: Path, tmp_path: Path
) -> None:
    manager.state = OperationState.DONE
    reader, writer = os.pipe()
    os.close(reader)
    with begin(manager, token, "apply", "-f", two_vms(tmp_path), stderr=writer) as process:
        out, _ = process.communicate(timeout=60)
    os.close(writer)
    assert (process.returncode, manager.begun) == (0, ["a", "b"]), out


@pytest.mark.parametrize(
    ("ebb", "url"),
    each(
        ("nonsense",),
        ("http://?",),
        ("http://[::1",),
        ("ftp://x",),
        ("http://127.0.0.1:99999",),
        ("http://127.0.0.1:x",),
        ("127.0.0.1:7100",),
    ),
    indirect=["ebb"],
)
def test_an_address_that_is_none_is_said_to_be_none(token: Path, ebb: Ran, url: str) -> None:
    code, _, err = ebb(url, token, "host", "list")
    assert code == 1
    assert err == f"error: {url!r} is no address of a manager: it must be like http://127.0.0.1:7100\n"


@pytest.mark.parametrize(("ebb", "value"), each(("nan",), ("inf",), ("-1",), ("86401",), ("soon",)), indirect=["ebb"])
def test_seconds_that_are_none_are_said_with_their_bounds(token: Path, ebb: Ran, value: str) -> None:
    code, _, err = ebb("http://127.0.0.1:9", token, *CREATE, "--deadline-s", value)
    assert code == 2
    assert f"must be a number from 0 to 86400, but is '{value}'" in err


@pytest.mark.parametrize(("ebb", "name"), each(("Web_1",), ("-web",), ("w" * 41,), ("wéb",)), indirect=["ebb"])
def test_a_name_is_refused_with_a_sentence(token: Path, ebb: Ran, name: str) -> None:
    code, _, err = ebb(
        "http://127.0.0.1:9", token, "vm", "create", "--cpu-cores", "1", "--memory-mib", "512", "--", name
    )
    said = "error: name must be 1 to 40 lower-case letters, digits and hyphens, with no hyphen first or last\n"
    assert (code, err) == (1, said)


def test_ctrl_c_ends_apply_and_begins_no_other_vm(manager: StandIn, token: Path, tmp_path: Path) -> None:
    file = tmp_path / "vms.yaml"
    file.write_text("\n---\n".join(f"{{name: {name}, nominal: {{cpu_cores: 1, memory_mib: 512}}}}" for name in "abc"))
    with begin(manager, token, "apply", "-f", str(file)) as process:
        assert manager.asked.wait(30)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert (process.returncode, manager.begun) == (130, ["a"])
    assert "goes on" in err


def two_vms(directory: Path) -> str:
    file = directory / "vms.yaml"
    file.write_text("\n---\n".join(f"{{name: {name}, nominal: {{cpu_cores: 1, memory_mib: 512}}}}" for name in "ab"))
    return str(file)


@pytest.mark.parametrize(
    ("away", "said"), [("lost", "no manager answers at"), ("elected", "no manager leads yet; it is asked again")]
)
def test_apply_asks_again_while_its_manager_is_away_for_a_moment(
    manager: StandIn, token: Path, ebb: Ran, tmp_path: Path, away: str, said: str
) -> None:
    manager.state, manager.away = OperationState.DONE, [away, away]
    code, _, err = ebb(manager, token, "apply", "-f", two_vms(tmp_path))
    assert (code, manager.begun) == (0, ["a", "b"]), err
    assert err.count(said) == 1
    # It is one creation, however often it is asked for.
    assert len(set(manager.requests[:3])) == 1
    assert len(set(manager.requests)) == 2


def test_apply_gives_a_vm_up_whose_manager_stays_away_and_goes_on_with_the_next(
    manager: StandIn, token: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ebbtide.client.manager.AWAY_S", 0.2)
    monkeypatch.setattr(options, "AWAY_LOOK_S", 0.15)
    manager.state, manager.away_for = OperationState.DONE, "a"
    words = ["apply", "-f", two_vms(tmp_path), "--manager", manager.url, "--token-file", str(token)]
    result = CliRunner().invoke(app, words)
    assert str(result.exception) == (
        "1 of 2 VMs are not as declared: a: no manager leads yet, and it was asked again for 0.2 s"
    )
    assert manager.begun == ["b"]


@pytest.mark.parametrize(
    ("ebb", "words", "field"),
    each(
        (("vm", "migrate", "web", "--copy-storage"), "live"),
        ((*CREATE, "--priority", "fixed", "--start", "deflated"), "start"),
        (("vm", "resize", "web", "--preemption-notice-s", "7200"), "preemption_notice_s"),
        (
            ("vm", "adopt", "web", "--host", "Host_B", "--minimum-cpu-cores", "0.5", "--minimum-memory-mib", "256"),
            "host",
        ),
        (("host", "invite", "Host_B"), "host"),
        (("host", "revoke", "h", "--yes", "--reason", ""), "reason"),
        (("task", "submit", "train", "--request-id", "a b", "--", "true"), "request_id"),
    ),
    indirect=["ebb"],
)
def test_a_word_that_cannot_be_is_one_sentence_with_its_field_and_nothing_is_sent(
    manager: StandIn, token: Path, ebb: Ran, words: tuple[str, ...], field: str
) -> None:
    code, _, err = ebb(manager, token, *words)
    assert (code, manager.begun) == (1, [])
    assert field in err
    assert err.count("\n") <= 3


def test_a_closed_input_or_output_is_no_fault(manager: StandIn, token: Path) -> None:
    ebb = f"{sys.executable} -m ebbtide.cli.main"
    for words, code, said in (("health >&-", 0, ""), ("vm delete web <&-", 2, "nobody can be asked")):
        done = subprocess.run(
            ["/bin/sh", "-c", f"{ebb} {words}"],
            env={"EBB_MANAGER": manager.url, "EBB_TOKEN_FILE": str(token), "HOME": str(token.parent)},
            capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert (done.returncode, "Traceback" in done.stderr) == (code, False), done.stderr
        assert said in done.stderr
    with begin("nonsense", token, "host", "list", preexec_fn=lambda: os.close(2)) as process:
        # An error does not go among what is printed for programs.
        assert (process.communicate(timeout=60)[0], process.returncode) == ("", 1)


def test_what_is_said_of_errors_goes_into_no_file_that_is_opened_after_they_were_closed() -> None:
    code = (
        "import os; from ebbtide.cli.output import guard_output; guard_output(); print(os.readlink('/proc/self/fd/2'))"
    )
    words = ["/bin/sh", "-c", 'exec "$0" -c "$1" 2>&-', sys.executable, code]
    assert subprocess.run(words, stdout=subprocess.PIPE, text=True, timeout=60).stdout == "/dev/null\n"


def test_an_output_of_few_letters_shows_others_as_question_marks() -> None:
    code = "from ebbtide.cli.output import guard_output; guard_output(); print('\u2581 web')"
    environment = {"PYTHONIOENCODING": "latin-1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, b"? web\n")


def test_a_kind_of_event_that_there_is_none_of_is_refused_with_those_that_there_are(token: Path, ebb: Ran) -> None:
    code, _, err = ebb("http://127.0.0.1:9", token, "event", "list", "--kind", "bogus")
    assert code == 2
    assert "'bogus' is no kind of event; there are acquirer-decommissioned, " in " ".join(err.split())
