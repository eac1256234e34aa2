"""The PostgreSQL adapter against a real cluster, through the REST hook."""

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
from app_adapters.errors import ApplicationError
from app_adapters.postgresql import adapter
from app_adapters.postgresql.adapter import PostgresqlAdapter
from app_adapters.postgresql.client import Psql
from app_adapters.processes import process
from app_adapters.server import HookServer
from tests.adapters.postgres import OWNER, Cluster, Load, Session, as_owner
from tests.adapters.rest import Rest
from tests.adapters.results import result

pytestmark = pytest.mark.service


@pytest.fixture(scope="module")
def shared_cluster() -> Iterator[Cluster]:
    cluster = Cluster("shared_buffers = 32MB", "work_mem = 16MB", "max_connections = 40")
    try:
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture
def cluster(shared_cluster: Cluster) -> Iterator[Cluster]:
    """As it was made, whatever the test before did."""
    yield shared_cluster
    for session in shared_cluster.sessions:
        session.close()
    shared_cluster.sessions.clear()
    shared_cluster.ask("ALTER SYSTEM RESET ALL")
    shared_cluster.ask("SELECT pg_reload_conf()")


@contextlib.contextmanager
def hook(
    tmp_path: Path,
    cluster: Cluster,
    role: str = OWNER,
    client: type[Psql] = Psql,
    state: str = "state.json",
    **settings: Any,
) -> Iterator[Rest]:
    token = tmp_path / "token"
    token.write_text("t")
    psql = client(str(cluster.directory), user=role, run_as=OWNER if as_owner() else "")
    adapter = PostgresqlAdapter(psql, str(tmp_path / state), **settings)
    server = HookServer(adapter, port=0, token_file=str(token)).start()
    try:
        yield Rest(server.address, "t")
    finally:
        server.stop()


def done(rest: Rest, request_id: str, direction: str, **target: float) -> dict[str, Any]:
    body = {"request_id": request_id, "deadline_s": 60, "mode": "ask", "direction": direction, "target": target}
    status, answer = rest.send("POST", "/deflation/v1/targets", json.dumps(body).encode())
    assert status == 202, answer
    ended = result(rest, request_id)
    assert ended["state"] == "released", ended
    return ended


def test_idle_sessions_give_their_memory_and_the_others_go_on(
    cluster: Cluster, tmp_path: Path, record_property: Any
) -> None:
    with hook(tmp_path, cluster, terminate_idle_s=0.2) as rest, Load(cluster) as load:
        fat = [cluster.fat_session(30) for _ in range(4)]
        before_mib = cluster.pss_mib()
        memory = rest.capabilities()["resources"]["memory_mib"]
        assert memory["current"] == pytest.approx(before_mib, abs=10)
        assert memory["minimum"] < before_mib - 80
        wait_until_idle(cluster, fat, 0.2)
        ended = done(rest, "down", "deflate", memory_mib=before_mib - 100)
        after_mib = cluster.pss_mib()
        assert before_mib - after_mib > 80, ended
        assert ended["released"]["memory_mib"] == pytest.approx(before_mib - after_mib, rel=0.1, abs=5)
        alive = cluster.ask(
            f"SELECT count(*) FROM pg_stat_activity WHERE pid IN ({', '.join(str(s.pid) for s in fat)})"
        )
        assert int(alive) <= 1  # three make up what was asked for
        done(rest, "up", "reinflate", memory_mib=memory["maximum"])
        cluster.fat_session(30)  # and it grows again
        assert cluster.pss_mib() > after_mib + 25
    assert load.errors == []
    record_property("p99_ms", load.p99_ms())
    print(f"p99 {load.p99_ms():.2f} ms, {len(load.latencies_s)} statements")
    assert load.p99_ms() < 5000


def wait_until_idle(cluster: Cluster, sessions: list[Session], seconds: float) -> None:
    pids = ", ".join(str(session.pid) for session in sessions)
    old = f"state = 'idle' AND state_change < now() - interval '{seconds} seconds'"
    end = time.monotonic() + 60
    while cluster.ask(f"SELECT count(*) FROM pg_stat_activity WHERE pid IN ({pids}) AND {old}") != str(len(sessions)):
        assert time.monotonic() < end


