"""The channel to a guest that may say anything: nothing it sends harms the agent or stands for an answer."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import structlog

from ebbtide.messages.guest import MAX_TEXT, CpusSet, GuestStatus, Hello, Notice, PressureNotice, RequestNotice
from hostagent.errors import GuestRefused, GuestSilent, GuestUnreachable
from hostagent.vm import guest_link
from hostagent.vm.guest_link import LONGEST_RETRY_S, GuestLink, RetryPace
from tests.waiting import until

Answer = Callable[[dict[str, Any]], list[bytes]]


def reply(request: dict[str, Any], result: Any) -> bytes:
    return json.dumps({"jsonrpc": "2.0", "id": request["id"], "result": result}).encode() + b"\n"


def honest_hello(request: dict[str, Any]) -> bytes:
    nonce = request["params"]["nonce"]
    return reply(request, {"protocol": 1, "nonce": nonce, "agent": "t", "boot_id": "b", "capabilities": []})


class Guest:
    """Answers hello honestly and anything else as the test says."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.answer: Answer = lambda request: []
        self.hello: Answer = lambda request: [honest_hello(request)]
        self.requests: list[dict[str, Any]] = []
        self.hellos = 0
        self.writer: asyncio.StreamWriter | None = None
        #: What the link has handed on.
        self.notices: list[Notice] = []

    def noted(self, notice: Notice) -> None:
        self.notices.append(notice)
        if isinstance(notice, RequestNotice) and notice.reason == "break":
            raise RuntimeError("the callback breaks")

    def say(self, method: str, params: Any, **more: Any) -> None:
        assert self.writer is not None
        self.writer.write(json.dumps({"jsonrpc": "2.0", "method": method, "params": params, **more}).encode() + b"\n")

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writer = writer
        while line := await reader.readline():
            if not line.strip():
                continue
            request = json.loads(line)
            self.requests.append(request)
            hello = request["method"] == "hello"
            self.hellos += hello
            for piece in (self.hello if hello else self.answer)(request):
                writer.write(piece)
        writer.close()


@pytest.fixture
async def guest() -> AsyncIterator[Guest]:
    with tempfile.TemporaryDirectory(prefix="ebb") as directory:
        made = Guest(Path(directory) / "guest.sock")
        server = await asyncio.start_unix_server(made.serve, str(made.path))
        yield made
        server.close()


@pytest.fixture
async def link(guest: Guest) -> AsyncIterator[GuestLink]:
    async def find() -> Path:
        return guest.path

    hellos: list[Hello] = []
    made = GuestLink("low-1", find, hellos.append, on_notice=guest.noted)
    task = asyncio.create_task(made.run())
    yield made
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def status(link: GuestLink, limit_s: float = 20.0) -> GuestStatus:
    await until(lambda: link.connected)
    return await link.call("status", {}, GuestStatus, limit_s)


def cpus(request: dict[str, Any]) -> list[bytes]:
    return [reply(request, {"online": [0, 1], "failed": []})]


async def test_rubbish_before_the_answer_is_passed_over(guest: Guest, link: GuestLink) -> None:
    rubbish = [b"\x00\xff not json\n", b"[]\n", b'{"id": 3}\n', b'{"jsonrpc": "2.0", "id": "1-old", "result": 1}\n']
    guest.hello = lambda request: [*rubbish, honest_hello(request)]
    guest.answer = lambda request: rubbish + cpus(request)
    await until(lambda: link.connected)
    assert (await link.call("cpus.set", {"online": [0, 1]}, CpusSet, 20.0)).online == [0, 1]


async def test_the_token_goes_through_the_channel(guest: Guest, link: GuestLink) -> None:
    await until(lambda: link.connected)
    assert len(guest.requests[0]["params"]["token"]) >= 32
    assert guest.requests[0]["params"]["vm"] == "low-1"


