"""Weights of the load balancer (Sharma et al. 2019, Table 1): less before a shrink, more after a growth.

The weight is the full one times the share of cores (of memory, where an application gives no cores) that it has.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import shlex
import socket
from abc import ABC, abstractmethod
from urllib.parse import urlsplit

from app_adapters.adapter import Adapter, Answer, Capabilities, Deadline, Promise, Refusal, Release
from app_adapters.errors import ApplicationError
from app_adapters.processes.owned_files import put_back, read_text, write_atomically
from app_adapters.processes.programs import CALL_LIMIT_S, run

FULL_WEIGHT = 100
_LOOPBACK = re.compile(r"localhost|::1|127(?:\.[0-9]{1,3}){3}")
# What would end or extend the directive of nginx that it is put into.
_NAME = re.compile(r"[A-Za-z0-9_.:/\[\]-]{1,255}")


class Balancer(ABC):
    """What shares requests out. `name` is what it calls this application."""

    def __init__(self, name: str) -> None:
        self.name = name

    @abstractmethod
    def tell(self, weight: int) -> None:
        """Make the weight hold. Raises: ApplicationError, and then the old weight holds as far as can be known."""


class WeightCommand(Balancer):
    """Runs a command, without a shell; `{name}` and `{weight}` in its words are replaced."""

    def __init__(self, name: str, command: list[str]) -> None:
        super().__init__(name)
        self._command = command

    def tell(self, weight: int) -> None:
        words = [word.replace("{name}", self.name).replace("{weight}", str(weight)) for word in self._command]
        run(words)


class WeightFile(Balancer):
    """Writes a file: JSON, or one line of an nginx upstream; then runs a command, if there is one, that has it read."""

    def __init__(self, name: str, path: str, as_nginx: bool, reload: list[str]) -> None:
        super().__init__(name)
        self._path = path
        self._as_nginx = as_nginx
        self._reload = reload

    def tell(self, weight: int) -> None:
        if self._as_nginx:
            text = f"server {self.name} weight={weight};\n"
        else:
            text = json.dumps({"name": self.name, "weight": weight}) + "\n"
        before = read_text(self._path)
        write_atomically(self._path, text)
        if not self._reload:
            return
        try:
            run(self._reload)
        except ApplicationError:
            # Or the next reload, whatever for, would bring a weight that is out of date.
            put_back(self._path, before)
            raise


class WeightUrl(Balancer):
    """POSTs `{"name", "weight"}` to a URL on loopback; any 2xx is good."""

    def __init__(self, name: str, url: str) -> None:
        super().__init__(name)
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "", parts.port or 80
        self._path = (parts.path or "/") + ("?" + parts.query if parts.query else "")

    def tell(self, weight: int) -> None:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=CALL_LIMIT_S)
        try:
            body = json.dumps({"name": self.name, "weight": weight})
            connection.request("POST", self._path, body, {"Content-Type": "application/json"})
            status = connection.getresponse().status
        except (OSError, http.client.HTTPException) as error:
            raise ApplicationError(f"the balancer at {self._host}:{self._port} cannot be told: {error}") from None
        finally:
            connection.close()
        if not 200 <= status < 300:
            raise ApplicationError(f"the balancer at {self._host}:{self._port} answered {status}")


class Balanced(Adapter):
    """Another adapter, whose size the balancer is told.

    A deflation that is to be asked for is refused where the weight cannot be lowered; one by force goes on and says so.
    """

    def __init__(self, inner: Adapter, balancer: Balancer, full_weight: int = FULL_WEIGHT) -> None:
        self._inner = inner
        self._balancer = balancer
        self._full_weight = full_weight
        self.components = inner.components

    def capabilities(self) -> Capabilities:
        return self._inner.capabilities()

    def status(self) -> dict[str, float]:
        return self._inner.status()

    def deflate(self, target: dict[str, float], mode: str, deadline: Deadline) -> Answer:
        """As the other adapter decides; what it promises is taken off the weight at once."""
        answer = self._inner.deflate(target, mode, deadline)
        if isinstance(answer, Refusal):
            return answer
        promise = answer
        note, told = "", None
        try:
            weight = self._weight(promise.promised)
            self._balancer.tell(weight)
            told = weight
        except ApplicationError as error:
            if mode != "force":
                self._settle()  # what failed may have come through all the same: the size is that of before
                return Refusal(f"the weight of {self._balancer.name} could not be lowered: {error}")
            note = f"the weight could not be lowered, which force leaves aside: {error}"

        def work() -> Release:
            try:
                release = promise.work()
            except ApplicationError:
                self._settle(told)
                raise
            return _with_notes(release, [note, self._settle(told)])

        return Promise(promise.promised, promise.expected_s, work, "; ".join(filter(None, [promise.reason, note])))

    def reinflate(self, target: dict[str, float], deadline: Deadline) -> Answer:
        """As the other adapter decides; the weight is raised to what was reached."""
        answer = self._inner.reinflate(target, deadline)
        if isinstance(answer, Refusal):
            return answer
        promise = answer

        def work() -> Release:
            return _with_notes(promise.work(), [self._settle()])

        return Promise(promise.promised, promise.expected_s, work, promise.reason)

    def _settle(self, told: int | None = None) -> str:
        """Tell the weight of what it has now, if it is another: more or less may have come about than was promised."""
        try:
            weight = self._weight({})
            if weight != told:
                self._balancer.tell(weight)
        except ApplicationError as error:
            return f"the balancer could not be told the weight that was reached: {error}"
        return f"weight {weight} of {self._full_weight}"

    def _weight(self, less: dict[str, float]) -> int:
        ranges = self._inner.capabilities().resources
        name = "cpu_cores" if "cpu_cores" in ranges else sorted(ranges)[0]
        return weight_for(ranges[name].current - less.get(name, 0.0), ranges[name].maximum, self._full_weight)


def weight_for(size: float, largest: float, full_weight: int) -> int:
    """The share of the full weight that a size deserves, at least 1: weight 0 means many things to many balancers."""
    share = size / largest if 0 < size < largest else float(size > 0 or largest <= 0)
    return max(int(full_weight * share + 0.5), 1)


def _with_notes(release: Release, notes: list[str]) -> Release:
    reason = "; ".join(filter(None, [release.reason, *notes]))
    return Release(release.released, release.measured_by, reason, release.complete)


def balancer_options(parser: argparse.ArgumentParser) -> None:
    """Options of the hook; without one of the first three there is no balancer."""
    group = parser.add_argument_group("load balancer, which is told the weight before a shrink and after a growth")
    way = group.add_mutually_exclusive_group()
    way.add_argument("--weight-file", metavar="FILE", help="write the weight into this file")
    way.add_argument("--weight-command", metavar="COMMAND", help="run it (no shell); {name} and {weight} are replaced")
    way.add_argument("--weight-url", metavar="URL", help='POST {"name", "weight"} to this URL on loopback')
    group.add_argument("--weight-name", metavar="NAME", help="what the balancer calls it (default: the host's name)")
    group.add_argument(
        "--weight", type=_whole_weight, default=FULL_WEIGHT, metavar="N", help="at full size (default: %(default)s)"
    )
    group.add_argument(
        "--weight-format",
        choices=("json", "nginx"),
        default="json",
        help="of the file; nginx: a server line to include in an upstream (default: %(default)s)",
    )
    group.add_argument("--weight-reload", metavar="COMMAND", help="run after the file was written (no shell)")


def balanced(adapter: Adapter, options: argparse.Namespace) -> Adapter:
    """The adapter, with the balancer of the options if they name one.

    Raises: ApplicationError which names the option.
    """
    name = options.weight_name or socket.gethostname()
    if not _NAME.fullmatch(name):
        raise ApplicationError(f"--weight-name: {name} has characters that no balancer takes as a name")
    if options.weight_reload is not None and not options.weight_file:
        raise ApplicationError("--weight-reload: goes with --weight-file only")
    balancer: Balancer
    if options.weight_file:
        reload = _words("--weight-reload", options.weight_reload) if options.weight_reload is not None else []
        if not os.path.isdir(os.path.dirname(os.path.abspath(options.weight_file))):
            raise ApplicationError(f"--weight-file: {options.weight_file} is in no directory")
        balancer = WeightFile(name, options.weight_file, options.weight_format == "nginx", reload)
    elif options.weight_command:
        balancer = WeightCommand(name, _words("--weight-command", options.weight_command))
    elif options.weight_url:
        _check_url(options.weight_url)
        balancer = WeightUrl(name, options.weight_url)
    else:
        return adapter
    return Balanced(adapter, balancer, options.weight)


def _words(option: str, text: str) -> list[str]:
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ApplicationError(f"{option}: {error}") from None
    if not words:
        raise ApplicationError(f"{option}: is empty")
    return words


def _check_url(url: str) -> None:
    try:
        parts = urlsplit(url)
        usable = parts.scheme == "http" and bool(_LOOPBACK.fullmatch(parts.hostname or "")) and parts.port != 0
    except ValueError:
        usable = False
    if not usable:
        raise ApplicationError(f"--weight-url: {url} is not http:// on loopback")


def _whole_weight(text: str) -> int:
    if not (text.isascii() and text.isdigit()) or not 0 < int(text) <= 65535:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number from 1 to 65535")
    return int(text)
