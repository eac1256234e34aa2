"""`ebb-adapter`: help with examples, a check before it is registered, drop-ins, and what it says while it serves."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from app_adapters.adapter import Answer, Deadline, Promise, Refusal, Release
from app_adapters.hook import default_port
from app_adapters.main import give_back, main
from app_adapters.memcached.adapter import MemcachedAdapter
from app_adapters.processes.inelastic import InelasticAdapter
from app_adapters.registry import MODULES, Ready, ready
from app_adapters.server import HookServer
from guestagent.hooks import DropIn, read_drop_in
from tests.adapters.cache import Cache, free_port
from tests.adapters.rest import Rest

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("name", MODULES)
def test_the_help_of_every_adapter_has_an_example(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert re.search(r"ebb-adapter [a-z-]+ --", text.partition("example")[2])
    assert "--check" in text


def test_the_help_names_them_all(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    assert all(re.search(rf"^    {name}\s", text, re.MULTILINE) for name in MODULES)


def test_the_drop_in_that_it_prints_is_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for listen, host in (("127.0.0.1:7075", "127.0.0.1"), ("[::1]:7075", "::1")):
        assert main(["inelastic", "--listen", listen, "--print-drop-in"]) == 0
        path = tmp_path / "a.json"
        path.write_text(capsys.readouterr().out)
        path.chmod(0o644)
        assert read_drop_in(str(path), os.getuid()) == DropIn("inelastic", host, 7075)


def test_the_name_is_that_of_socket_and_drop_in(capsys: pytest.CaptureFixture[str]) -> None:
    drop_ins = []
    for words in ([], ["--name", "sessions"], ["--name", "sessions", "--listen", "127.0.0.1"], ["--listen", "[::1]"]):
        assert main(["memcached", *words, "--print-drop-in"]) == 0
        drop_ins.append(json.loads(capsys.readouterr().out))
    assert drop_ins == [
        {"name": "memcached", "url": "unix:/run/ebbtide/hooks/memcached.sock"},
        {"name": "sessions", "url": "unix:/run/ebbtide/hooks/sessions.sock"},
        {"name": "sessions", "url": f"http://127.0.0.1:{default_port('sessions')}"},
        {"name": "memcached", "url": f"http://[::1]:{default_port('memcached')}"},
    ]
    assert default_port("sessions") != default_port("memcached")


@pytest.mark.parametrize("words", [["--name", "A"], ["--name", "a b"], ["--name", ""], ["--listen", "127.0.0.1:0"]])
def test_a_name_or_place_that_no_drop_in_can_have_is_refused(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["memcached", *words, "--print-drop-in"])
    assert words[0] in capsys.readouterr().err


def test_a_place_that_another_hook_has_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        place = f"127.0.0.1:{other.getsockname()[1]}"
        assert main(["inelastic", "--listen", place]) == 2
    assert capsys.readouterr().err == (
        f"ebb-adapter: cannot listen on {place}: port {place[10:]} of 127.0.0.1 is taken by another process; "
        "give this hook another\n"
    )


@pytest.fixture
def plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package on the path that brings adapters: one that works, one that does not, one under a name of ours."""
    (tmp_path / "theirs.py").write_text(
        "from app_adapters.processes.inelastic import InelasticAdapter\nfrom app_adapters.registry import Ready\n"
        "READY = Ready('a queue', 'example:\\n  ebb-adapter queue --deep', lambda p: p.add_argument('--deep'),\n"
        "    lambda o: InelasticAdapter(o.name, o.deep))\n"
    )
    (tmp_path / "theirs-1.0.dist-info").mkdir()
    (tmp_path / "theirs-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (tmp_path / "theirs-1.0.dist-info" / "entry_points.txt").write_text(
        "[ebbtide.adapters]\nqueue = theirs:READY\nbroken = theirs:NOTHING\nwrong = os:path\nmemcached = os:path\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.usefixtures("plugins")
def test_adapters_of_other_packages_are_found(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["queue", "--name", "jobs", "--deep", "x", "--check"]) == 0
    assert json.loads(capsys.readouterr().out)["name"] == "jobs"
    assert main(["queue", "--print-drop-in"]) == 0
    assert json.loads(capsys.readouterr().out)["name"] == "queue"
    for name, said in (
        ("broken", "theirs:NOTHING) cannot be loaded: Attr"),
        ("wrong", "is no app_adapters.registry.R"),
    ):
        assert main([name, "--check"]) == 2
        assert said in capsys.readouterr().err
    assert isinstance(ready("memcached"), Ready)  # ours
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    assert "a queue" in text
    assert "broken" in text


def test_a_check_of_a_hook_says_what_is_wrong_with_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Boastful(InelasticAdapter):
        def reinflate(self, target: dict[str, float], deadline: Deadline) -> Answer:
            return Promise({"memory_mib": 10.0}, 0.0, lambda: Release({}, "", ""))

    (tmp_path / "token").write_text("t")
    for adapter, expected in ((InelasticAdapter(), 0), (Boastful(), 1)):
        server = HookServer(adapter, port=0, token_file=str(tmp_path / "token")).start()
        try:
            assert main(["check", server.url, "--token-file", str(tmp_path / "token")]) == expected
        finally:
            server.stop()
    lines = capsys.readouterr().out.splitlines()
    assert lines[7] == "all is well"
    assert [line for line in lines if line.startswith("FAIL")] == [
        "FAIL  a target: promised.memory_mib: 10, and it has 0"
    ]
    assert lines[-1] == "1 failed"


@pytest.mark.parametrize(
    "url", ["unix:/nowhere/x.sock", "http://192.0.2.1:7070", "ftp://localhost", "http://127.0.0.1:1"]
)
def test_a_check_of_what_is_no_hook_is_2(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "token").write_text("t")
    assert main(["check", url, "--token-file", str(tmp_path / "token")]) == 2
    assert main(["check", url, "--token-file", str(tmp_path / "none")]) == 2
    assert capsys.readouterr().out.count("cannot be asked: ") == 2


def test_a_check_of_what_cannot_be_asked_is_1_with_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["memcached", "--memcached", f"127.0.0.1:{free_port()}", "--check"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(r"ebb-adapter: memcached: cannot be asked: .+\n", err)


def test_a_bad_option_is_2_with_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["command", "--run", "", "--check"]) == 2
    assert "--run: names no program" in capsys.readouterr().err


def test_what_has_nothing_to_give_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inelastic", "--check"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["name"] == "inelastic"
    assert "nothing above its minimum" in err


@pytest.mark.service
def test_what_an_adapter_took_is_given_back_without_a_hook(capsys: pytest.CaptureFixture[str]) -> None:
    cache = Cache(200)
    command = ["memcached", "--memcached", f"127.0.0.1:{cache.port}", "--give-back"]
    try:
        cache.fill(150)
        answer = MemcachedAdapter(port=cache.port).deflate({"memory_mib": 100.0}, "ask", Deadline(60))
        assert isinstance(answer, Promise)
        answer.work()
        assert cache.limit_mib() < 100
        assert main(command) == 0
        assert cache.limit_mib() == 200
        assert re.match("ebb-adapter: memcached: has its full size: limit", capsys.readouterr().err)
        assert main(command) == 0
        assert "nothing had been taken" in capsys.readouterr().err
    finally:
        cache.stop()
    assert main(command) == 1
    assert "memcached: has not its full size: " in capsys.readouterr().err


def test_what_is_given_back_in_part_is_1(capsys: pytest.CaptureFixture[str]) -> None:
    class Halfway(InelasticAdapter):
        def __init__(self, answer: Answer) -> None:
            super().__init__()
            self.answer = answer

        def reinflate(self, target: dict[str, float], deadline: Deadline) -> Answer:
            return self.answer

    half = Promise({}, 0.0, lambda: Release({}, "", "2 of 4 workers", complete=False))
    for answer, reason in ((half, "2 of 4 workers"), (Refusal("it is saving"), "it is saving")):
        assert give_back("app", Halfway(answer)) == 1
        assert capsys.readouterr().err == f"ebb-adapter: app: has not its full size: {reason}\n"


@pytest.mark.service
def test_it_checks_and_serves_and_says_what_it_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "token").write_text("t")
    cache, port = Cache(200), free_port()
    adapter = ["memcached", "--memcached", f"127.0.0.1:{cache.port}"]
    server: subprocess.Popen[str] | None = None
    try:
        cache.fill(150)
        assert main([*adapter, "--check"]) == 0
        assert json.loads(capsys.readouterr().out)["resources"]["memory_mib"]["current"] == pytest.approx(
            cache.rss_mib(), abs=5
        )
        command = [sys.executable, "-m", "app_adapters", *adapter, "--listen", f"127.0.0.1:{port}"]
        server = subprocess.Popen(
            [*command, "--token-file", str(tmp_path / "token")],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        assert server.stderr is not None
        assert server.stderr.readline() == f"ebb-adapter: memcached on 127.0.0.1:{port}\n"
        rest = Rest(("127.0.0.1", port), "t")
        rest.capabilities()
        assert rest.target("down", "deflate", 100)[0] == 202
        rest.finished("down")
        server.send_signal(signal.SIGTERM)
        _, said = server.communicate(timeout=60)
        assert server.returncode == 0
        lines = [line for line in said.splitlines() if line.startswith("ebb-adapter: down: ")]
        assert len(lines) == 3
        assert lines[0] == "ebb-adapter: down: deflate (ask) to 100 MiB within 60 s"
        assert re.match(r"ebb-adapter: down: promised [\d.]+ MiB in about ", lines[1])
        assert re.match(r"ebb-adapter: down: released [\d.]+ MiB: resident ", lines[2])
    finally:
        if server is not None:
            server.kill()
            server.wait()
        cache.stop()


def test_a_refusal_is_said(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("t")
    said: list[str] = []
    server = HookServer(InelasticAdapter(reason="pinned"), "", str(tmp_path / "token"), said.append, port=0).start()
    try:
        Rest(server.address, "t").target("r", "deflate", 5, target={"memory_mib": 5.0})
    finally:
        server.stop()
    assert said == ["r: deflate (ask) to 5 MiB within 60 s", "r: refused: pinned"]