async def test_the_log_of_a_conversation_names_no_operation_that_began_it(guest: Guest) -> None:
    named: list[dict[str, Any]] = []

    async def find() -> Path:
        named.append(structlog.contextvars.get_contextvars())
        return guest.path

    made = GuestLink("low-1", find, lambda hello: None)
    with structlog.contextvars.bound_contextvars(trace_id="of the operation"):
        task = asyncio.create_task(made.run())
        await until(lambda: made.connected)
        assert structlog.contextvars.get_contextvars() == {"trace_id": "of the operation"}
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert named == [{}]


async def test_an_answer_with_another_nonce_is_no_hello(guest: Guest, link: GuestLink) -> None:
    def stale(request: dict[str, Any]) -> list[bytes]:
        changed = json.loads(honest_hello(request))
        changed["result"]["nonce"] = "of an earlier conversation"
        return [json.dumps(changed).encode() + b"\n"]

    guest.hello = stale
    await until(lambda: guest.hellos >= 2)
    assert not link.connected


@pytest.mark.parametrize(
    "result",
    [
        {"online": []},
        {"online": [-1]},
        {"online": "0-1"},
        {"online": list(range(5000))},
        {"failed": []},
        None,
    ],
)
async def test_an_answer_that_does_not_fit_its_schema_is_none(guest: Guest, link: GuestLink, result: Any) -> None:
    guest.answer = lambda request: [reply(request, result)]
    await until(lambda: link.connected)
    with pytest.raises(GuestUnreachable, match="CpusSet"):
        await link.call("cpus.set", {}, CpusSet, 20.0)


async def test_a_field_that_does_not_fit_is_named(guest: Guest, link: GuestLink) -> None:
    guest.answer = lambda request: [reply(request, {"online": [0], "failed": [{"cpu": 5000, "reason": ""}]})]
    await until(lambda: link.connected)
    with pytest.raises(GuestUnreachable, match=r"is no CpusSet: failed\.0\.cpu: Input should be less"):
        await link.call("cpus.set", {}, CpusSet, 20.0)


async def test_nan_in_a_guests_figures_is_refused(guest: Guest, link: GuestLink) -> None:
    def lie(request: dict[str, Any]) -> list[bytes]:
        memory = {"total_mib": 1e6, "available_mib": float("nan"), "reserve_mib": 1.0, "floor_mib": 0.0}
        body = {"boot_id": "b", "uptime_s": 1.0, "cpus": {"present": [0], "online": [0], "unpluggable": []}}
        return [reply(request, body | {"memory": memory | {"unpluggable_mib": float("inf")}})]

    guest.answer = lie
    with pytest.raises(GuestUnreachable):
        await status(link)


async def test_an_error_of_the_guest_is_passed_on_cut_short(guest: Guest, link: GuestLink) -> None:
    guest.answer = lambda request: [
        json.dumps({"id": request["id"], "error": {"code": -32000, "message": "no! " * 500}}).encode() + b"\n"
    ]
    with pytest.raises(GuestRefused) as caught:
        await status(link)
    assert len(str(caught.value)) <= 300
    assert caught.value.code == -32000


async def test_an_agent_that_has_answered_once_may_come_back_where_its_domain_has_a_channel(
    guest: Guest, link: GuestLink
) -> None:
    assert not link.may_come_back
    await until(lambda: link.connected)
    guest.answer = lambda request: [
        json.dumps({"id": request["id"], "error": {"code": -32002, "message": "hello first"}}).encode() + b"\n"
    ]
    with pytest.raises(GuestRefused):
        await link.call("status", {}, GuestStatus, 20.0)
    assert (link.connected, link.may_come_back) == (False, True)
    link.has_channel = False
    assert not link.may_come_back


async def test_a_guest_that_does_not_answer_is_asked_nothing_more_until_it_says_hello(
    guest: Guest, link: GuestLink
) -> None:
    with pytest.raises(GuestSilent, match=r"did not answer status in 0\.1 s"):
        await status(link, limit_s=0.1)
    before = len(guest.requests)
    with pytest.raises(GuestUnreachable, match="not connected"):
        await link.call("status", {}, GuestStatus, 5.0)
    assert len(guest.requests) == before
    await until(lambda: guest.hellos >= 2)


