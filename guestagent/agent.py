"""The agent: one loop that owns the port, a short-lived thread for every request that may take time."""

from __future__ import annotations

import contextlib
import functools
import os
import select
import threading
import time
from collections import deque
from dataclasses import asdict
from typing import Any, Callable, TypeVar

from guestagent import __version__
from guestagent.applications import Applications
from guestagent.channel import Channel, PortNotFound, poll_events
from guestagent.cold.pages import ColdPages
from guestagent.cpus import Cpus
from guestagent.errors import BadParams, GuestFailure, HelloFirst, RpcError, UnknownMethod, WrongProtocol
from guestagent.hooks import REASON_LENGTH, Tokens
from guestagent.memory import Memory
from guestagent.messages import (
    PROTOCOL,
    ColdReclaimParams,
    CpusSetParams,
    DeflateParams,
    HelloParams,
    HelloResult,
    PreemptionParams,
    ReinflateParams,
    StatusResult,
    WithdrawalParams,
)
from guestagent.notices import Notices, PressureTrigger, memory_state
from guestagent.people import tell_people
from guestagent.preemption import Preemption
from guestagent.rpc import (
    InvalidRequest,
    Params,
    Request,
    amount_param,
    answer_line,
    choice_param,
    error_line,
    flag_param,
    parse_request,
    sentence_param,
    text_param,
    vector_param,
)
from guestagent.telling import Supervision, log
from guestagent.tracing import carried

CAPABILITIES = ("cpu", "memory", "application")
REQUESTS_AT_ONCE = 8
CPU_NUMBER_LIMIT = 4096
PORT_RETRY_S = 1.0
# A question may wait for its answer to change: for so long at most, looked at so often meanwhile.
LONGEST_WAIT_S = 5.0
MEMORY_LOOK_S = 0.05
APPLICATION_LOOK_S = 0.2
# The host's end is closed: reads end at once and poll() reports it for ever, so look again only now and then.
HOST_GONE_S = 0.25

Method = Callable[[Params], Any]
T = TypeVar("T")


