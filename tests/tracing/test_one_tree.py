"""Real daemons send one tree of spans for an operation: manager, host agent, guest and hook."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from ebbtide.messages.operations import OperationState
from ebbtide.tracing.context import new_trace
from tests.manager.cluster import vm
from tests.tracing.collector import Collector, collecting
from tests.tracing.traced import Traced, traced
from tests.waiting import until

pytestmark = pytest.mark.service


@pytest.fixture
async def collector() -> AsyncIterator[Collector]:
    async with collecting() as made:
        yield made


@pytest.fixture
async def cluster(tmp_path: Path, collector: Collector) -> AsyncIterator[Traced]:
    async with traced(tmp_path, collector) as made:
        yield made


async def test_a_shrink_is_one_tree_from_the_client_to_the_hook(cluster: Traced, collector: Collector) -> None:
    assert (await cluster.create(vm("shop"))).state is OperationState.DONE
    await cluster.connected("shop")
    client = new_trace()
    operation = await cluster.shrink("shop", "smaller", 600.0, traceparent=client.header())
    assert operation.state is OperationState.DONE, operation.sentence
    assert operation.trace_id == client.trace

    def of_it() -> bool:
        return {"operation target", "hook target"} <= {s.name for s in collector.spans if s.trace_id == client.trace}

    await until(lambda: of_it() and sum(s.name == "operation target" for s in collector.spans) == 2)
    tree = [one for one in collector.spans if one.trace_id == client.trace]
    (root,) = (one for one in tree if one.parent == f"{client.span_id:016x}")
    assert (root.service, root.name) == ("ebb-manager", "operation target")
    ids = {one.span_id for one in tree}
    assert len(ids) == len(tree), "each span once"
    assert {one.parent for one in tree} - ids == {f"{client.span_id:016x}"}, "every other one has its parent there"

    (hook,) = collector.named("hook target")
    assert collector.above(hook) == [
        "operation target",
        "step set-target",
        "call PUT",
        "operation target",
        "vm cascade",
        "layer application",
        "step AskApplication",
        "call application.deflate",
        "guest application.deflate",
        "hook target",
    ]
    assert (hook.service, hook.attributes["ebbtide.hook"], hook.attributes["ebbtide.status"]) == (
        "ebb-guestagent",
        "shop",
        202,
    )
    # The hook has been told the very span that the host recorded for its call.
    told = dict(cluster.hook.traceparents)["POST targets"]
    assert told == f"00-{client.trace}-{hook.span_id}-01"

    (layer,) = (one for one in tree if one.name == "layer guest")
    row = next(r for r in operation.vms[0].ledger if r.layer == "guest" and r.resource == "memory_mib")
    assert layer.attributes["ebbtide.memory_mib.asked"] == row.asked
    assert layer.attributes["ebbtide.memory_mib.verified"] == row.verified
    by_id = {one.span_id: one for one in tree}
    for one in tree:
        above = by_id.get(one.parent)
        if above is not None and one.service == "ebb-guestagent":
            assert above.began_ns <= one.began_ns <= one.ended_ns <= above.ended_ns, "a guest's times are the host's"
    assert f"trace_id={client.trace}" in cluster.log("manager")
    assert f"trace_id={client.trace}" in cluster.log("agent")


async def test_a_manager_that_is_started_again_goes_on_with_the_same_trace(
    cluster: Traced, collector: Collector
) -> None:
    client = new_trace()
    cluster.world.delay = lambda: 0.2
    body = {"request_id": "create-shop", "vm": vm("shop"), "deadline_s": 30.0}
    await cluster.call("POST", "/v1/vms", body, traceparent=client.header())
    await until(lambda: any(method == "create" for method, _ in cluster.world.calls))
    await cluster.end("manager", kill=True)
    await cluster.start_manager()
    operation = await cluster.ended("create-shop")
    assert (operation.state, operation.trace_id) == (OperationState.DONE, client.trace)
    await until(lambda: any(s.name == "operation create" and s.service == "ebb-manager" for s in collector.spans))
    (root,) = (s for s in collector.spans if s.name == "operation create" and s.service == "ebb-manager")
    assert (root.trace_id, root.parent) == (client.trace, f"{client.span_id:016x}")
    assert root.attributes["ebbtide.resumed"] is True
    resumed = [s for s in collector.spans if s.parent == root.span_id and s.attributes.get("ebbtide.resumed")]
    assert resumed, "its steps are beneath it"


async def test_a_client_that_is_not_traced_begins_a_trace_and_one_that_is_not_sampled_none(
    cluster: Traced, collector: Collector
) -> None:
    operation = await cluster.create(vm("shop"))
    assert operation.trace_id is not None
    await until(lambda: len(collector.named("operation create")) == 2)
    for one in collector.named("operation create"):
        assert one.trace_id == operation.trace_id
    unsampled = new_trace(sampled=False)
    operation = await cluster.create(vm("quiet", cpu_cores=1.0), traceparent=unsampled.header())
    assert operation.trace_id is None
    await cluster.end("manager")
    await cluster.end("agent")
    assert not [one for one in collector.spans if one.trace_id == unsampled.trace]
    assert {one.attributes.get("ebbtide.vm") for one in collector.spans} <= {"shop", None}
