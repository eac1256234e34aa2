"""What programs build on: problems with codes and all fields, reasons with figures, positions, headers, HEAD."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from cluster_manager.api.app import make_app
from cluster_manager.manager import Manager
from ebbtide.client import ManagerRefused
from ebbtide.client.connection import refusal_of
from ebbtide.messages.common import Problem, problem_in
from ebbtide.messages.problem_codes import PROBLEMS, ProblemCode, ReasonCode
from ebbtide.rest.access import Access
from ebbtide.rest.credentials import report_token
from ebbtide.rest.rates import Rate, Rates
from ebbtide.rest.roles import Role
from ebbtide.rest.tokens import principal
from tests.manager import cluster as tests_cluster
from tests.manager import fake_engine
from tests.manager.cluster import TOKEN, Cluster, cluster_of, vm
from tests.manager.fake_agent import HOSTS_KEY, FakeAgent
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("each_store")
REST = Path(__file__).resolve().parents[3] / "docs/reference/rest.md"


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with cluster_of(
        tmp_path, FakeAgent("host-a", cpu_cores=8.0, memory_mib=8000.0), **fake_engine.settings()
    ) as made:
        yield made


class Answer(NamedTuple):
    status: int
    content_type: str
    headers: Mapping[str, str]
    body: bytes


async def asked(cluster: Cluster, method: str, path: str, **options: Any) -> Answer:
    assert cluster.server is not None
    headers = {"Authorization": f"Bearer {TOKEN}", **options.pop("headers", {})}
    async with cluster.session.request(method, cluster.server.make_url(path), headers=headers, **options) as answer:
        return Answer(answer.status, answer.content_type, answer.headers, await answer.read())


async def test_a_problem_has_what_rfc_9457_says_and_all_fields_at_once(cluster: Cluster) -> None:
    body = {"vm": {"name": "No", "nominal": {"cpu_cores": "2"}, "surprise": 1}}
    answer = await asked(cluster, "POST", "/v1/vms", json=body, headers={"X-Request-Id": "mine-1"})
    assert (answer.status, answer.content_type) == (400, "application/problem+json")
    assert answer.headers["X-Request-Id"] == "mine-1"
    problem = Problem.model_validate_json(answer.body)
    assert problem.type == "urn:ebbtide:problem:invalid"
    assert (problem.title, problem.status) == (PROBLEMS[ProblemCode.INVALID][1], 400)
    assert problem.instance == "urn:ebbtide:request:mine-1"
    assert {(error.field, error.code) for error in problem.errors} == {
        ("request_id", "missing"),
        ("vm.name", "invalid"),
        ("vm.nominal.cpu_cores", "invalid"),
        ("vm.surprise", "unknown"),
    }
    assert problem.field == problem.errors[0].field
    assert all(error.detail in problem.detail for error in problem.errors[:3])
    assert problem.detail.endswith("; and 1 more")


async def test_codes_tell_refusals_of_one_status_apart(cluster: Cluster) -> None:
    await cluster.create(vm("low", cpu_cores=1.0))
    known = {"request_id": "create-low", "vm": vm("low", cpu_cores=2.0), "deadline_s": 3.0}
    taken = {"request_id": "again", "vm": vm("low")}
    old = {"request_id": "old", "generation": 1, "target": {"cpu_cores": 1.0}}
    cases = [
        ("POST", "/v1/vms", known, 409, "request-id-reused"),
        ("POST", "/v1/vms", taken, 409, "already-exists"),
        ("POST", "/v1/vms/low/start", {"request_id": "s"}, 409, "wrong-state"),
        ("PUT", "/v1/vms/low/target", {**old, "request_id": "new", "generation": 5}, 202, None),
        ("GET", "/v1/vms/nobody", None, 404, "not-found"),
        ("GET", "/v1/nothing", None, 404, "no-such-route"),
        ("PATCH", "/v1/vms", None, 405, "method-not-allowed"),
        ("POST", "/v1/invitations", {}, 409, "not-configured"),
    ]
    found = []
    for method, path, body, _, _ in cases:
        status, answer = await cluster.call(method, path, json=body)
        found.append((status, answer.get("code")))
    assert found == [(status, code) for _, _, _, status, code in cases]
    await cluster.ended("new")
    status, answer = await cluster.call("PUT", "/v1/vms/low/target", json=old)
    assert (status, answer["code"], answer["field"]) == (409, "superseded", "generation")


async def test_a_failed_operation_says_why_by_a_code_and_figures(cluster: Cluster) -> None:
    failed = await cluster.create(vm("huge", "fixed", cpu_cores=50.0))
    assert failed.reason is not None
    assert failed.reason.code is ReasonCode.NO_ROOM
    assert failed.reason.asked is not None
    assert failed.reason.asked.cpu_cores == 50.0
    done = await cluster.create(vm("low", cpu_cores=1.0))
    assert (done.state, done.reason) == ("done", None), done.sentence
    assert "reason" not in await cluster.get("/v1/operations/create-low")
    cluster.agents[0].trouble.mute = True
    assert cluster.manager is not None
    await until(lambda: silent(cluster))
    failed = await cluster.create(vm("late", cpu_cores=1.0))
    assert failed.reason is not None
    assert failed.reason.code is ReasonCode.NO_HOST_READY


async def silent(cluster: Cluster) -> bool:
    return bool((await cluster.get("/v1/hosts"))["hosts"][0]["state"] == "silent")


async def test_lists_say_from_where_to_watch_and_what_is_ahead_of_the_log_is_refused(cluster: Cluster) -> None:
    await cluster.create(vm("low", cpu_cores=1.0))
    newest = (await cluster.get("/v1/events"))["events"][0]["id"]
    for path in ("vms", "hosts", "operations", "tasks", "events"):
        assert (await cluster.get(f"/v1/{path}"))["position"] == newest, path
    await cluster.create(vm("low-2", cpu_cores=1.0))
    later = (await cluster.get(f"/v1/events?since_id={newest}"))["events"]
    assert later
    assert all(event["id"] > newest for event in later)
    for path, headers, field in (
        ("/v1/events?since_id=999", {}, "since_id"),
        ("/v1/events/stream?since_id=999", {}, "since_id"),
        ("/v1/events/stream", {"Last-Event-ID": "999"}, "Last-Event-ID"),
    ):
        status, answer = await cluster.call("GET", path, headers=headers)
        assert (status, answer["code"], answer["field"]) == (400, "ahead-of-log", field)


async def test_head_is_get_without_a_body_and_needs_the_same_role(cluster: Cluster) -> None:
    await cluster.create(vm("low", cpu_cores=1.0))
    got, head = [await asked(cluster, method, "/v1/vms/low") for method in ("GET", "HEAD")]
    assert (head.status, head.body) == (200, b"")
    assert head.headers["ETag"] == got.headers["ETag"]
    assert (await asked(cluster, "HEAD", "/v1/vms/nobody")).status == 404
    assert (await asked(cluster, "HEAD", "/v1/adoptions", headers={"Authorization": "Bearer x"})).status == 401
    assert (await asked(cluster, "HEAD", "/v1/backup")).status == 405


async def test_health_says_which_version_it_is(cluster: Cluster) -> None:
    assert (await cluster.get("/healthz"))["version"] == version("ebbtide")


async def test_a_request_without_an_id_gets_one_and_a_bad_one_is_not_repeated(cluster: Cluster) -> None:
    ids = {(await asked(cluster, "GET", "/v1/vms")).headers["X-Request-Id"] for _ in range(2)}
    assert len(ids) == 2
    answer = await asked(cluster, "GET", "/v1/vms", headers={"X-Request-Id": "a b<c>"})
    assert re.fullmatch("[0-9a-f]{32}", answer.headers["X-Request-Id"])


async def test_who_is_limited_is_told_what_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def limited(manager: Manager) -> Any:
        rates = Rates(people=Rate(per_s=0.5, burst=3.0))
        access = Access([principal("token-file", Role.ADMIN, TOKEN)], rates, clock=lambda: 0.0, hosts_key=HOSTS_KEY)
        return make_app(manager, access)

    monkeypatch.setattr(tests_cluster, "make_app", limited)
    async with cluster_of(tmp_path) as cluster:
        answers = [await asked(cluster, "GET", "/v1/vms") for _ in range(4)]
        assert [answer.status for answer in answers] == [200, 200, 200, 429]
        assert [answer.headers["RateLimit"] for answer in answers] == [
            '"people";r=2;t=2',
            '"people";r=1;t=4',
            '"people";r=0;t=6',
            '"people";r=0;t=6',
        ]
        assert {answer.headers["RateLimit-Policy"] for answer in answers} == {'"people";q=3;w=6'}
        assert answers[3].headers["Retry-After"] == "2"


async def test_a_task_that_no_machine_can_hold_is_refused(cluster: Cluster) -> None:
    async def looked() -> bool:
        return bool((await cluster.get("/v1/engine"))["machines"])

    await until(looked)
    machines = (await cluster.get("/v1/engine"))["machines"]
    most = max(machine["most_cores"] for machine in machines)
    task = {"name": "large", "command": ["true"], "cores": most + 1}
    status, answer = await cluster.call("POST", "/v1/tasks", json={"request_id": "t", "task": task})
    assert (status, answer["code"], answer["field"]) == (409, "never-fits", "task.cores")
    task["cores"] = most
    assert (await cluster.call("POST", "/v1/tasks", json={"request_id": "t", "task": task}))[0] == 202


async def test_the_client_has_the_code_and_all_fields(cluster: Cluster) -> None:
    async with cluster.client() as client:
        with pytest.raises(ManagerRefused) as caught:
            await client.vm("nobody")
    assert (caught.value.status, caught.value.code, caught.value.field) == (404, ProblemCode.NOT_FOUND, "name")


def test_what_earlier_and_later_versions_answer_is_understood() -> None:
    earlier = refusal_of(409, {"error": "there is one already", "field": "vm.name"})
    assert (str(earlier), earlier.field, earlier.code) == ("there is one already", "vm.name", ProblemCode.CONFLICT)
    later = Problem.of(409, "new", "x").model_dump(mode="json") | {"code": "a-new-one", "more": 1}
    assert (str(refusal_of(409, later)), refusal_of(409, later).code) == ("new", ProblemCode.CONFLICT)
    nothings: list[Any] = [{}, [], "gone", None]
    for nothing in nothings:
        assert str(refusal_of(502, nothing)) == "the manager answered with status 502"
    unknown = problem_in(400, b'{"error": "vms.0.new: extra inputs are not permitted", "field": "vms.0.new"}')
    assert unknown is not None
    assert [(error.field, error.code) for error in unknown.errors] == [("vms.0.new", "unknown")]


async def test_a_host_agent_of_an_earlier_version_is_answered_in_its_words(cluster: Cluster) -> None:
    headers = {"Authorization": f"Bearer {report_token(HOSTS_KEY, 'host-a')}"}
    answer = await asked(cluster, "POST", "/v1/hosts/host-a/report", json={}, headers=headers)
    assert (answer.status, answer.content_type) == (400, "application/json")
    assert json.loads(answer.body) == {"error": "id: field required", "field": "id"}


def test_the_reference_lists_all_codes() -> None:
    text = REST.read_text()
    for code, (status, title) in PROBLEMS.items():
        assert f"| {status} | `{code}` | {title} |" in text
    assert set(PROBLEMS) == set(ProblemCode)
    for reason in ReasonCode:
        assert f"| `{reason}` |" in text
