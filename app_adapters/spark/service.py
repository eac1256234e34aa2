"""The service beside the Spark master: it collects what is asked of the cluster's VMs and decides once for all of them.

Relays of the workers' VMs (worker.py) talk to it with a token of the cluster. It does nothing by itself that a restart
could lose: slots are given up by the VM's own adapter, when it has accepted.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections import deque
from http import HTTPStatus
from typing import Any, Callable
from urllib.parse import unquote

from app_adapters import __version__
from app_adapters.errors import ApplicationError, BadBody
from app_adapters.hook import Reply, TokenFile
from app_adapters.processes.forks import released_in_children
from app_adapters.server import STOP_LOOK_S, JsonServer
from app_adapters.spark.curves import LINEAR, Curves
from app_adapters.spark.policy import SELF, VM_LEVEL, Decision, Deflation, Job, decide
from app_adapters.spark.rest import Cluster, SparkRest
from app_adapters.spark.window import WINDOW_S, Decide, Instruction, Read, Windows

CONNECTIONS = 512  # each VM that waits for a decision holds one
DECISIONS_KEPT = 100
LONGEST_WAIT_S = 30.0
#: So long an answer that came too late holds for a VM that asks the same again.
ANSWER_AGE_S = 60.0
ALIKE = 0.05
DEFLATIONS = "/spark/v1/deflations"
SIZES = "/spark/v1/sizes"
DECISIONS = "/spark/v1/decisions"
HOSTS = "/spark/v1/hosts/"


class SparkService:
    """Serves relays in threads of its own. `port` 0 takes a free one; `address` tells which. Raises: OSError."""

    def __init__(
        self,
        rest: SparkRest,
        token_file: str,
        host: str = "127.0.0.1",
        port: int = 7079,
        window_s: float = WINDOW_S,
        curves: Curves = LINEAR,
    ) -> None:
        self._rest = rest
        self._token = TokenFile(token_file)
        self._curves = curves
        self._windows = Windows(window_s)
        self._changed = threading.Condition()
        self._readings: dict[int, tuple[list[Job], str]] = {}
        self._decided: dict[int, Decision] = {}
        self._answers: dict[str, tuple[Deflation, Decision, float]] = {}  # by host, until they were delivered
        self._decisions: deque[dict[str, Any]] = deque(maxlen=DECISIONS_KEPT)
        self._server = JsonServer((host, port), self, CONNECTIONS)
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(STOP_LOOK_S,), name="spark-service", daemon=True
        )

    @property
    def address(self) -> tuple[str, int]:
        """Host and port that are listened on."""
        return self._server.server_address[0], self._server.server_address[1]  # type: ignore[return-value]

    def start(self) -> SparkService:
        """Begin to serve; returns itself."""
        released_in_children(self._server)
        self._thread.start()
        return self

    def stop(self) -> None:
        """Stop serving and give the port back."""
        self._server.shutdown()
        self._server.server_close()

    def reply(self, method: str, path: str, authorization: str, body: bytes) -> Reply:
        """Status and body for a request of a relay."""
        if path == "/healthz" and method == "GET":
            return HTTPStatus.OK, {"status": "ok", "version": __version__}
        if not self._token.matches(authorization):
            return HTTPStatus.UNAUTHORIZED, {"error": "Authorization: needs the token of this cluster as Bearer"}
        answers: dict[str, Callable[[dict[str, Any]], Reply]] = {
            DEFLATIONS: self._deflation,
            SIZES: self._size,
        }
        try:
            if method == "POST" and path in answers:
                return answers[path](_object(body))
            if method == "GET" and path == DECISIONS:
                with self._changed:
                    return HTTPStatus.OK, {"decisions": list(self._decisions)}
            if method == "GET" and path.startswith(HOSTS):
                return self._host(unquote(path[len(HOSTS) :]))
        except BadBody as error:
            return HTTPStatus.BAD_REQUEST, {"error": str(error)}
        except ApplicationError as error:
            return HTTPStatus.SERVICE_UNAVAILABLE, {"error": str(error)}
        return HTTPStatus.NOT_FOUND, {"error": f"there is no {method} {path}"}

    def _deflation(self, body: dict[str, Any]) -> Reply:
        """Wait for the decision, at most `wait_s`: one that comes later is kept for the next attempt."""
        host, wanted = _name(body), _deflation(body)
        end = time.monotonic() + min(_number(body, "wait_s"), LONGEST_WAIT_S)
        with self._changed:
            kept = self._answers.pop(host, None)
            if kept is not None and _alike(kept[0], wanted) and time.monotonic() - kept[2] < ANSWER_AGE_S:
                return _told(kept[1])
            number, instructions = self._windows.asked(host, wanted, time.monotonic())
            self._follow(instructions)
            decided = self._changed.wait_for(lambda: number in self._decided, max(end - time.monotonic(), 0.0))
            if decided:
                self._answers.pop(host, None)
                return _told(self._decided[number])
        return HTTPStatus.SERVICE_UNAVAILABLE, {
            "error": "the cluster has not decided in time: the other VMs are waited for"
        }

    def _size(self, body: dict[str, Any]) -> Reply:
        with self._changed:
            self._windows.set_deflation(_name(body), _deflation(body))
        return HTTPStatus.OK, {}

    def _host(self, host: str) -> Reply:
        cluster = self._rest.cluster()
        workers = [{"id": w.id, "state": w.state, "cores": w.cores} for w in cluster.workers if w.host == host]
        return HTTPStatus.OK, {"workers": workers, "applications": len(cluster.applications)}

    def _follow(self, instructions: list[Instruction]) -> None:
        """Carry out; the lock is held."""
        for instruction in instructions:
            if isinstance(instruction, Read):
                threading.Thread(target=self._read, args=(instruction.window,), name="spark-read", daemon=True).start()
                threading.Thread(
                    target=self._close, args=(instruction.window,), name="spark-close", daemon=True
                ).start()
            else:
                self._decide(instruction)

    def _read(self, window: int) -> None:
        """What the cluster does, while the VMs are collected: the decision then needs no time of its own."""
        cluster, jobs, problem = Cluster((), ()), [], ""
        try:
            cluster = self._rest.cluster()
            jobs = self._rest.jobs(cluster)
        except ApplicationError as error:
            problem = str(error)
        except Exception as error:  # whatever Spark answers, the window must be decided
            problem = f"{type(error).__name__}: {error}"
        with self._changed:
            self._readings[window] = jobs, problem
            hosts = {host: float(cores) for host, cores in cluster.hosts().items()}
            self._follow(self._windows.known(window, hosts, time.monotonic()) if cluster.workers else [])

    def _close(self, window: int) -> None:
        with self._changed:
            while window not in self._decided:
                closes_s = self._windows.closes_s()
                if closes_s is None:
                    return
                now_s = time.monotonic()
                if now_s >= closes_s:
                    self._follow(self._windows.passed(now_s))
                else:
                    self._changed.wait(closes_s - now_s)

    def _decide(self, order: Decide) -> None:
        jobs, problem = self._readings.pop(order.window, ([], "Spark's REST API did not answer in time"))
        if problem:
            decision = Decision(VM_LEVEL, math.nan, math.nan, f"VM-level deflation, to be safe: {problem}")
        else:
            decision = decide(order.vector, jobs, self._curves)
        now_s = time.monotonic()
        for host in order.asking:
            wanted = order.vector[host]
            if decision.choice == VM_LEVEL:  # what gives slots up instead tells its size when it has
                before = self._windows.deflated.get(host)
                # Slots that went earlier are still gone.
                own = before.own if before is not None else 0.0
                self._windows.set_deflation(host, Deflation(wanted.vm, own, wanted.cores))
            self._answers[host] = wanted, decision, now_s
        self._decided = {**{n: d for n, d in self._decided.items() if n > order.window - 8}, order.window: decision}
        self._readings = {n: r for n, r in self._readings.items() if n > order.window - 8}
        vector = {host: {"vm": one.vm, "self": one.own} for host, one in order.vector.items()}
        self._decisions.append({"asking": list(order.asking), "vector": vector, **_told(decision)[1]})
        self._changed.notify_all()


def _alike(one: Deflation, other: Deflation) -> bool:
    """The same request once more: what its memory is a share of may have moved since."""
    return abs(one.vm - other.vm) < ALIKE and abs(one.own - other.own) < ALIKE


def _told(decision: Decision) -> Reply:
    times = {"vm_time": decision.vm_time, "self_time": decision.self_time}
    return HTTPStatus.OK, {
        "choice": SELF if decision.choice == SELF else VM_LEVEL,
        "reason": decision.reason,
        **{name: round(value, 4) if math.isfinite(value) else None for name, value in times.items()},
    }


def _object(text: bytes) -> dict[str, Any]:
    try:
        body = json.loads(text.decode("utf-8"))
    except (ValueError, RecursionError):
        body = None
    if not isinstance(body, dict):
        raise BadBody("body", "must be a JSON object")
    return body


def _name(body: dict[str, Any]) -> str:
    host = body.get("host")
    if not isinstance(host, str) or not 0 < len(host) <= 256 or not host.isprintable():
        raise BadBody("host", "must be a string of 1 to 256 printable characters")
    return host


def _deflation(body: dict[str, Any]) -> Deflation:
    vm, own, cores = _number(body, "vm"), _number(body, "self"), _number(body, "cores")
    for field, value in (("vm", vm), ("self", own)):
        if value > 1:
            raise BadBody(field, "must be at most 1")
    return Deflation(vm, own, cores)


def _number(body: dict[str, Any], field: str) -> float:
    value = body.get(field)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1e9:
        raise BadBody(field, "must be a finite number >= 0")
    return float(value)