async def test_a_call_that_breaks_nothing_leaves_the_conversation_as_it_is(guest: Guest, link: GuestLink) -> None:
    await until(lambda: link.connected)
    with pytest.raises(GuestUnreachable, match=r"did not answer status in 0\.1 s"):
        await link.call("status", {}, GuestStatus, 0.1, breaks=False)
    guest.answer = cpus
    assert (await link.call("cpus.set", {"online": [0, 1]}, CpusSet, 20.0)).online == [0, 1]
    assert guest.hellos == 1


FLOODS: list[Callable[[], list[bytes]]] = [
    lambda: [b"x" * 70_000 + b"\n"],
    lambda: [b'{"jsonrpc": "2.0", "method": "pressure"}\n'] * 40,
    # As much in each of two seconds, where it is read in both.
    lambda: [b"[" + b"[]," * 12_000 + b"[]]\n"] * 5,
]
KINDS_OF_FLOOD = ["a line of 70 kB", "40 messages at once", "180 kB at once"]


@pytest.mark.parametrize("flood", FLOODS, ids=KINDS_OF_FLOOD)
async def test_a_guest_that_breaks_the_limits_starts_anew(
    guest: Guest, link: GuestLink, flood: Callable[[], list[bytes]]
) -> None:
    await until(lambda: link.connected)
    guest.answer = lambda request: flood()
    with pytest.raises(GuestUnreachable):
        await link.call("status", {}, GuestStatus, 20.0)
    guest.answer = cpus
    await until(lambda: guest.hellos >= 2 and link.connected)
    assert (await link.call("cpus.set", {}, CpusSet, 20.0)).online == [0, 1]


async def test_calls_in_flight_end_when_the_guest_hangs_up(guest: Guest, link: GuestLink) -> None:
    await until(lambda: link.connected)

    def hang_up(request: dict[str, Any]) -> list[bytes]:
        assert guest.writer is not None
        guest.writer.close()
        return []

    guest.answer = hang_up
    with pytest.raises(GuestSilent, match="broke off"):
        await link.call("status", {}, GuestStatus, 30.0)


async def test_a_guest_that_does_not_read_blocks_nobody(guest: Guest, link: GuestLink) -> None:
    await until(lambda: link.connected)
    assert guest.writer is not None
    guest.writer.transport.pause_reading()  # type: ignore[attr-defined]
    padding = {"x": "y" * 60_000}

    def calls() -> list[Awaitable[Any]]:
        return [link.call("status", padding, GuestStatus, 0.5) for _ in range(40)]

    async with asyncio.timeout(10):
        results = await asyncio.gather(*calls(), return_exceptions=True)
    assert all(isinstance(result, GuestUnreachable) for result in results)
    assert any("does not read" in str(result) for result in results)


MEMORY = {"total_mib": 900, "available_mib": 40, "reserve_mib": 48, "floor_mib": 908, "unpluggable_mib": 0}
PRESSURE = {"boot_id": "b", "memory": MEMORY, "pressure": None, "major_faults": 7}


async def test_notifications_of_the_guest_are_handed_on(guest: Guest, link: GuestLink) -> None:
    await until(lambda: link.connected)
    guest.say("pressure", PRESSURE)
    guest.say("request", {"memory_mib": 64, "cpu_cores": 0, "reason": "a batch job starts"})
    await until(lambda: len(guest.notices) == 2)
    assert guest.notices == [
        PressureNotice.model_validate(PRESSURE),
        RequestNotice(memory_mib=64, reason="a batch job starts"),
    ]
    assert link.dropped == 0


async def test_what_is_no_notification_is_dropped_and_counted(guest: Guest, link: GuestLink) -> None:
    await until(lambda: link.connected)
    guest.say("reboot", {})
    guest.say("pressure", PRESSURE | {"major_faults": -1})
    guest.say("pressure", None)
    guest.say("request", {"memory_mib": 1, "reason": "x" * 300})
    guest.say("request", {"memory_mib": 1}, id="a request to the host")
    guest.say("request", {"memory_mib": 2})
    await until(lambda: bool(guest.notices))
    assert [getattr(notice, "memory_mib", None) for notice in guest.notices] == [2]
    assert link.dropped == 5
    assert link.connected