def test_without_leave_no_session_is_ended_and_nothing_is_promised(cluster: Cluster, tmp_path: Path) -> None:
    with hook(tmp_path, cluster) as rest:
        session = cluster.fat_session(30)
        before_mib = cluster.pss_mib()
        status, answer = rest.target("down", "deflate", 10)
        assert (status, answer["promised"]) == (202, {"memory_mib": 0.0})
        ended = result(rest, "down")
        assert ended["released"]["memory_mib"] == pytest.approx(max(before_mib - cluster.pss_mib(), 0), abs=8)
        assert session.ask("SELECT 7;") == "7"


def test_settings_go_down_with_the_target_and_come_back_as_they_were(cluster: Cluster, tmp_path: Path) -> None:
    cluster.ask("ALTER SYSTEM SET maintenance_work_mem = '96MB'")
    cluster.ask("SELECT pg_reload_conf()")
    before = cluster.auto_conf()
    with hook(tmp_path, cluster, maximum_mib=1000.0) as rest, Load(cluster) as load:
        done(rest, "down", "deflate", memory_mib=500)
        assert 4 <= mib(cluster.setting("work_mem")) <= 9
        assert 30 <= mib(cluster.setting("maintenance_work_mem")) <= 60
        assert cluster.setting("shared_buffers") == "32MB"
        done(rest, "far-down", "deflate", memory_mib=10)
        assert cluster.setting("work_mem") == "1MB"
        done(rest, "part", "reinflate", memory_mib=700)
        assert 8 <= mib(cluster.setting("work_mem")) <= 13
    # Another process, which has only the state file to know it from; and the server is another one as well.
    cluster.restart()
    with hook(tmp_path, cluster, maximum_mib=1000.0) as rest:
        assert rest.capabilities()["resources"]["memory_mib"]["maximum"] == 1000
        done(rest, "up", "reinflate", memory_mib=1000)
    assert load.errors == []
    assert cluster.auto_conf() == before
    assert cluster.setting("work_mem") == "16MB"
    assert cluster.setting("maintenance_work_mem") == "96MB"
    assert not (tmp_path / "state.json").exists()


def mib(text: str) -> float:
    return int(text[:-2]) / {"kB": 1024, "MB": 1, "GB": 1 / 1024}[text[-2:]]


