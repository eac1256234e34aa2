"""The hook in real services: FastAPI, Flask, gunicorn with two workers, plain threads; and two of them side by side.

Each is asked as the guest agent would: it refuses, promises, works, is measured by the kernel, and is called off.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from app_adapters import conformance
from tests.adapters.cache import free_port
from tests.adapters.embedded import PICTURES
from tests.adapters.rest import Rest, address_of

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

    @property
    def rest(self) -> Rest:
        return Rest(address_of(self.url), "t")

    def resident_mib(self) -> float:
        """By the kernel, of all its processes that hold pictures."""
        status = "".join(Path(f"/proc/{pid}/status").read_text() for pid in self.pids)
        return sum(int(kib) / 1024 for kib in re.findall(r"VmRSS:\s+(\d+) kB", status))


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


@contextlib.contextmanager
def running(form: str, directory: Path) -> Iterator[Service]:
    token_file, hold = directory / "token", directory / "hold"
    token_file.write_text("t")
    with tempfile.TemporaryDirectory(prefix="ebb") as short:
        path = f"{short}/hook.sock"
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONMALLOC": "malloc"}
        command = [sys.executable, "-m", "tests.adapters.embedded", form, path, str(token_file), str(hold)]
        if form == "gunicorn":
            bind = f"127.0.0.1:{free_port()}"
            command = [sys.executable, "-m", "gunicorn", "-w", "2", "-b", bind, "tests.adapters.embedded:application"]
            environment.update(HOOK=path, TOKEN_FILE=str(token_file), HOLD=str(hold))
        process = subprocess.Popen(
            command, env=environment, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            if form == "gunicorn":
                service = Service(f"unix:{path}", [], hold, token_file)
                eventually(lambda: len(list(Path(f"{path}.d").glob("*.sock"))) == 2)
                service.pids = [int(one.stem) for one in Path(f"{path}.d").glob("*.sock")]
            else:
                url = process.stdout.readline().decode().strip()
                service = Service(url, [process.pid], hold, token_file)
            eventually(lambda: service.rest.send("GET", "/deflation/v1/capabilities")[0] == 200)
            yield service
        finally:
            process.send_signal(signal.SIGTERM)
            process.stdin.close()
            process.wait(60)
            process.stdout.close()


@pytest.fixture(params=FORMS)
def service(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Service]:
    with running(request.param, tmp_path) as one:
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
