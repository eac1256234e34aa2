"""The Redis adapter against a real redis-server, through the REST hook."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from app_adapters.adapter import Deadline, Promise
from app_adapters.processes.process import children
from app_adapters.redis.adapter import RedisAdapter
from app_adapters.redis.client import RedisClient, ServerError
from app_adapters.redis.plan import limit_in
from app_adapters.server import HookServer
from tests.adapters.redis_server import Connection, Load, RedisServer
from tests.adapters.rest import Rest
from tests.adapters.results import result

pytestmark = pytest.mark.service

CACHE = ("--maxmemory", "300mb", "--maxmemory-policy", "allkeys-lru")


@contextlib.contextmanager
def served(tmp_path: Path, *options: str, password: str = "", config: str = "") -> Iterator[RedisServer]:
    server = RedisServer(tmp_path, *options, password=password, config=config)
    try:
        yield server
    finally:
        server.stop()


@contextlib.contextmanager
def hook(tmp_path: Path, port: int, **settings: Any) -> Iterator[Rest]:
    token = tmp_path / "token"
    token.write_text("t")
    settings = {"state_file": str(tmp_path / "state.json"), "decay_s": 0.5, **settings}
    server = HookServer(RedisAdapter(("127.0.0.1", port), **settings), port=0, token_file=str(token)).start()
    try:
        yield Rest(server.address, "t")
    finally:
        server.stop()


@contextlib.contextmanager
def hooked(tmp_path: Path, *options: str, **settings: Any) -> Iterator[tuple[RedisServer, Rest]]:
    with served(tmp_path, *options) as server, hook(tmp_path, server.port, **settings) as rest:
        yield server, rest


def done(rest: Rest, request_id: str, direction: str, memory_mib: float, **more: Any) -> dict[str, Any]:
    status, answer = rest.target(request_id, direction, memory_mib, **more)
    assert status == 202, answer
    return result(rest, request_id)


def refused(rest: Rest, memory_mib: float = 80) -> dict[str, Any]:
    status, answer = rest.target("refused", "deflate", memory_mib)
    assert (status, answer["state"]) == (409, "refused"), answer
    return answer


def end_save(server: RedisServer) -> None:
    """End the child, which keeps its delay, in the way of Redis that counts as no error."""
    for child in children(server.process.pid):
        os.kill(child, signal.SIGUSR1)
    end = time.monotonic() + 60
    while server.info()["rdb_bgsave_in_progress"] != "0":
        assert time.monotonic() < end


@pytest.mark.parametrize("size", [4096, None], ids=["uniform", "mixed"])
def test_a_deflated_redis_is_small_answers_all_the_time_and_grows_back(
    tmp_path: Path, size: int | None, record_property: Any
) -> None:
    with hooked(tmp_path, *CACHE) as (server, rest):
        server.fill_in_time(260, size)
        with Load(server.port) as load:
            memory = rest.capabilities()["resources"]["memory_mib"]
            before_mib = server.rss_mib()
            assert before_mib > 250
            assert memory["current"] == pytest.approx(before_mib, abs=5)
            assert 64 <= memory["minimum"] < 90  # a tenth of the data can stay, too
            assert 300 < memory["maximum"] < 350

            status, answer = rest.target("down", "deflate", 140)
            assert status == 202
            assert answer["promised"]["memory_mib"] == pytest.approx(before_mib - 140, abs=5)
            ended = result(rest, "down")
            after_mib = server.rss_mib()
            assert ended["state"] == "released", ended
            assert after_mib <= 140 + 16, ended
            assert ended["released"]["memory_mib"] == pytest.approx(before_mib - after_mib, rel=0.1, abs=5)
            assert server.limit_mib() < 140

            server.fill(150, size, start=10**6)
            assert server.rss_mib() <= 140 + 40  # new data takes the place of old

            ended = done(rest, "up", "reinflate", memory["maximum"])
            assert ended["released"] == {"memory_mib": 0.0}
            assert server.limit_mib() == 300
            server.fill(150, size, start=2 * 10**6)
            assert server.rss_mib() > 220
        assert load.errors == []
        record_property("p99_ms", load.p99_ms())
        print(f"p99 {load.p99_ms():.2f} ms, longest {1000 * max(load.latencies_s):.1f} ms, {len(load.latencies_s)}")
        assert load.p99_ms() < 2000
        assert not (tmp_path / "state.json").exists()


@pytest.mark.parametrize("cycles", [4, pytest.param(10, marks=pytest.mark.deep)])
def test_cycles_do_not_creep(tmp_path: Path, record_property: Any, cycles: int) -> None:
    sizes_mib = []
    with hooked(tmp_path, *CACHE, decay_s=0.0) as (server, rest), Load(server.port) as load:
        for i in range(cycles):
            server.fill(120, None, start=i * 10**6)
            before_mib = server.rss_mib()
            ended = done(rest, f"down{i}", "deflate", 75)
            sizes_mib.append(server.rss_mib())
            assert ended["released"]["memory_mib"] == pytest.approx(before_mib - sizes_mib[-1], rel=0.1, abs=5)
            done(rest, f"up{i}", "reinflate", 1000)
            assert server.limit_mib() == 300
    assert load.errors == []
    record_property("sizes_mib", sizes_mib)
    print("after each deflation", [round(size) for size in sizes_mib], f"p99 {load.p99_ms():.2f} ms")
    assert max(sizes_mib) <= 75 + 16


def test_noeviction_is_left_alone_unless_a_policy_may_stand_in(tmp_path: Path) -> None:
    options = ("--maxmemory", "300mb", "--maxmemory-policy", "noeviction")
    with hooked(tmp_path, *options) as (server, rest):
        count = server.fill_in_time(120)
        assert "noeviction" in refused(rest)["reason"]
        memory = rest.capabilities()["resources"]["memory_mib"]
        assert memory["minimum"] == memory["current"]
        assert (server.config("maxmemory-policy"), server.call("DBSIZE")) == ("noeviction", count)
        assert server.limit_mib() == 300

        with hook(tmp_path, server.port, policy="allkeys-lru") as allowed:
            ended = done(allowed, "down", "deflate", 80)
            assert "allkeys-lru stands in for noeviction" in ended["reason"]
            assert server.rss_mib() <= 80 + 12
            assert server.config("maxmemory-policy") == "allkeys-lru"
            done(allowed, "part", "reinflate", 100)
            assert server.config("maxmemory-policy") == "allkeys-lru"
            assert 60 < server.limit_mib() < 110
        # Another process, which has only the state file to know it from.
        with hook(tmp_path, server.port, policy="allkeys-lru") as later:
            maximum_mib = later.capabilities()["resources"]["memory_mib"]["maximum"]
            assert maximum_mib > 300
            done(later, "up", "reinflate", maximum_mib)
        assert (server.config("maxmemory-policy"), server.limit_mib()) == ("noeviction", 300)


def test_a_server_without_a_limit_gets_that_back(tmp_path: Path) -> None:
    with hooked(tmp_path, "--maxmemory-policy", "allkeys-lru", maximum_mib=200.0) as (server, rest):
        server.fill_in_time(130)
        assert rest.capabilities()["resources"]["memory_mib"]["maximum"] == 200
        done(rest, "down", "deflate", 90)
        assert 0 < server.limit_mib() < 90
        assert server.rss_mib() <= 90 + 10
        done(rest, "up", "reinflate", 200)
        assert server.limit_mib() == 0


def test_of_a_volatile_policy_only_what_expires_goes(tmp_path: Path) -> None:
    options = ("--maxmemory", "300mb", "--maxmemory-policy", "volatile-lru")
    with hooked(tmp_path, *options) as (server, rest):
        lasting = server.fill(100)
        assert "no key expires" in refused(rest)["reason"]
        server.fill_in_time(100, start=10**6, expire_s=10000)
        memory = rest.capabilities()["resources"]["memory_mib"]
        assert memory["minimum"] == pytest.approx(145, abs=20)
        with Load(server.port) as load:
            done(rest, "down", "deflate", 10)
            server.fill(1, start=2 * 10**6)  # writes go on: a tenth of what can expire is left
        assert load.errors == []
        assert 100 < server.rss_mib() < memory["current"] - 40
        assert sum(server.call("EXISTS", f"k{key}") == 1 for key in range(0, lasting, 7)) == len(range(0, lasting, 7))


def test_while_it_saves_it_refuses_and_keeps_room_for_saves(tmp_path: Path) -> None:
    with hooked(tmp_path, *CACHE) as (server, rest):
        server.fill_in_time(200)
        server.call("CONFIG", "SET", "rdb-key-save-delay", "1000")  # microseconds a key: it saves for 50 s
        server.call("BGSAVE")
        answer = refused(rest)
        assert "saving" in answer["reason"]
        assert answer["retry_after_s"] is None, "after a time the host would force it"
        server.call("CONFIG", "SET", "save", "3600 1")
        end_save(server)
        ended = done(rest, "down", "deflate", 110)
        assert "copies of a save" in ended["reason"]
        assert server.rss_mib() <= 100 + 10


def test_a_renamed_config_is_a_clear_refusal(tmp_path: Path) -> None:
    with hooked(tmp_path, *CACHE, "--rename-command", "CONFIG", "") as (server, rest):
        server.fill(100)
        assert "CONFIG is renamed, switched off or not allowed" in refused(rest)["reason"]


def test_a_replica_refuses(tmp_path: Path) -> None:
    (tmp_path / "replica").mkdir()
    with (
        served(tmp_path, *CACHE) as master,
        hooked(tmp_path / "replica", "--replicaof", "127.0.0.1", str(master.port)) as (_, rest),
    ):
        assert "replica" in refused(rest, 10)["reason"]


def test_a_password_and_a_user_are_read_from_a_file(tmp_path: Path) -> None:
    password = tmp_path / "password"
    password.write_text("geheim\n")
    with served(tmp_path, *CACHE, password="geheim") as server:
        server.fill_in_time(120)
        with hook(tmp_path, server.port) as rest:
            status, body = rest.send("GET", "/deflation/v1/capabilities")
            assert status == 503
            assert "--password-file" in body["error"]
        with hook(tmp_path, server.port, password_file=str(password)) as rest:
            done(rest, "down", "deflate", 80)
            assert server.rss_mib() <= 80 + 20
        server.call("ACL", "SETUSER", "ops", "on", ">offen", "+info", "+config|get")
        password.write_text("offen\n")
        with hook(tmp_path, server.port, password_file=str(password), user="ops") as rest:
            assert "not allowed" in refused(rest)["reason"]


def test_where_the_purge_is_not_allowed_the_allocator_gives_the_memory_back_by_itself(tmp_path: Path) -> None:
    password = tmp_path / "password"
    password.write_text("offen")
    with served(tmp_path, *CACHE) as server:
        server.fill_in_time(150)
        server.call("ACL", "SETUSER", "ops", "on", ">offen", "+info", "+config")
        with hook(tmp_path, server.port, password_file=str(password), user="ops") as rest:
            ended = done(rest, "down", "deflate", 80, mode="force")
        assert ended["state"] == "released"
        assert server.rss_mib() <= 80 + 20, ended


def test_a_redis_that_is_gone_is_a_refusal(tmp_path: Path) -> None:
    with hooked(tmp_path) as (server, rest):
        server.process.terminate()
        server.process.wait(60)
        assert "cannot be reached" in refused(rest)["reason"]
        assert rest.send("GET", "/deflation/v1/capabilities")[0] == 503


def test_a_deadline_ends_the_work_with_what_was_measured_and_writes_go_on(tmp_path: Path) -> None:
    with hooked(tmp_path, *CACHE) as (server, rest), Load(server.port) as load:
        server.fill_in_time(260, None)
        before_mib = server.rss_mib()
        ended = done(rest, "down", "deflate", 80, deadline_s=0.05)
        assert ended["released"]["memory_mib"] == pytest.approx(before_mib - server.rss_mib(), abs=40)
        done(rest, "on", "deflate", 80, mode="force")
        assert server.rss_mib() <= 80 + 20
    assert load.errors == []


def test_work_that_is_called_off_evicts_nothing_more(tmp_path: Path) -> None:
    """Large values go within one call: only a look at the deadline in between ends that."""
    with hooked(tmp_path, *CACHE) as (server, rest):
        server.fill(200, 100 * 1024)
        rest.target("down", "deflate", 130, deadline_s=0.3)
        result(rest, "down")
        assert int(server.info()["used_memory"]) > 100 * 2**20


def test_without_a_place_for_its_state_nothing_is_changed(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with hooked(tmp_path, *CACHE, state_file=str(tmp_path / "file" / "state")) as (server, rest):
        server.fill(100)
        status, answer = rest.target("down", "deflate", 70)
        ended = result(rest, "down") if status == 202 else answer
        assert ended["state"] in ("failed", "refused")
        assert "state file" in ended["reason"]
        assert server.limit_mib() == 300


def test_a_server_that_was_started_again_has_its_own_settings(tmp_path: Path) -> None:
    with hooked(tmp_path, *CACHE) as (server, rest):
        server.fill(100)
        done(rest, "down", "deflate", 70)
    with hooked(tmp_path, "--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru") as (server, rest):
        assert rest.capabilities()["resources"]["memory_mib"]["maximum"] < 150
        done(rest, "up", "reinflate", 1000)
        assert server.limit_mib() == 100


@pytest.mark.parametrize("restarted", [False, True])
def test_a_limit_that_another_has_written_into_the_servers_file_is_taken_out_at_full_size(
    tmp_path: Path, restarted: bool
) -> None:
    """As Redis Sentinel does it at a failover."""
    file = tmp_path / "redis.conf"
    file.write_text("maxmemory 300mb\nmaxmemory-policy allkeys-lru\nsave ''\n")
    with served(tmp_path, config=str(file)) as server:
        with hook(tmp_path, server.port) as rest:
            server.fill(100)
            done(rest, "down", "deflate", 70)
            server.call("CONFIG", "REWRITE")
            done(rest, "further", "deflate", 66)
        if restarted:
            server.call("CONFIG", "REWRITE")
        else:
            with hook(tmp_path, server.port) as rest:
                done(rest, "up", "reinflate", 1000)
            assert limit_in(file.read_text()) == 300 * 2**20
            assert "maxmemory-samples 10" not in file.read_text()
    if restarted:
        with served(tmp_path, config=str(file)) as server, hook(tmp_path, server.port) as rest:
            assert server.limit_mib() < 100
            done(rest, "up", "reinflate", 1000)
            assert server.limit_mib() == 300
        assert limit_in(file.read_text()) == 300 * 2**20


@pytest.mark.parametrize("ends", ["as it should", "killed"])
def test_a_limit_on_the_way_down_that_another_has_written_into_the_servers_file_is_taken_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    file = tmp_path / "redis.conf"
    file.write_text("maxmemory 300mb\nmaxmemory-policy allkeys-lru\n")
    with served(tmp_path, config=str(file)) as server:
        server.fill(100)
        config_set = RedisClient.config_set

        def rewritten_then(client: RedisClient, name: str, value: str | int | bytes) -> None:
            config_set(client, name, value)
            if name == "maxmemory":
                monkeypatch.setattr(RedisClient, "config_set", config_set)
                server.call("CONFIG", "REWRITE")
                if ends == "killed":
                    raise KeyboardInterrupt

        adapter = RedisAdapter(("127.0.0.1", server.port), str(tmp_path / "state.json"), decay_s=0.0)
        down = adapter.deflate({"memory_mib": 70}, "ask", Deadline(60))
        assert isinstance(down, Promise)
        monkeypatch.setattr(RedisClient, "config_set", rewritten_then)
        with pytest.raises(KeyboardInterrupt) if ends == "killed" else contextlib.nullcontext():
            down.work()
        assert 90 < (limit_in(file.read_text()) or 0) / 2**20 < 300
        with hook(tmp_path, server.port) as rest:
            done(rest, "up", "reinflate", 1000)
        assert limit_in(file.read_text()) == 300 * 2**20


def test_a_limit_of_an_earlier_version_in_the_servers_file_is_taken_out(tmp_path: Path) -> None:
    file, state = tmp_path / "redis.conf", tmp_path / "state.json"
    file.write_text("maxmemory 300mb\nmaxmemory-policy allkeys-lru\n")
    with served(tmp_path, config=str(file)) as server, hook(tmp_path, server.port) as rest:
        server.fill(100)
        done(rest, "down", "deflate", 70)
        server.call("CONFIG", "REWRITE")
        noted = json.loads(state.read_text())
        del noted["limits"]
        state.write_text(json.dumps(noted))
        done(rest, "up", "reinflate", 1000)
    assert limit_in(file.read_text()) == 300 * 2**20


def test_a_file_of_the_server_that_has_no_limit_of_ours_is_not_written(tmp_path: Path) -> None:
    file = tmp_path / "redis.conf"
    file.write_text("maxmemory 300mb\nmaxmemory-policy allkeys-lru\n")
    with served(tmp_path, config=str(file)) as server, hook(tmp_path, server.port) as rest:
        server.fill(100)
        done(rest, "down", "deflate", 70)
        file.write_text("maxmemory 200mb\n")  # for its next start
        done(rest, "up", "reinflate", 1000)
    assert file.read_text() == "maxmemory 200mb\n"


@pytest.mark.parametrize("then", ["deflated again", "started again"])
def test_a_file_that_cannot_be_put_right_is_named_in_the_reason_and_put_right_later(tmp_path: Path, then: str) -> None:
    file, password = tmp_path / "redis.conf", tmp_path / "password"
    password.write_text("offen")
    file.write_text("maxmemory 300mb\nmaxmemory-policy allkeys-lru\n")
    with served(tmp_path, config=str(file)) as server:
        server.fill(100)
        server.call("ACL", "SETUSER", "ops", "on", ">offen", "+info", "+config|get", "+config|set")
        with hook(tmp_path, server.port, password_file=str(password), user="ops") as rest:
            done(rest, "down", "deflate", 70)
            server.call("CONFIG", "REWRITE")
            ended = done(rest, "up", "reinflate", 1000)
            assert ended["state"] == "released"
            assert f"{file} has the small limit" in ended["reason"]
            assert "nothing had been taken" in rest.target("again", "reinflate", 1000)[1]["reason"]
            server.call("ACL", "SETUSER", "ops", "+config|rewrite")
            if then == "deflated again":
                done(rest, "further", "deflate", 80)
                done(rest, "back", "reinflate", 1000)
    if then == "started again":
        with served(tmp_path, config=str(file)) as server, hook(tmp_path, server.port) as rest:
            assert server.limit_mib() < 100
            done(rest, "up", "reinflate", 1000)
            assert server.limit_mib() == 300
    assert limit_in(file.read_text()) == 300 * 2**20
    assert not (tmp_path / "state.json").exists()


@pytest.mark.parametrize("protocol", [2, 3])
def test_the_client_speaks_both_protocols(tmp_path: Path, protocol: int) -> None:
    socket_path = str(tmp_path / "socket")
    with served(tmp_path, "--unixsocket", socket_path) as server:
        for address in (("127.0.0.1", server.port), socket_path):
            with RedisClient(address, protocol=protocol) as client:
                client.config_set("maxmemory", 12345678)
                assert client.config_get("maxmemory") == "12345678"
                assert client.config_get("nothing-of-this-name") is None
                assert client.info()["maxmemory"] == "12345678"
                assert client.call("GET", "nothing") is None
                client.call("SET", "key", "ä" * 100000)
                assert client.call("GET", "key") == "ä" * 100000
                assert client.call("COMMAND", "COUNT") > 100
                with pytest.raises(ServerError, match="unknown command") as caught:
                    client.call("NO-SUCH-COMMAND")
                assert caught.value.code == "ERR"
                assert client.call("PING") == "PONG"  # the connection is still in step
        plain = Connection(server.port)
        assert plain.call("PING") == "PONG"
        plain.close()
