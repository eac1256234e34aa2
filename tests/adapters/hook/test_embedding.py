"""The examples of embedded hooks: short, and they run."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.adapters.rest import Rest, address_of

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
#: These run the same small service; embed_python.py has one of its own, and gunicorn serves embed_workers.py.
OTHERS = ("embed_python.py", "embed_workers.py")
ON_A_PORT = ("embed_flask.py", "embed_wsgi.py", "embed_fastapi.py")
BUFFERS = ("embed_hook.py", *ON_A_PORT, "embed_asyncio.py")


@contextlib.contextmanager
def running(name: str, directory: Path) -> Iterator[tuple[subprocess.Popen[bytes], Rest]]:
    (directory / "token").write_text("t")
    # A WSGI server has a port of its own; the others have a Unix socket, whose path must be short.
    with tempfile.TemporaryDirectory(prefix="ebb") as short:
        place = "0" if name in ON_A_PORT else f"{short}/hook.sock"
        with started([str(EXAMPLES / name), place, str(directory / "token")]) as (service, rest):
            yield service, rest


@contextlib.contextmanager
def started(command: list[str]) -> Iterator[tuple[subprocess.Popen[bytes], Rest]]:
    service = subprocess.Popen(
        [sys.executable, *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(EXAMPLES.parent)},
    )
    try:
        assert service.stdout is not None
        yield service, Rest(address_of(service.stdout.readline().decode().split()[-1]), "t")
    finally:
        service.kill()
        service.wait()
        for pipe in (service.stdin, service.stdout):
            if pipe is not None:
                pipe.close()


def test_every_example_is_tested() -> None:
    assert {path.name for path in EXAMPLES.glob("embed_*.py")} == {*BUFFERS, *OTHERS}


@pytest.mark.parametrize("name", [*BUFFERS, *OTHERS])
def test_embedding_takes_ten_lines_at_most(name: str) -> None:
    text = (EXAMPLES / name).read_text().partition("# embedding: begin\n")[2].partition("# embedding: end")[0]
    assert 0 < len([line for line in text.splitlines() if line.strip()]) <= 10


@pytest.mark.service
@pytest.mark.parametrize("name", BUFFERS)
def test_the_example_deflates_and_reinflates(name: str, tmp_path: Path) -> None:
    with running(name, tmp_path) as (service, rest):
        assert rest.target("down", "deflate", 8)[1]["promised"] == {"memory_mib": 24.0}
        assert rest.finished("down")["released"] == {"memory_mib": 24.0}
        assert rest.target("up", "reinflate", 64)[0] == 202
        rest.finished("up")
        assert rest.capabilities()["resources"]["memory_mib"]["current"] == 64
        service.communicate(b"", timeout=60)
        assert service.returncode == 0


@pytest.mark.service
@pytest.mark.parametrize("name", ON_A_PORT)
def test_the_service_goes_on_beside_its_hook(name: str, tmp_path: Path) -> None:
    with running(name, tmp_path) as (_, rest):
        assert rest.text("/") == "32 MiB\n"
        assert rest.target("down/1 é", "deflate", 8)[0] == 202
        assert rest.finished("down%2F1%20%C3%A9")["state"] == "released"
        assert rest.text("/") == "8 MiB\n"
