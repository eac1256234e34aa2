"""The manager's API against the document that it serves: no 5xx, no undocumented answer, wrong data refused."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from cluster_manager.api.app import make_app
from cluster_manager.tasks.tasks import TaskService
from ebbtide.rest.credentials import report_token
from tests import schema_run
from tests.manager import cluster as tests_cluster
from tests.manager.cluster import TOKEN, cluster_of
from tests.manager.fake_agent import HOSTS_KEY
from tests.manager.with_agent import lab_of

pytestmark = [pytest.mark.usefixtures("each_store"), pytest.mark.timeout(900)]

#: Streams do not end by themselves (tests/manager/api/test_event_stream.py); reports carry the agents' token.
ROOT = Path(__file__).resolve().parents[3]
STREAM, REPORT = "/v1/events/stream", "/v1/hosts/{id}/report"
#: A host that is revoked is so for good, and only a host asks for its certificate (test_enrolment.py).
WITHOUT = (STREAM, REPORT, "/v1/hosts/{id}/revocation", "/v1/hosts/{id}/certificate")
#: A placement can be called off for moments only (tests/manager/execution/test_calling_off.py).
REFUSED = "/v1/operations/{id}/cancel"


#: What needs a VM in a state that random requests seldom leave it in: adopted, running, where there is another host.
BY_HAND: list[tuple[str, str, dict[str, Any]]] = [
    ("POST", "/v1/adoptions", {"host": "host-a", "domain": "Old", "name": "old"}),
    ("POST", "/v1/vms/old/release", {}),
    ("PUT", "/v1/vms/web/target", {"generation": 50, "target": {"cpu_cores": 2.0, "memory_mib": 1000.0}}),
    ("POST", "/v1/vms/web/migrate", {"lose_disk": True}),
    ("POST", "/v1/vms/web/stop", {"limit_s": 1.0}),
    ("POST", "/v1/vms/web/start", {}),
]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> schema_run.Seen:
    """The answers of every manager that is started from now on."""
    counted: schema_run.Seen = Counter()
    monkeypatch.setattr(tests_cluster, "make_app", lambda manager: schema_run.watch(make_app(manager), counted))
    return counted


@pytest.fixture
def held_shortly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who asks for a task's end has an answer soon: what may be asked for is a minute, and this task never ends."""
    whole = TaskService.wait
    monkeypatch.setattr(TaskService, "wait", lambda tasks, name, wait_s: whole(tasks, name, min(wait_s, 0.05)))


@pytest.mark.usefixtures("held_shortly")
async def test_what_clients_may_ask_is_answered_as_documented(tmp_path: Path, seen: schema_run.Seen) -> None:
    async with lab_of(tmp_path) as lab:
        assert lab.cluster.server is not None
        app = lab.cluster.server.app
        await lab.create("web")
        await lab.create("low-1", cpu_cores=1.0)
        await lab.world.create("Old", "")
        lab.world.domains["Old"].state = "running"
        for number, (method, path, body) in enumerate(BY_HAND):
            request_id = f"by-hand-{number}"
            status, answer = await lab.cluster.call(method, path, json={"request_id": request_id, **body})
            assert status == 202, answer
            await lab.cluster.ended(request_id)
        task = {"name": "web", "command": ["true"]}
        status, answer = await lab.cluster.call("POST", "/v1/tasks", json={"request_id": "by-hand", "task": task})
        assert status == 202, answer
        _, invited = await lab.cluster.call("POST", "/v1/invitations", json={"host": "host-new"})
        joining = {"token": invited["token"], "host": "host-new", "address": "127.0.0.1"}
        assert (await lab.cluster.call("POST", "/v1/enrolments", json=joining))[0] == 200
        names = {
            "path.name": ["web", "low-1"],
            "path.id": ["host-a", "create-web"],
            "path.request_id": ["back"],
            "path.file": ["main.js"],
            "query.host": ["host-a"],
            "query.domain": ["Old"],
        }
        await lab.add_old_host()
        assert (await lab.cluster.call("DELETE", "/v1/hosts/host-old"))[0] == 200
        await schema_run.run(lab.url, TOKEN, tmp_path, names=names, max_examples=15, without=WITHOUT)
        assert seen["POST", REFUSED, 409] > 0
    assert schema_run.unreached(app, seen, without=(*WITHOUT, REFUSED)) == []


def opened(document: Any) -> Any:
    """A schema in which a later version may have more fields and more words, as the manager takes them in reports."""
    if isinstance(document, dict):
        return {
            name: opened(part)
            for name, part in document.items()
            if (name, part) != ("additionalProperties", False) and not (name == "enum" and isinstance(part, list))
        }
    return [opened(part) for part in document] if isinstance(document, list) else document


async def test_what_agents_may_report_is_answered_as_documented(tmp_path: Path, seen: schema_run.Seen) -> None:
    document = tmp_path / "manager.json"
    written = json.loads((ROOT / "docs/openapi/manager.json").read_text())
    document.write_text(json.dumps(opened(written)))
    async with cluster_of(tmp_path, insecure=True) as cluster:  # the URLs are made up
        url = cluster.url
        await schema_run.run(
            url,
            report_token(HOSTS_KEY, "0"),
            tmp_path,
            document=document,
            names={"path.id": ["0"]},
            max_examples=30,
            only=(REPORT,),
        )
    assert seen["POST", REPORT, 200] > 20
