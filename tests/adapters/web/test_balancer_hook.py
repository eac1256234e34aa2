"""The load balancer hook, end to end: an nginx that shares requests out to two gunicorns, whose weights follow."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from app_adapters.processes.process_memory import read_pid
from app_adapters.server import HookServer
from app_adapters.web.balancer import Balanced, WeightFile
from app_adapters.web.gunicorn import GunicornAdapter
from tests.adapters.rest import Rest
from tests.adapters.web_load import WebLoad
from tests.adapters.web_servers import Gunicorn, Nginx
from tests.waiting import until_sync

pytestmark = pytest.mark.service


@contextlib.contextmanager
def farm(tmp_path: Path, reload: list[str]) -> Iterator[tuple[Nginx, list[Gunicorn], list[Rest]]]:
    """Two gunicorns of 4 workers behind an nginx, each with its hook. `reload` gets the nginx's options added."""
    tmp_path.chmod(0o755)
    (tmp_path / "token").write_text("t")
    with contextlib.ExitStack() as stack:
        gunicorns = []
        for name in ("first", "second"):
            gunicorns.append(Gunicorn(tmp_path / name, mib=1, name=name))
            stack.callback(gunicorns[-1].stop)
        files = [tmp_path / f"{name}.weight" for name in ("first", "second")]
        for gunicorn, file in zip(gunicorns, files, strict=True):
            gunicorn.ready()
            file.write_text(f"server 127.0.0.1:{gunicorn.port} weight=100;\n")
        upstream = "upstream farm {" + "".join(f" include {file};" for file in files) + " }"
        nginx = Nginx(tmp_path / "nginx", location="proxy_pass http://farm;", upstream=upstream)
        stack.callback(nginx.stop)
        nginx.ready(1)
        rests = []
        for gunicorn, file in zip(gunicorns, files, strict=True):
            adapter = GunicornAdapter(lambda path=str(gunicorn.pid_file): read_pid(path), 4.0)  # type: ignore[misc]
            words = [
                word.replace("CONFIG", str(nginx.config)).replace("PREFIX", str(nginx.directory)) for word in reload
            ]
            balancer = WeightFile(f"127.0.0.1:{gunicorn.port}", str(file), True, words)
            server = HookServer(Balanced(adapter, balancer), port=0, token_file=str(tmp_path / "token")).start()
            stack.callback(server.stop)
            rests.append(Rest(server.address, "t"))
        yield nginx, gunicorns, rests


RELOAD = ["nginx", "-c", "CONFIG", "-p", "PREFIX", "-s", "reload"]


def target(rest: Rest, request_id: str, direction: str, cores: float, mode: str = "ask") -> str:
    """Ask for cores, wait for the end, and give its reason."""
    status, answer = rest.target(request_id, direction, 0, target={"cpu_cores": cores}, mode=mode)
    assert status == 202, answer
    done = rest.finished(request_id)
    assert done["state"] == "released", done
    return str(done["reason"])


def first_gets(load: WebLoad, least: int, most: int) -> bool:
    """Of the next 200 requests; the old workers of a reload still share out as they knew."""
    return least <= load.shares(200)["first"] <= most


def test_the_shares_of_requests_follow_the_weights(tmp_path: Path) -> None:
    with farm(tmp_path, RELOAD) as (nginx, gunicorns, (first, _)), WebLoad(nginx.port) as load:
        until_sync(lambda: first_gets(load, 90, 110), "half of the requests")

        assert "weight 25 of 100" in target(first, "down", "deflate", 1.0)
        assert len(gunicorns[0].workers()) == 1
        assert (tmp_path / "first.weight").read_text() == f"server 127.0.0.1:{gunicorns[0].port} weight=25;\n"
        until_sync(lambda: first_gets(load, 30, 50), "one fifth of the requests")

        assert "weight 100 of 100" in target(first, "up", "reinflate", 4.0)
        until_sync(lambda: first_gets(load, 90, 110), "half of the requests again")
    print(f"behind nginx: {load.count()} answers, p99 {load.p99_ms():.1f} ms")
    assert load.errors == []


def test_where_the_weight_cannot_be_lowered_asking_is_refused_and_force_goes_on(tmp_path: Path) -> None:
    reload = [sys.executable, "-c", "raise SystemExit('the balancer is away')"]
    with farm(tmp_path, reload) as (nginx, gunicorns, (first, _)), WebLoad(nginx.port) as load:
        before = (tmp_path / "first.weight").read_text()
        status, answer = first.target("ask", "deflate", 0, target={"cpu_cores": 1.0})
        assert (status, answer["state"]) == (409, "refused")
        assert "could not be lowered" in answer["reason"]
        assert "the balancer is away" in answer["reason"]
        assert len(gunicorns[0].workers()) == 4
        assert (tmp_path / "first.weight").read_text() == before
        reason = target(first, "force", "deflate", 1.0, "force")
        assert "could not be lowered, which force leaves aside" in reason
        assert len(gunicorns[0].workers()) == 1
        assert (tmp_path / "first.weight").read_text() == before
        assert "could not be told" in target(first, "up", "reinflate", 4.0)
        assert len(gunicorns[0].workers()) == 4
        load.more()
    assert load.errors == []