class Agent:
    """Serves the host over the port that `find` names, until `stop()`.

    `trigger` wakes the loop when tasks wait for memory; the agent closes it. Local requests for more are taken from
    root and the group `request_group_id` (-1: root's). `reload` is called in the loop after `ask_to_reload()`.
    """

    def __init__(
        self,
        find: Callable[[], str],
        cpus: Cpus,
        memory: Memory,
        adapters_dir: str,
        run_dir: str,
        procfs: str = "/proc",
        owner_uid: int = 0,
        trigger: PressureTrigger | None = None,
        request_group_id: int = -1,
        preempt_dir: str = "/etc/ebbtide/preempt.d",
        tell_people: Callable[[str], None] = tell_people,
        cold: ColdPages | None = None,
        supervision: Supervision | None = None,
        reload: Callable[[], None] = lambda: None,
    ) -> None:
        self._supervision = supervision or Supervision({})
        self._reload = reload
        self._reloads = False
        self._find = find
        self._cpus = cpus
        self._memory = memory
        self._cold = cold or ColdPages(memory)
        self._run_dir = run_dir
        self._procfs = procfs
        self._tokens = Tokens(run_dir, log)
        self._applications = Applications(
            adapters_dir, memory, cpus.possible, lambda: self._tokens.token, log, owner_uid, self._tokens.copy_for
        )
        self._notices = Notices(self._say, log, memory, self._boot_id, trigger, request_group_id, self._told_locally)
        self._preemption = Preemption(preempt_dir, run_dir, log, owner_uid, self._applications.preemption, tell_people)
        self._vm = ""
        self._methods: dict[str, Method] = {
            "status": self._status,
            "cpus.set": self._cpus_set,
            "cold.stop": lambda _: self._cold.stop(),
            "application.capabilities": lambda _: self._applications.capabilities(),
            "application.deflate": self._deflate,
            "application.status": self._application_status,
            "application.reinflate": self._reinflate,
            "preemption": self._preempted,
            "preemption.withdrawn": self._withdrawn,
        }
        self._conversation = 0  # counts hellos; answers of an earlier one are dropped
        self._greeted = False
        self._refusal = ""  # why the last hello was refused
        self._answers: deque[tuple[int, bytes]] = deque()
        self._running = threading.BoundedSemaphore(REQUESTS_AT_ONCE)
        self._stopping = False
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)

    def stop(self) -> None:
        """End the loop; safe in signal handlers and threads."""
        self._stopping = True
        self._wake()

    def ask_to_reload(self) -> None:
        """Have the loop read the options again; safe in signal handlers and threads."""
        self._reloads = True
        self._wake()

    def run(self) -> None:
        """Serve until `stop()`. A port that is missing or goes away is waited for."""
        self._notices.listen(self._run_dir)
        self._supervision.ready(self._sentence())
        try:
            self._serve_ports()
        finally:
            self._supervision.stopping()
            self._applications.close()
            self._notices.stop_listening()

    def _turn(self) -> None:
        """Once a turn of the loop."""
        self._supervision.alive(self._sentence())
        self._notices.listen(self._run_dir)
        if self._reloads:
            self._reloads = False
            self._reload()

    def _sentence(self) -> str:
        """For `systemctl status`."""
        return f"VM {self._vm}, its host is connected" if self._greeted else "its host has not said hello"

    def _serve_ports(self) -> None:
        complaint = ""
        while not self._stopping:
            self._turn()
            try:
                channel = Channel(self._find())
            except (OSError, PortNotFound) as error:
                if str(error) != complaint:
                    complaint = str(error)
                    log("waiting for the port: " + complaint)
                self._pause(PORT_RETRY_S)
                continue
            complaint = ""
            log("port open")
            try:
                self._serve(channel)
            except OSError as error:
                self._greeted = False
                log(f"port lost: {error}", "warning")
                self._pause(PORT_RETRY_S)
            finally:
                channel.close()

    def close(self) -> None:
        """Give the descriptors back, after `run()`."""
        self._notices.close()
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _serve(self, channel: Channel) -> None:
        self._greeted = False
        poller = select.poll()
        poller.register(self._wake_read, select.POLLIN)
        self._notices.register(poller)
        while not self._stopping:
            self._turn()
            poller.register(channel.fileno(), poll_events(channel))
            waits_s = [limit_s for limit_s in (channel.wait_s(), self._supervision.period_s) if limit_s]
            events = dict(poller.poll(min(waits_s) * 1000 + 1 if waits_s else None))
            self._drain_wake()
            self._notices.handle(poller, events)
            if events.get(channel.fileno(), 0) & ~select.POLLOUT:
                lines = channel.lines()
                if lines is None:
                    self._greeted = False
                    channel.forget()
                    if channel.is_socket:
                        self._pause(HOST_GONE_S)
                        return
                    self._pause(HOST_GONE_S)
                for line in lines or ():
                    self._take(channel, line)
            while self._answers:
                conversation, answer = self._answers.popleft()
                if conversation == self._conversation:
                    self._send(channel, answer)
            channel.flush()

    def _take(self, channel: Channel, line: bytes | None) -> None:
        try:
            request = parse_request(line)
        except InvalidRequest as invalid:
            self._send(channel, error_line(invalid.id, invalid.error))
            return
        if request.notification:
            return
        try:
            if request.method == "hello":
                result = self._hello(request.params)
                channel.forget()
                self._send(channel, answer_line(request.id, asdict(result)))
                return
            if request.method == "cold.reclaim":
                # Here, in the order of the lines: what calls it off later counts also before its thread runs.
                method: Method | None = functools.partial(self._cold_reclaim, self._cold.stops)
            else:
                method = self._methods.get(request.method)
            if method is None:
                raise UnknownMethod(f"no method {request.method:.100}")
            if not self._greeted:
                raise HelloFirst()
            if not self._running.acquire(blocking=False):
                raise GuestFailure(f"{REQUESTS_AT_ONCE} requests are under way; ask again")
        except RpcError as error:
            if request.method == "hello":
                self._refused(str(error))
            self._send(channel, error_line(request.id, error))
            return
        worker = threading.Thread(
            target=self._work, args=(self._conversation, request, method), name=request.method, daemon=True
        )
        try:
            worker.start()
        except RuntimeError:  # the guest has no room for a thread: it is asked again, and this agent lives
            self._running.release()
            self._send(channel, error_line(request.id, GuestFailure("no thread can be started; ask again")))

    def _work(self, conversation: int, request: Request, method: Method) -> None:
        try:
            try:
                result = asdict(carried(method, request.trace)(request.params))
                answer = answer_line(request.id, result, request.trace)
            except RpcError as error:
                answer = error_line(request.id, error)
            except Exception as error:  # the host gets an answer whatever happens
                log(f"{request.method}: {type(error).__name__}: {error}")
                answer = error_line(request.id, GuestFailure(f"{type(error).__name__}: {error}"))
            self._answers.append((conversation, answer))
        finally:
            self._running.release()
            self._wake()

    def _send(self, channel: Channel, line: bytes) -> None:
        if not channel.queue(line):
            log("the host does not read; an answer was dropped")

    def _say(self, line: bytes) -> bool:
        """Send a notification if the host is there; any thread."""
        if not self._greeted:
            return False
        self._answers.append((self._conversation, line))
        self._wake()
        return True

    def _refused(self, why: str) -> None:
        """Tell the guest's people once: the host says hello again and again."""
        if why != self._refusal:
            self._refusal = why
            log(f"hello of the host is refused: {why:.300}", "warning")

    def _hello(self, params: Params) -> HelloResult:
        protocol = params.get("protocol")
        if isinstance(protocol, bool) or not isinstance(protocol, int):
            raise BadParams("protocol", "must be an integer")
        if protocol != PROTOCOL:
            raise WrongProtocol(f"this agent speaks protocol {PROTOCOL}, not {protocol}")
        hello = HelloParams(
            protocol, text_param(params, "nonce"), text_param(params, "vm"), text_param(params, "token", 1024)
        )
        boot_id = self._boot_id()
        self._tokens.take(hello.token)
        self._vm = hello.vm
        self._conversation += 1
        self._cold.ask_to_stop()  # nobody waits for it any more
        self._greeted = True
        self._refusal = ""
        log(f"hello for VM {hello.vm}")
        return HelloResult(PROTOCOL, hello.nonce, __version__, boot_id, list(CAPABILITIES))

    def _status(self, params: Params) -> StatusResult:
        brief, wait_s = flag_param(params, "brief"), _wait_s(params)
        state = self._memory_once_at(amount_param(params, "until_total_mib"), wait_s) if wait_s > 0 else None
        return StatusResult(
            boot_id=self._boot_id(),
            uptime_s=self._uptime_s(),
            cpus=self._cpus.status(brief),
            applications=[] if brief else self._applications.sizes(),
            cold_blocked=self._cold.blocked(),
            notice=self._preemption.request_id(),
            **(state or memory_state(self._memory)),
        )

    def _memory_once_at(self, total_mib: float, wait_s: float) -> dict[str, Any] | None:
        """`memory_state` with no more in all than so much; None: it does not come to that in time.

        What is told has to be there itself: while the kernel takes a block of memory away, the whole of it counts again
        for a moment.
        """

        def look() -> dict[str, Any] | None:
            found = memory_state(self._memory) if self._memory.total_mib() <= total_mib else None
            return found if found is not None and found["memory"].total_mib <= total_mib else None

        return waited(look, lambda found: found is not None, wait_s, MEMORY_LOOK_S)

    def _application_status(self, params: Params) -> Any:
        request_id, wait_s = text_param(params, "request_id"), _wait_s(params)
        enough_mib = amount_param(params, "until_released_mib") if wait_s > 0 else 0.0
        return waited(
            lambda: self._applications.status(request_id),
            lambda found: found.state != "running" or found.released.get("memory_mib", 0.0) >= enough_mib,
            wait_s,
            APPLICATION_LOOK_S,
        )

    def _cpus_set(self, params: Params) -> Any:
        online = params.get("online")
        if not isinstance(online, list) or not all(
            isinstance(cpu, int) and not isinstance(cpu, bool) for cpu in online
        ):
            raise BadParams("online", "must be a list of CPU numbers")
        if len(online) > CPU_NUMBER_LIMIT or len(set(online)) != len(online):
            raise BadParams("online", "must name every CPU once")
        return self._cpus.set_online(CpusSetParams(online).online)

    def _cold_reclaim(self, stops: int, params: Params) -> Any:
        amounts = (amount_param(params, field) for field in ("memory_mib", "deadline_s"))
        return self._cold.reclaim(ColdReclaimParams(*amounts), stops)

    def _deflate(self, params: Params) -> Any:
        target = vector_param(params, "target")
        return self._applications.deflate(
            DeflateParams(
                request_id=text_param(params, "request_id"),
                deadline_s=amount_param(params, "deadline_s"),
                mode=choice_param(params, "mode", ("ask", "force")),
                target=target,
                bound_mib=_bound_mib(params, target),
                full_cores=_full_cores(params),
            )
        )

    def _reinflate(self, params: Params) -> Any:
        target = vector_param(params, "target")
        return self._applications.reinflate(
            ReinflateParams(
                request_id=text_param(params, "request_id"),
                deadline_s=amount_param(params, "deadline_s"),
                target=target,
                bound_mib=_bound_mib(params, target),
                full_cores=_full_cores(params),
                full=flag_param(params, "full"),
            )
        )

    def _preempted(self, params: Params) -> Any:
        return self._preemption.tell(
            PreemptionParams(
                request_id=text_param(params, "request_id"),
                seconds_left=amount_param(params, "seconds_left"),
                kind=choice_param(params, "kind", ("stop", "suspend", "delete")),
                reason=text_param(params, "reason"),
            )
        )

    def _withdrawn(self, params: Params) -> Any:
        return self._preemption.withdraw(
            WithdrawalParams(text_param(params, "request_id"), sentence_param(params, "reason", REASON_LENGTH))
        )

    def _told_locally(self) -> dict[str, Any]:
        """The VM as this agent knows it, for `ebb-guestagent status`. Raises: GuestFailure."""
        memory = self._memory.status()
        return {
            "vm": self._vm,
            "host_connected": self._greeted,
            "uptime_s": self._uptime_s(),
            "cpus_online": self._cpus.online(),
            "memory_mib": round(memory.total_mib, 1),
            "available_mib": round(memory.available_mib, 1),
            "preemption": self._preemption.current(),
        }

    def _boot_id(self) -> str:
        return self._proc_text("sys/kernel/random/boot_id")

    def _uptime_s(self) -> float:
        return float(self._proc_text("uptime").split()[0])

    def _proc_text(self, name: str) -> str:
        try:
            with open(os.path.join(self._procfs, name)) as file:
                return file.read().strip()
        except OSError as error:
            raise GuestFailure(f"cannot read {name} of the guest: {error.strerror}") from None

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # full: the loop will wake anyhow; closed: it has ended
            os.write(self._wake_write, b"w")

    def _drain_wake(self) -> None:
        try:
            while os.read(self._wake_read, 512):
                pass
        except BlockingIOError:
            pass

    def _pause(self, seconds: float) -> None:
        """Wait; only `stop()` ends it early."""
        end = time.monotonic() + seconds
        while not self._stopping:
            left_s = end - time.monotonic()
            if left_s <= 0:
                return
            select.select([self._wake_read], [], [], left_s)
            self._drain_wake()


def waited(look: Callable[[], T], enough: Callable[[T], bool], wait_s: float, look_s: float) -> T:
    """What is found when it is enough, or after `wait_s` at the most; looked for every `look_s`."""
    end = time.monotonic() + wait_s
    while True:
        found = look()
        left_s = end - time.monotonic()
        if enough(found) or left_s <= 0:
            return found
        time.sleep(min(look_s, left_s))


def _wait_s(params: Params) -> float:
    """For how long the host has its question wait for its answer to change; seconds."""
    return min(amount_param(params, "wait_s"), LONGEST_WAIT_S) if "wait_s" in params else 0.0


def _full_cores(params: Params) -> float:
    """An earlier host does not say."""
    return amount_param(params, "full_cores") if "full_cores" in params else 0.0


def _bound_mib(params: Params, target: dict[str, float]) -> float:
    return amount_param(params, "bound_mib") if "memory_mib" in target else 0.0
