"""Drop-in files that come, change and go while the agent runs, and how targets are split among what is there."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from app_adapters.adapter import Adapter
from app_adapters.server import HookServer
from guestagent import applications
from guestagent.hooks import in_parallel
from tests.guestagent.elastic import Elastic, Workers
from tests.guestagent.harness import Bench, Host
from tests.waiting import until_sync


@pytest.fixture
def servers() -> Iterator[list[HookServer]]:
    made: list[HookServer] = []
    yield made
    for server in made:
        server.stop()


def serve(guest: Bench, servers: list[HookServer], adapter: Adapter) -> int:
    servers.append(HookServer(adapter, port=0, token_file=str(guest.run_dir / "token")).start())
    return servers[-1].address[1]


def ask(host: Host, request_id: str, **target: float) -> dict[str, Any]:
    return host.result(
        "application.deflate", request_id=request_id, deadline_s=60, mode="ask", target=target, bound_mib=1024
    )


def names(host: Host) -> list[str]:
    return [row["name"] for row in host.result("application.capabilities")["adapters"]]


def test_a_drop_in_that_comes_changes_and_goes_counts_at_the_next_question(
    guest: Bench, host: Host, servers: list[HookServer]
) -> None:
    first, second = Elastic(300), Elastic(200)
    assert ask(host, "none", memory_mib=700)["state"] == "none"

    guest.register("app", serve(guest, servers, first))
    assert names(host) == ["app"]
    assert host.result("status")["applications"] == [{"name": "app", "resident_mib": 300}]
    assert ask(host, "added", memory_mib=400)["state"] == "promised"
    assert len(first.targets) == 1

    guest.register("app", serve(guest, servers, second))
    assert host.result("status")["applications"] == [{"name": "app", "resident_mib": 200}]
    assert ask(host, "changed", memory_mib=400)["state"] == "promised"
    assert (len(first.targets), len(second.targets)) == (1, 1)

    (guest.adapters_dir / "app.json").rename(guest.adapters_dir / "app.json.off")
    assert names(host) == []
    assert host.result("status")["applications"] == []
    assert ask(host, "removed", memory_mib=300)["state"] == "none"
    assert len(second.targets) == 1


def test_what_was_promised_by_an_application_whose_drop_in_goes_is_failed(
    guest: Bench, host: Host, servers: list[HookServer]
) -> None:
    app = Elastic(300)
    app.go.clear()
    guest.register("app", serve(guest, servers, app))
    assert ask(host, "r", memory_mib=400)["state"] == "promised"
    (guest.adapters_dir / "app.json").unlink()
    status = host.result("application.status", request_id="r")
    assert (status["state"], status["reason"]) == ("failed", "app: its drop-in file is gone")
    app.go.set()


@pytest.mark.parametrize("when", ["while the host asks", "while it is owed", "while it works"])
def test_an_application_whose_drop_in_cannot_be_read_for_a_moment_has_its_reinflation_all_the_same(
    guest: Bench,
    host: Host,
    servers: list[HookServer],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    when: str,
) -> None:
    monkeypatch.setattr(applications, "AGAIN_S", (0.05, 0.1))
    app = Elastic(300, maximum_mib=350)
    file = guest.adapters_dir / "app.json"
    guest.register("app", serve(guest, servers, app))
    ask(host, "down", memory_mib=400)
    until_sync(lambda: app.size_mib < 300)
    if when == "while it is owed":
        servers[0].stop()
    if when == "while it works":
        app.go.clear()
    if when == "while the host asks":
        file.chmod(0o666)
        assert host.result("status")["applications"] == []  # so that it is not known even from the question before
    target = {"memory_mib": 1024}
    answer = host.result("application.reinflate", request_id="up", deadline_s=1, target=target, bound_mib=1024)
    if when == "while the host asks":
        assert answer["reason"] == "app: its drop-in file is left out"
    file.chmod(0o666)
    until_sync(lambda: "adapter left out" in capfd.readouterr().err or when == "while the host asks")
    if when == "while it is owed":
        servers[0] = HookServer(app, port=servers[0].address[1], token_file=str(guest.run_dir / "token")).start()
    time.sleep(0.3)  # it is told again a few times
    assert "all have done" not in capfd.readouterr().err
    app.go.set()
    file.chmod(0o644)
    until_sync(lambda: app.size_mib == 350)
    until_sync(lambda: "all have done up" in capfd.readouterr().err)


def test_nothing_is_owed_to_an_application_whose_drop_in_goes_although_another_file_is_bad(
    guest: Bench,
    host: Host,
    servers: list[HookServer],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(applications, "AGAIN_S", (0.05, 0.1))
    (guest.adapters_dir / "bad.json").write_text("broken")
    guest.register("app", serve(guest, servers, Elastic(300)))
    ask(host, "down", memory_mib=400)
    servers[0].stop()
    host.result("application.reinflate", request_id="up", deadline_s=1, target={"memory_mib": 1024}, bound_mib=1024)
    assert "app: told again of up" in capfd.readouterr().err
    time.sleep(0.3)  # it is told again
    (guest.adapters_dir / "app.json").unlink()
    until_sync(lambda: "all have done up" in capfd.readouterr().err)


def test_an_application_whose_drop_in_is_read_again_while_others_are_asked_has_its_reinflation(
    guest: Bench,
    host: Host,
    servers: list[HookServer],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(applications, "AGAIN_S", (0.05, 0.1))
    file = guest.adapters_dir / "app.json"
    asked_while_bad = threading.Event()

    def mended_meanwhile(calls: Any, limit_s: float) -> Any:
        if file.stat().st_mode & 0o022 and not calls:
            file.chmod(0o644)
            guest.agent._applications.sizes()  # as another thread does
            asked_while_bad.set()
        return in_parallel(calls, limit_s)

    monkeypatch.setattr(applications, "in_parallel", mended_meanwhile)
    app = Elastic(300, maximum_mib=350)
    guest.register("app", serve(guest, servers, app))
    app.go.clear()
    target = {"memory_mib": 1024}
    host.result("application.reinflate", request_id="up", deadline_s=60, target=target, bound_mib=1024)
    file.chmod(0o666)
    until_sync(asked_while_bad.is_set)
    app.go.set()
    until_sync(lambda: "all have done up" in capfd.readouterr().err)


def test_a_drop_in_that_turns_bad_is_left_out_and_the_others_stay(
    guest: Bench, host: Host, servers: list[HookServer], capfd: pytest.CaptureFixture[str]
) -> None:
    port = serve(guest, servers, Elastic(300))
    guest.register("good", port)
    guest.register("bad", port)
    assert names(host) == ["bad", "good"]
    (guest.adapters_dir / "bad.json").write_text(json.dumps({"name": "bad", "url": "http://192.0.2.1:80"}))
    assert names(host) == ["good"]
    assert names(host) == ["good"]
    assert capfd.readouterr().err.count("adapter left out: ") == 1  # told once, not at every question
    guest.register("bad", port)
    assert names(host) == ["bad", "good"]


def test_memory_and_cores_of_several_are_summed_and_split(guest: Bench, host: Host, servers: list[HookServer]) -> None:
    large, small, workers = Elastic(240), Elastic(60), Workers(4.0)
    for name, adapter in (("large", large), ("small", small), ("workers", workers)):
        guest.register(name, serve(guest, servers, adapter))
    answer = ask(host, "both", memory_mib=400, cpu_cores=1.0)
    # 1024 - (1024 - 400) - (424 used - 300 of both) - 51.2 reserve = 224.8, by resident size.
    assert large.targets[-1][1] == pytest.approx(224.8 * 0.8, abs=0.01)
    assert small.targets[-1][1] == pytest.approx(224.8 * 0.2, abs=0.01)
    assert workers.targets[-1] == {"cpu_cores": 1.0}
    assert answer["promised"] == {"memory_mib": pytest.approx(75.2, abs=0.01), "cpu_cores": 3.0}
    while (status := host.result("application.status", request_id="both"))["state"] == "running":
        pass
    assert status["released"] == {"memory_mib": pytest.approx(75.2, abs=0.01), "cpu_cores": 3.0}
    # One of them goes: what it holds is others' now, so all that the one that is left can give is asked of it.
    (guest.adapters_dir / "large.json").unlink()
    assert ask(host, "later", memory_mib=400)["promised"] == {"memory_mib": pytest.approx(224.8 * 0.2 - 10, abs=0.01)}
    assert (len(large.targets), small.targets[-1][1]) == (1, small.minimum_mib)
