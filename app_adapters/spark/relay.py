"""Client of the cluster's service (service.py), for the adapter of a worker's VM."""

from __future__ import annotations

import http.client
import json
import time
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlsplit

from app_adapters.errors import ApplicationError
from app_adapters.spark.policy import SELF, Deflation

ANSWER_BYTES = 65536
TIMEOUT_S = 3.0


@dataclass(frozen=True)
class HostState:
    """A host as the master has it: cores of its Workers that take work; and the applications of the cluster."""

    cores: int
    applications: int


@dataclass(frozen=True)
class Relay:
    """Speaks for one host. `service` is http://HOST:PORT. Raises in all methods: ApplicationError."""

    service: str
    token_file: str
    host: str

    def ask(self, wanted: Deflation, wait_s: float) -> tuple[bool, str]:
        """Whether the cluster gives slots up by itself, and why. What it decides too late is told when asked again."""
        body = {"host": self.host, "vm": wanted.vm, "self": wanted.own, "cores": wanted.cores, "wait_s": wait_s}
        status, answer = self._send("POST", "/spark/v1/deflations", body, wait_s + 0.2)
        _expect(status, answer)
        return answer.get("choice") == SELF, str(answer.get("reason", ""))[:400]

    def tell(self, size: Deflation) -> None:
        """What the VM has lost now."""
        body = {"host": self.host, "vm": size.vm, "self": size.own, "cores": size.cores}
        _expect(*self._send("POST", "/spark/v1/sizes", body))

    def state(self) -> HostState:
        """What the master has of the host."""
        status, answer = self._send("GET", "/spark/v1/hosts/" + quote(self.host, safe=""))
        _expect(status, answer)
        try:
            cores = sum(int(worker["cores"]) for worker in answer["workers"] if worker["state"] == "ALIVE")
            return HostState(cores, int(answer["applications"]))
        except (KeyError, TypeError, ValueError):
            raise ApplicationError(f"the service at {self.service} answered with something else") from None

    def _send(
        self, method: str, path: str, body: dict[str, Any] | None = None, timeout_s: float = TIMEOUT_S
    ) -> tuple[int, dict[str, Any]]:
        try:
            with open(self.token_file, encoding="ascii") as file:
                token = file.read(4096).strip()
        except (OSError, ValueError) as error:
            raise ApplicationError(f"the cluster's token {self.token_file} cannot be read: {error}") from None
        address = urlsplit(self.service)
        connection = http.client.HTTPConnection(address.hostname or "", address.port or 80, timeout=timeout_s)
        end = time.monotonic() + timeout_s
        try:
            headers = {"Authorization": "Bearer " + token, "Content-Type": "application/json"}
            connection.request(method, path, None if body is None else json.dumps(body).encode("ascii"), headers)
            if connection.sock is not None:
                connection.sock.settimeout(max(end - time.monotonic(), 0.05))
            response = connection.getresponse()
            text = response.read(ANSWER_BYTES + 1)
            answer = json.loads(text.decode("utf-8"))
        except (OSError, http.client.HTTPException, ValueError, RecursionError) as error:
            raise ApplicationError(f"the service at {self.service} cannot be asked: {error}") from None
        finally:
            connection.close()
        if not isinstance(answer, dict):
            raise ApplicationError(f"the service at {self.service} answered without an object")
        return response.status, answer


def _expect(status: int, answer: dict[str, Any]) -> None:
    if status != 200:
        raise ApplicationError(f"the cluster's service answered with {status}: {str(answer.get('error'))[:300]}")