def command_line(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def workers(cluster: Cluster) -> tuple[str, str]:
    return cluster.setting("max_parallel_workers"), cluster.setting("max_parallel_workers_per_gather")


def test_what_its_owner_sets_while_it_is_deflated_stays_and_is_named(cluster: Cluster, tmp_path: Path) -> None:
    with hook(tmp_path, cluster, maximum_mib=1000.0) as rest:
        done(rest, "down", "deflate", memory_mib=10)
        cluster.ask("ALTER SYSTEM SET work_mem = '3MB'")
        cluster.ask("SELECT pg_reload_conf()")
        ended = done(rest, "part", "reinflate", memory_mib=500)
        assert "work_mem is left as it was set meanwhile" in ended["reason"]
        cluster.ask("ALTER SYSTEM SET maintenance_work_mem = '40MB'")
        cluster.ask("SELECT pg_reload_conf()")
        done(rest, "down-2", "deflate", memory_mib=10)
        assert (cluster.setting("work_mem"), cluster.setting("maintenance_work_mem")) == ("1MB", "16MB")
        done(rest, "up", "reinflate", memory_mib=1000)
        assert cluster.auto_conf() == ["maintenance_work_mem = '40MB'", "work_mem = '3MB'"]
        done(rest, "down-3", "deflate", memory_mib=10)
        cluster.ask("ALTER SYSTEM SET work_mem = '5MB'")
        ended = done(rest, "up-2", "reinflate", memory_mib=1000)
        assert "work_mem is left as it was set meanwhile" in ended["reason"]
        assert cluster.auto_conf() == ["maintenance_work_mem = '40MB'", "work_mem = '5MB'"]
    assert not (tmp_path / "state.json").exists()


def test_a_deflation_that_was_called_off_ends_no_session(cluster: Cluster, tmp_path: Path) -> None:
    psql = Psql(str(cluster.directory), user=OWNER, run_as=OWNER if as_owner() else "")
    fat = cluster.fat_session(30)
    wait_until_idle(cluster, [fat], 0.2)
    deadline = Deadline(60)
    answer = PostgresqlAdapter(psql, str(tmp_path / "state"), 0.0, 0.2).deflate({"memory_mib": 10}, "ask", deadline)
    assert isinstance(answer, Promise)
    assert "1 idle sessions to end" in answer.reason
    deadline.cancel()
    assert "idle sessions stay" in answer.work().reason
    assert fat.ask("SELECT 7;") == "7"


def test_cores_are_parallel_workers(cluster: Cluster, tmp_path: Path) -> None:
    with hook(tmp_path, cluster) as rest:
        cores = rest.capabilities()["resources"]["cpu_cores"]
        assert cores == {"current": 8, "minimum": 1, "maximum": 8, "step": 1}
        ended = done(rest, "down", "deflate", cpu_cores=1.9)
        assert ended["released"] == {"cpu_cores": 7}
        assert (cluster.setting("max_parallel_workers"), cluster.setting("max_parallel_workers_per_gather")) == (
            "1",
            "1",
        )
        assert cluster.setting("work_mem") == "16MB"
        assert rest.capabilities()["resources"]["cpu_cores"]["maximum"] == 8
        done(rest, "part", "reinflate", cpu_cores=4)
        assert (cluster.setting("max_parallel_workers"), cluster.setting("max_parallel_workers_per_gather")) == (
            "4",
            "2",
        )
        done(rest, "up", "reinflate", cpu_cores=8)
        assert cluster.auto_conf() == []


def test_a_reload_that_the_server_does_not_take_gives_nothing_back_yet(cluster: Cluster, tmp_path: Path) -> None:
    cluster.ask("ALTER SYSTEM SET maintenance_work_mem = '96MB'")
    cluster.ask("SELECT pg_reload_conf()")
    before, state = cluster.auto_conf(), tmp_path / "state.json"
    configuration = cluster.data / "postgresql.conf"
    good = configuration.read_text()
    with hook(tmp_path, cluster, maximum_mib=1000.0) as rest:
        done(rest, "down", "deflate", memory_mib=10)
        low = state.read_text()
        configuration.write_text(good + "nonsense\n")
        try:
            assert rest.target("up", "reinflate", 1000)[0] == 202
            ended = result(rest, "up")
            assert ended["state"] == "failed", ended
            assert "would take no reload" in ended["reason"]
            assert state.read_text() == low
            assert cluster.setting("work_mem") == "1MB"
            # Nor can be seen then what ALTER SYSTEM had written before.
            status, answer = rest.target("again", "deflate", 10)
            assert (status, "would take no reload" in answer["reason"]) == (409, True), answer
        finally:
            configuration.write_text(good)
        done(rest, "up+2", "reinflate", memory_mib=1000)
    assert (cluster.setting("work_mem"), cluster.setting("maintenance_work_mem")) == ("16MB", "96MB")
    assert cluster.auto_conf() == before
    assert not state.exists()


def test_ten_cycles_do_not_creep(cluster: Cluster, tmp_path: Path, record_property: Any) -> None:
    sizes_mib = []
    with hook(tmp_path, cluster, maximum_mib=1000.0) as rest, Load(cluster) as load:
        for i in range(10):
            done(rest, f"down{i}", "deflate", memory_mib=100, cpu_cores=2)
            sizes_mib.append(cluster.pss_mib())
            done(rest, f"up{i}", "reinflate", memory_mib=1000, cpu_cores=8)
            assert cluster.auto_conf() == []
    assert load.errors == []
    record_property("sizes_mib", sizes_mib)
    print("after each deflation", [round(size, 1) for size in sizes_mib], f"p99 {load.p99_ms():.2f} ms")
    assert max(sizes_mib[1:]) <= sizes_mib[0] + 8


def test_two_clusters_at_one_port_each_get_their_own_settings_back(cluster: Cluster, tmp_path: Path) -> None:
    own: dict[str, Any] = {"state": "postgresql-5432-{system}.json", "maximum_mib": 1000.0}
    other = Cluster("work_mem = 8MB")
    try:
        with hook(tmp_path, cluster, state="postgresql-5432.json", maximum_mib=1000.0) as rest:  # an earlier version
            done(rest, "down", "deflate", memory_mib=10)
        with hook(tmp_path, other, **own) as rest:
            done(rest, "down", "deflate", memory_mib=10)
        for one, work_mem in ((cluster, "16MB"), (other, "8MB")):
            assert one.setting("work_mem") == "1MB"
            with hook(tmp_path, one, **own) as rest:
                done(rest, "up", "reinflate", memory_mib=1000)
            assert (one.setting("work_mem"), one.auto_conf()) == (work_mem, [])
        assert list(tmp_path.glob("*.json")) == []
    finally:
        other.stop()


def test_what_another_cluster_is_to_have_back_is_not_written_over_and_nothing_is_promised(
    cluster: Cluster, tmp_path: Path
) -> None:
    state = tmp_path / "state.json"
    state.write_text(json.dumps({"system": "1", "changed": ["work_mem"]}))
    before = state.read_text()
    with hook(tmp_path, cluster, maximum_mib=1000.0) as rest:
        status, answer = rest.target("down", "deflate", 10)
        assert (status, answer["state"], "another cluster" in answer["reason"]) == (409, "refused", True), answer
        assert (state.read_text(), cluster.auto_conf()) == (before, [])


def test_a_role_that_may_not_is_a_clear_refusal(cluster: Cluster, tmp_path: Path) -> None:
    cluster.ask("CREATE ROLE guest LOGIN")
    with hook(tmp_path, cluster, role="guest") as rest:
        status, answer = rest.target("down", "deflate", 10)
        assert (status, answer["state"]) == (409, "refused")
        assert "guest is no superuser" in answer["reason"]
    assert cluster.auto_conf() == []


class Forbidden(Psql):
    """As of a server of version 17 that has allow_alter_system off."""

    tells, fails_at = True, 0

    def run(self, statements: list[str], limit_s: float = 10.0) -> str:
        altering = [statement for statement in statements if statement.startswith("ALTER SYSTEM")]
        if altering[self.fails_at :]:
            super().run(altering[: self.fails_at])
            raise ApplicationError("psql failed: ERROR:  ALTER SYSTEM is not allowed in this environment")
        asked = "current_setting('allow_alter_system', true)"
        return super().run([one.replace(asked, "'off'") if self.tells else one for one in statements], limit_s)


class ForbiddenMeanwhile(Forbidden):
    tells = False


class ForbiddenHalfway(ForbiddenMeanwhile):
    fails_at = 1


def test_a_server_that_takes_no_alter_system_is_a_clear_refusal(cluster: Cluster, tmp_path: Path) -> None:
    with hook(tmp_path, cluster, client=Forbidden) as rest:
        status, answer = rest.target("down", "deflate", 10)
        assert (status, answer["state"]) == (409, "refused")
        assert "allow_alter_system is off" in answer["reason"]


def test_a_change_that_fails_leaves_something_to_put_back_only_where_it_changed_something(
    cluster: Cluster, tmp_path: Path
) -> None:
    state = tmp_path / "state.json"
    with hook(tmp_path, cluster, client=ForbiddenMeanwhile, maximum_mib=1000.0) as rest:
        rest.target("down", "deflate", 10)
        ended = result(rest, "down")
        assert (ended["state"], "is not allowed" in ended["reason"]) == ("failed", True), ended
        assert not state.exists()
        done(rest, "up", "reinflate", memory_mib=1000)
    with hook(tmp_path, cluster, maximum_mib=1000.0) as rest:
        done(rest, "down", "deflate", cpu_cores=1)
    before = state.read_text()
    with hook(tmp_path, cluster, client=ForbiddenMeanwhile, maximum_mib=1000.0) as rest:
        rest.target("down", "deflate", 10)
        assert result(rest, "down")["state"] == "failed"
        assert state.read_text() == before
    with hook(tmp_path, cluster, client=ForbiddenHalfway, maximum_mib=1000.0) as rest:
        rest.target("down", "deflate", 10)
        assert result(rest, "down")["state"] == "failed"
    assert "work_mem" in json.loads(state.read_text())["changed"]
    with hook(tmp_path, cluster, maximum_mib=1000.0) as rest:
        done(rest, "up", "reinflate", memory_mib=1000, cpu_cores=8)
    assert cluster.auto_conf() == []
    assert not state.exists()


def test_a_setting_that_something_else_holds_is_said_to_stay(cluster: Cluster, tmp_path: Path) -> None:
    cluster.ask("ALTER ROLE postgres SET work_mem = '20MB'")
    try:
        with hook(tmp_path, cluster, maximum_mib=1000.0) as rest:
            ended = done(rest, "down", "deflate", memory_mib=100)
            assert "work_mem stays 20480, by user" in ended["reason"]
            assert not [line for line in cluster.auto_conf() if line.startswith("work_mem")]
    finally:
        cluster.ask("ALTER ROLE postgres RESET work_mem")


def test_what_a_role_has_for_itself_raises_nothing_for_the_others(cluster: Cluster, tmp_path: Path) -> None:
    with hook(tmp_path, cluster, maximum_mib=1000.0) as rest:
        done(rest, "down", "deflate", memory_mib=10)
        assert (cluster.setting("work_mem"), cluster.setting("maintenance_work_mem")) == ("1MB", "16MB")
        cluster.ask("ALTER ROLE postgres SET work_mem = '300MB'")
        cluster.ask("ALTER DATABASE postgres SET maintenance_work_mem = '1MB'")
        try:
            done(rest, "again", "deflate", memory_mib=700)
            done(rest, "part", "reinflate", memory_mib=600)
            held = [line for line in cluster.auto_conf() if "work_mem" in line]
            assert held == ["maintenance_work_mem = '16384kB'", "work_mem = '1024kB'"]
        finally:
            cluster.ask("ALTER ROLE postgres RESET work_mem")
            cluster.ask("ALTER DATABASE postgres RESET maintenance_work_mem")
        done(rest, "up", "reinflate", memory_mib=1000)
    assert cluster.auto_conf() == []


def test_workers_that_a_role_has_for_itself_are_not_promised(cluster: Cluster, tmp_path: Path) -> None:
    cluster.ask("ALTER ROLE postgres SET max_parallel_workers = 6")
    try:
        with hook(tmp_path, cluster) as rest:
            assert rest.capabilities()["resources"]["cpu_cores"]["minimum"] == 6
            body = {"target": {"cpu_cores": 2}}
            assert rest.target("down", "deflate", 0, **body)[1]["promised"] == {"cpu_cores": 0.0}
            assert result(rest, "down")["released"] == {"cpu_cores": 0.0}
            assert not [line for line in cluster.auto_conf() if line.startswith("max_parallel_workers =")]
    finally:
        cluster.ask("ALTER ROLE postgres RESET max_parallel_workers")


def test_its_size_costs_no_walk_over_the_shared_buffers_of_each_session(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []

    def watched(path: Any, *arguments: Any, **options: Any) -> Any:
        opened.append(str(path))
        return open(path, *arguments, **options)

    monkeypatch.setattr(adapter, "open", watched, raising=False)
    monkeypatch.setattr(process, "open", watched, raising=False)
    with hook(tmp_path, cluster, terminate_idle_s=0.0) as rest:
        sessions = [cluster.fat_session(10) for _ in range(3)]
        size_mib = rest.capabilities()["resources"]["memory_mib"]["current"]
        done(rest, "down", "deflate", memory_mib=10)
    assert any(f"/{sessions[0].pid}/status" in path for path in opened)
    assert [path for path in opened if "smaps" in path] == []
    assert size_mib > 40


def test_a_server_that_hangs_is_a_refusal_and_no_psql_is_left(cluster: Cluster, tmp_path: Path) -> None:
    os.kill(cluster.postmaster, signal.SIGSTOP)
    try:
        with hook(tmp_path, cluster) as rest:
            status, answer = rest.target("down", "deflate", 10)
    finally:
        os.kill(cluster.postmaster, signal.SIGCONT)
    assert (status, answer["state"]) == (409, "refused")
    assert "psql" in answer["reason"]
    with pytest.raises(ApplicationError, match="no answer within"):
        Psql(str(cluster.directory), run_as=OWNER if as_owner() else "").run(["SELECT pg_sleep(50)"], 0.5)
    assert not [path for path in Path("/proc").glob("[0-9]*/cmdline") if b"pg_sleep(50)" in command_line(path)]
    assert cluster.ask("SELECT 1") == "1"


def test_a_server_that_is_not_there_is_a_refusal(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("t")
    adapter = PostgresqlAdapter(Psql(str(tmp_path)), str(tmp_path / "state"))
    server = HookServer(adapter, port=0, token_file=str(token)).start()
    try:
        status, answer = Rest(server.address, "t").target("down", "deflate", 10)
    finally:
        server.stop()
    assert (status, answer["state"]) == (409, "refused")
    assert "psql failed" in answer["reason"]