async def test_no_time_is_spent_on_the_texts_of_what_nobody_asked_for(
    guest: Guest, link: GuestLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    await until(lambda: link.connected)
    texts: list[Any] = []

    def noted(said: Any) -> Any:
        texts.append(said)
        return said

    monkeypatch.setattr(guest_link, "cleaned", noted)
    guest.say("reboot", [["\x1b"]])
    guest.say("status", [["\x1b"]], id="no call of ours")
    guest.say("request", {"memory_mib": 2})
    await until(lambda: bool(guest.notices))
    assert (link.dropped, texts) == (2, [{"memory_mib": 2}])


async def test_a_notification_before_hello_belongs_to_an_earlier_conversation(guest: Guest, link: GuestLink) -> None:
    early = json.dumps({"jsonrpc": "2.0", "method": "request", "params": {"memory_mib": 1}}).encode() + b"\n"
    guest.hello = lambda request: [early, honest_hello(request)]
    await until(lambda: link.connected)
    guest.say("request", {"memory_mib": 2})
    await until(lambda: bool(guest.notices))
    assert [getattr(notice, "memory_mib", None) for notice in guest.notices] == [2]


async def test_notifications_count_for_the_limit_of_messages(guest: Guest, link: GuestLink) -> None:
    await until(lambda: link.connected)
    for _ in range(40):
        guest.say("request", {"memory_mib": 1})
    await until(lambda: guest.hellos >= 2 and link.connected)
    assert len(guest.notices) == 20


async def test_a_notification_that_breaks_its_receiver_does_no_harm(guest: Guest, link: GuestLink) -> None:
    await until(lambda: link.connected)
    guest.say("request", {"memory_mib": 1, "reason": "break"})
    guest.say("request", {"memory_mib": 2})
    await until(lambda: len(guest.notices) == 2)
    guest.answer = cpus
    assert (await link.call("cpus.set", {}, CpusSet, 20.0)).online == [0, 1]


async def test_a_notification_between_a_question_and_its_answer_goes_its_own_way(guest: Guest, link: GuestLink) -> None:
    notice = json.dumps({"jsonrpc": "2.0", "method": "request", "params": {"memory_mib": 3}}).encode() + b"\n"
    guest.answer = lambda request: [notice, *cpus(request)]
    await until(lambda: link.connected)
    assert (await link.call("cpus.set", {}, CpusSet, 20.0)).online == [0, 1]
    assert guest.notices == [RequestNotice(memory_mib=3)]


#: A lone surrogate, an escape sequence that clears a terminal, a change of the direction of writing.
FOUL = "no \\ud800 \\u001b[2J \\u202e way"


async def test_what_a_guest_says_can_be_stored_sent_and_shown(guest: Guest, link: GuestLink) -> None:
    await until(lambda: link.connected)
    assert guest.writer is not None
    guest.writer.write(
        b'{"jsonrpc": "2.0", "method": "request", "params": {"memory_mib": 1, "reason": "%s"}}\n' % FOUL.encode()
    )
    await until(lambda: bool(guest.notices))
    (notice,) = guest.notices
    assert isinstance(notice, RequestNotice)
    assert notice.reason.isprintable()
    notice.model_dump_json()
    guest.answer = lambda request: [
        b'{"id": "%s", "error": {"code": 1, "message": ["%s"]}}\n' % (request["id"].encode(), FOUL.encode())
    ]
    with pytest.raises(GuestRefused) as refused:
        await link.call("status", {}, GuestStatus, 20.0)
    assert str(refused.value).encode().decode().isprintable()


async def test_a_long_story_is_cut_and_the_promise_kept(guest: Guest, link: GuestLink) -> None:
    guest.answer = lambda request: [
        reply(request, {"online": [0], "failed": [{"cpu": 1, "reason": "long " * 5000}]}),
    ]
    await until(lambda: link.connected)
    answer = await link.call("cpus.set", {}, CpusSet, 20.0)
    assert len(answer.failed[0].reason) == MAX_TEXT


async def test_a_line_nested_beyond_all_measure_is_no_message(guest: Guest, link: GuestLink) -> None:
    guest.answer = lambda request: [b'{"id":' + b"[" * 30_000 + b"]" * 30_000 + b"}\n", *cpus(request)]
    await until(lambda: link.connected)
    assert (await link.call("cpus.set", {}, CpusSet, 20.0)).online == [0, 1]


async def test_a_notification_of_another_boot_than_the_hellos_counts_for_nothing_and_begins_anew(
    guest: Guest, link: GuestLink
) -> None:
    await until(lambda: link.connected)
    guest.say("pressure", PRESSURE | {"boot_id": "another"})
    guest.say("pressure", PRESSURE)
    await until(lambda: guest.hellos >= 2 and link.connected)
    assert guest.notices == []
    assert link.dropped == 2
    guest.say("pressure", PRESSURE)
    await until(lambda: bool(guest.notices))
    assert guest.notices == [PressureNotice.model_validate(PRESSURE)]


async def test_a_status_of_another_boot_than_the_hellos_is_none_and_begins_anew(guest: Guest, link: GuestLink) -> None:
    body = {"boot_id": "another", "uptime_s": 1, "memory": MEMORY}
    guest.answer = lambda request: [reply(request, body | {"cpus": {"present": [0], "online": [0], "unpluggable": []}})]
    with pytest.raises(GuestUnreachable, match="speaks for another boot than at its hello"):
        await status(link)
    assert link.online is None
    await until(lambda: guest.hellos >= 2 and link.connected)


@pytest.mark.parametrize("flood", FLOODS, ids=KINDS_OF_FLOOD)
async def test_a_guest_that_breaks_the_limits_after_each_hello_is_greeted_ever_more_rarely(
    guest: Guest, link: GuestLink, flood: Callable[[], list[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guest_link, "RETRY_S", 0.01)
    link.retry.pause_s = 0.01
    guest.hello = lambda request: [honest_hello(request), *flood()]
    await until(lambda: guest.hellos >= 5)
    assert link.retry.pause_s >= 0.16


async def test_a_guest_that_wants_a_hello_right_after_each_is_greeted_ever_more_rarely(
    guest: Guest, link: GuestLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guest_link, "RETRY_S", 0.01)
    link.retry.pause_s = 0.01
    error = {"code": guest_link.HELLO_FIRST, "message": "hello first"}
    guest.answer = lambda request: [json.dumps({"id": request["id"], "error": error}).encode() + b"\n"]
    for hellos in range(1, 5):
        await until(lambda hellos=hellos: guest.hellos >= hellos)  # type: ignore[misc]
        with pytest.raises(GuestRefused):
            await status(link)
    assert link.retry.pause_s >= 0.08


async def test_a_guest_that_refuses_hello_in_ever_other_words_is_greeted_ever_more_rarely(
    guest: Guest, link: GuestLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guest_link, "RETRY_S", 0.01)
    link.retry.pause_s = 0.01

    def refusal(request: dict[str, Any]) -> list[bytes]:
        error = {"code": -32000, "message": f"word {guest.hellos}"}
        return [json.dumps({"id": request["id"], "error": error}).encode() + b"\n"]

    guest.hello = refusal
    await until(lambda: guest.hellos >= 5)
    assert link.retry.pause_s >= 0.08


async def test_an_agent_that_is_started_again_after_a_while_is_greeted_as_soon_as_ever(
    guest: Guest, link: GuestLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guest_link, "EARLY_S", 0.0)
    pause_s = link.retry.pause_s
    error = {"code": guest_link.HELLO_FIRST, "message": "hello first"}
    guest.answer = lambda request: [json.dumps({"id": request["id"], "error": error}).encode() + b"\n"]
    with pytest.raises(GuestRefused):
        await status(link)
    await until(lambda: guest.hellos >= 2)
    assert link.retry.pause_s == pause_s


def test_the_pause_between_conversations_doubles_up_to_a_limit_until_one_has_lasted() -> None:
    pace = RetryPace()
    pauses = [pace.ended(1.0, broken=True) for _ in range(10)]
    assert pauses == [min(guest_link.RETRY_S * 2**n, LONGEST_RETRY_S) for n in range(10)]
    assert pace.ended(1.0, broken=False) == LONGEST_RETRY_S, "one that ends otherwise is no sign of better ways"
    assert pace.ended(LONGEST_RETRY_S, broken=True) == guest_link.RETRY_S
    assert pace.ended(0.0, broken=False) == 2 * guest_link.RETRY_S


def test_a_guest_that_is_silent_or_hangs_up_is_greeted_as_soon_as_ever() -> None:
    pace = RetryPace()
    assert [pace.ended(lasted_s, broken=False) for lasted_s in (0.0, 5.0, 0.0)] == [guest_link.RETRY_S] * 3


# --- why there is no conversation -------------------------------------------------------------------------------------


def refused_hello(request: dict[str, Any]) -> list[bytes]:
    error = {"code": -32001, "message": "this agent speaks protocol 2, not 1"}
    return [json.dumps({"id": request["id"], "error": error}).encode() + b"\n"]


async def test_why_a_guest_agent_is_not_connected_is_kept_and_logged_once(
    guest: Guest, link: GuestLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hostagent.vm.guest_link.RETRY_S", 0.01)
    guest.hello = refused_hello
    with structlog.testing.capture_logs() as logged:
        await until(lambda: guest.hellos >= 3)
        why = "it refused hello: this agent speaks protocol 2, not 1"
        assert link.silence == f"the guest agent is not connected: {why}"
        guest.hello = lambda request: [honest_hello(request)]
        await until(lambda: link.connected)
    assert [line["why"] for line in logged if line["event"] == "the guest agent is not connected"] == [why]
    assert link.why == ""


@pytest.mark.parametrize(
    ("hello", "why"),
    [
        (lambda request: [], "no hello within 0.2 s"),
        (lambda request: [b"x" * 70_000 + b"\n"], "it sent a line of more than 64 KiB"),
        (
            lambda request: [honest_hello({**request, "params": {"nonce": "of an earlier conversation"}})],
            "it answered hello with another nonce or protocol",
        ),
    ],
)
async def test_each_reason_for_no_hello_is_told(
    guest: Guest, link: GuestLink, monkeypatch: pytest.MonkeyPatch, hello: Answer, why: str
) -> None:
    monkeypatch.setattr("hostagent.vm.guest_link.HELLO_LIMIT_S", 0.2)
    monkeypatch.setattr("hostagent.vm.guest_link.RETRY_S", 0.01)
    guest.hello = hello
    await until(lambda: link.why == why)


async def test_a_channel_that_cannot_be_opened_or_is_not_there_is_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hostagent.vm.guest_link.RETRY_S", 0.01)
    paths: list[Path | None] = [tmp_path / "none.sock"]

    async def find() -> Path | None:
        return paths[0]

    link = GuestLink("low-1", find, lambda hello: None)
    task = asyncio.create_task(link.run())
    await until(lambda: link.why == "its channel cannot be opened: No such file or directory")
    paths[0] = None
    await until(lambda: link.why == "its domain has no channel for one")
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_conversation_that_breaks_says_what_broke_it(guest: Guest, link: GuestLink) -> None:
    with pytest.raises(GuestUnreachable):
        await status(link, limit_s=0.1)
    assert link.why == "it did not answer status in 0.1 s"
    await until(lambda: link.connected)
    assert link.why == ""
    assert guest.writer is not None
    guest.writer.close()
    await until(lambda: link.why == "it closed its end of the channel")
