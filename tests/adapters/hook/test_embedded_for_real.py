"""The hook in real services: FastAPI, Flask, gunicorn with two workers, plain threads; and two of them side by side.

Each is asked as the guest agent would: it refuses, promises, works, is measured by the kernel, and is called off.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from app_adapters import conformance
from app_adapters.asgi import HookApplication, hook_application
from app_adapters.processes.inelastic import InelasticAdapter
from tests.adapters import proc
from tests.adapters.cache import free_port
from tests.adapters.embedded import PICTURES
from tests.adapters.proc import rss_mib
from tests.adapters.rest import Rest, address_of
from tests.guestagent.harness import bench

pytestmark = pytest.mark.service
ROOT = Path(__file__).resolve().parents[3]
FORMS = ("fastapi", "flask", "threads", "gunicorn")
#: What allocators and caches may move while nobody takes anything, in MiB a process.
SLACK_MIB = 6.0


@dataclass
class Service:
    url: str
    pids: list[int]
    hold: Path
    token_file: Path
    process: subprocess.Popen[bytes]
    web: str = ""

    @property
    def rest(self) -> Rest:
        return Rest(address_of(self.url), self.token_file.read_text())

    def resident_mib(self) -> float:
        """By the kernel, of all its processes that hold pictures."""
        return sum(map(rss_mib, self.pids))


def eventually(holds: Callable[[], Any], limit_s: float = 60.0) -> Any:
    """What a call returns once it returns something; a hook that does not answer yet is asked again."""
    end = time.monotonic() + limit_s
    while True:
        with contextlib.suppress(OSError):
            found = holds()
            if found:
                return found
        assert time.monotonic() < end, f"still not, after {limit_s:g} s"
        time.sleep(0.02)


def members(path: str) -> set[int]:
    """The processes of a service that have a socket of their own, by number."""
    return {int(one.stem.partition("-")[0]) for one in Path(f"{path}.d").glob("*.sock")}


@contextlib.contextmanager
def running(form: str, token_file: Path, workers: int = 2) -> Iterator[Service]:
    hold = token_file.parent / "hold"
    with tempfile.TemporaryDirectory(prefix="ebb") as short:
        path = f"{short}/hook.sock"
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONMALLOC": "malloc"}
        command = [sys.executable, "-m", "tests.adapters.embedded", form, path, str(token_file), str(hold)]
        if form == "gunicorn":
            bind = f"127.0.0.1:{free_port()}"
            command = [sys.executable, "-m", "gunicorn", "-w", f"{workers}", "-b", bind]
            command.append("tests.adapters.embedded:application")
            environment.update(HOOK=path, TOKEN_FILE=str(token_file), HOLD=str(hold))
        process = subprocess.Popen(
            command, env=environment, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            if form == "gunicorn":
                service = Service(f"unix:{path}", [], hold, token_file, process, bind)
                eventually(lambda: len(members(path)) == workers)
                service.pids = list(members(path))
            else:
                url = process.stdout.readline().decode().strip()
                service = Service(url, [process.pid], hold, token_file, process)
            eventually(lambda: service.rest.send("GET", "/deflation/v1/capabilities")[0] == 200)
            yield service
        finally:
            process.send_signal(signal.SIGTERM)
            process.stdin.close()
            process.wait(60)
            process.stdout.close()


@pytest.fixture(params=FORMS)
def service(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Service]:
    (tmp_path / "token").write_text("t")
    with running(request.param, tmp_path / "token") as one:
        yield one


def size(service: Service) -> dict[str, float]:
    sizes = service.rest.capabilities()["resources"]["memory_mib"]
    assert isinstance(sizes, dict)
    return sizes


def test_it_refuses_promises_is_measured_and_called_off(service: Service) -> None:
    rest, processes = service.rest, len(service.pids)
    slack = SLACK_MIB * processes
    full = size(service)["current"]
    assert full == pytest.approx(service.resident_mib(), abs=slack)
    assert full - size(service)["minimum"] == pytest.approx((PICTURES - 10) * processes, abs=slack)

    status, refused = rest.target("too-much", "deflate", size(service)["minimum"] / 2)
    assert (status, refused["state"], refused["retry_after_s"]) == (409, "refused", 5)
    assert refused["reason"].count("the newest pictures stay") == processes
    assert refused["floor"]["memory_mib"] == pytest.approx(size(service)["minimum"], abs=0.1)

    take = 20.0 * processes
    before = service.resident_mib()
    status, promise = rest.target("down", "deflate", size(service)["current"] - take)
    assert (status, promise["state"]) == (202, "promised")
    assert promise["promised"]["memory_mib"] == pytest.approx(take, abs=slack)
    done = rest.finished("down")
    assert done["state"] == "released"
    assert done["released"]["memory_mib"] == pytest.approx(take, abs=slack)
    assert "VmRSS" in done["measured_by"]
    assert before - service.resident_mib() == pytest.approx(done["released"]["memory_mib"], abs=slack)

    service.hold.touch()
    at = size(service)["current"]
    assert rest.target("r", "deflate", at - take)[0] == 202
    assert rest.send("GET", "/deflation/v1/targets/r")[1]["state"] == "running"
    assert rest.target("r#2", "deflate", at - take / 4)[0] == 202
    off = rest.finished("r")
    assert off["reason"].startswith("called off for r#2: ")
    assert off["released"].get("memory_mib", 0.0) < take
    service.hold.unlink()
    rest.finished("r%232")
    assert rest.target("up", "reinflate", full)[0] == 202
    assert rest.finished("up")["released"] == {"memory_mib": 0.0}
    assert size(service)["current"] == pytest.approx(full, abs=2 * slack)


def test_it_keeps_to_the_protocol(service: Service, capsys: pytest.CaptureFixture[str]) -> None:
    wanted = size(service)["current"] - 15.0 * len(service.pids)
    arguments = [service.url, "--token-file", str(service.token_file), "--memory-mib", str(wanted)]
    status = conformance.main(arguments)
    said = capsys.readouterr().out
    assert status == 0, said
    assert len(re.findall(r"^ok    ", said, re.MULTILINE)) == 9


def test_two_applications_of_one_guest_give_their_parts_and_are_measured(tmp_path: Path) -> None:
    with bench(tmp_path) as guest:
        host = guest.host()
        host.hello()
        token_file = guest.run_dir / "token"
        with running("threads", token_file) as first, running("gunicorn", token_file) as second:
            for name, url in (("gallery", first.url), ("shop", second.url)):
                drop_in = guest.adapters_dir / f"{name}.json"
                drop_in.write_text(json.dumps({"name": name, "url": url}))
                drop_in.chmod(0o644)
            offered = host.result("application.capabilities")["adapters"]
            assert [row["name"] for row in offered] == ["gallery", "shop"]
            before = [one.resident_mib() for one in (first, second)]
            least = sum(row["resources"]["memory_mib"]["minimum"] for row in offered)
            # 1024 less 424 in use and a reserve of 51.2 is free; the applications' own count to what is in use.
            rest_mib = 424 - sum(row["resources"]["memory_mib"]["current"] for row in offered) + 51.2
            params = {"deadline_s": 20, "mode": "ask", "target": {"memory_mib": rest_mib + least + 30}}
            answer = host.result("application.deflate", request_id="r", bound_mib=1024, **params)
            assert answer["state"] == "promised", answer
            status = eventually(lambda: ended(host.result("application.status", request_id="r")))
            assert status["state"] == "released", status
            gave = [was - one.resident_mib() for was, one in zip(before, (first, second), strict=True)]
            assert min(gave) > 10
            assert sum(gave) == pytest.approx(status["released"]["memory_mib"], abs=3 * SLACK_MIB)
            assert sum(gave) == pytest.approx(answer["promised"]["memory_mib"], abs=3 * SLACK_MIB)


def ended(status: dict[str, Any]) -> dict[str, Any] | None:
    return None if status["state"] == "running" else status


def test_when_the_process_that_leads_is_killed_another_one_takes_over(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("t")
    with running("gunicorn", tmp_path / "token") as service:
        full = size(service)["current"]
        for victim in service.pids:  # whoever leads is among them; gunicorn starts others in their place
            os.kill(victim, signal.SIGKILL)
        path = service.url.removeprefix("unix:")
        assert eventually(lambda: len(members(path) - set(service.pids)) == 2)
        eventually(lambda: size(service)["current"] > 0.8 * full)
        eventually(lambda: size(service) and not members(path) & set(service.pids))
        assert service.rest.target("down", "deflate", full - 30)[0] == 202
        assert service.rest.finished("down")["state"] == "released"


def test_a_reload_of_one_worker_while_it_serves_a_request_ends_neither_the_service_nor_its_hook(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("t")
    with running("gunicorn", tmp_path / "token", workers=1) as service:
        path, (old,) = service.url.removeprefix("unix:"), service.pids
        service.hold.touch()
        answers: list[str] = []
        request = threading.Thread(target=lambda: answers.append(Rest(address_of(service.web), "t").text("/hold")))
        request.start()
        eventually((tmp_path / "held").exists)
        service.process.send_signal(signal.SIGHUP)
        (new,) = eventually(lambda: members(path) - {old})
        assert old in members(path), "the old worker serves the request, and the new one is there"
        assert size(service)["current"] > 0
        service.hold.unlink()
        request.join(60)
        assert answers == [f"{old}\n"]
        eventually(lambda: proc.ended(old))
        eventually(lambda: service.rest.send("GET", "/deflation/v1/capabilities")[0] == 200)
        assert new in members(path)
        assert service.process.poll() is None


def test_two_processes_under_asgi_say_why_that_cannot_work(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("t")

    async def asked(server: tuple[str, int], hook: HookApplication) -> tuple[int, dict[str, Any]]:
        sent: list[MutableMapping[str, Any]] = []

        async def receive() -> MutableMapping[str, Any]:
            return {"type": "http.request"}

        async def send(message: MutableMapping[str, Any]) -> None:
            sent.append(message)

        headers = [(b"authorization", b"Bearer t")]
        scope = {"type": "http", "method": "GET", "path": "/deflation/v1/capabilities", "headers": headers}
        await hook({**scope, "client": ("127.0.0.1", 5), "server": server}, receive, send)
        return sent[0]["status"], json.loads(sent[1]["body"])

    with running("fastapi", tmp_path / "token") as service:
        host, port = service.url.removeprefix("http://").split(":")
        hook = hook_application(InelasticAdapter(), str(tmp_path / "token"))
        status, answer = asyncio.run(asked((host, int(port)), hook))
        assert (status, "app_adapters.shared.SharedHookServer" in answer["error"]) == (503, True)
    assert asyncio.run(asked((host, int(port)), hook))[0] == 200  # the other has ended


def test_the_example_for_gunicorn_answers_for_both_workers(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("t")
    with tempfile.TemporaryDirectory(prefix="ebb") as short:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "HOOK": f"{short}/hook.sock"}
        command = [sys.executable, "-m", "gunicorn", "-w", "2", "-b", f"127.0.0.1:{free_port()}", "--chdir"]
        process = subprocess.Popen(
            [*command, str(ROOT / "examples"), "embed_workers:application"],
            env={**environment, "TOKEN_FILE": str(tmp_path / "token")},
            stderr=subprocess.DEVNULL,
        )
        try:
            rest = Rest(f"{short}/hook.sock", "t")
            eventually(lambda: rest.capabilities()["resources"]["memory_mib"]["current"] == 64)
            assert rest.target("down", "deflate", 16)[1]["promised"] == {"memory_mib": 48}
            assert rest.finished("down")["released"] == {"memory_mib": 48}
        finally:
            process.terminate()
            process.wait(60)
