"""The applications' REST hooks on Unix sockets, or on loopback by choice: drop-in files, the client, and the token."""

from __future__ import annotations

import json
import os
import re
import stat
import threading
import time
from dataclasses import dataclass
from typing import Any, Callable, Dict, Tuple, TypeVar

from guestagent.errors import DropInError, HookError, HookTimeout, ParseError
from guestagent.messages import AdapterCapabilities, SizeRange
from guestagent.notices import make_run_dir, replace
from guestagent.rpc import COMPONENTS, cleaned, is_amount, parse_json
from guestagent.tracing import carried, here

MODES = ("ask", "force")
BODY_BYTES = 65536
CALLS_PER_HOOK = 4
#: Longest time of one call, in seconds; its callers wait less.
CALL_LIMIT_S = 8.0
REASON_LENGTH = 500
VERSION_LENGTH = 100
#: Larger amounts are no amounts: a petabyte, in MiB. Sums of them stay finite.
AMOUNT_LIMIT = 1e9
#: The host takes no answer with more than these: a day, and cores of all applications together.
SECONDS_LIMIT, CORES_LIMIT = 86_400.0, 4096.0
#: So many adapters are asked: the host takes no answer that tells of more.
DROP_INS = 64
TOKEN_FILE = "token"
TOKEN_COPIES = "tokens"
_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
_UNIX = re.compile(r"unix:(/[\x21-\x7e]{1,99})")
_URL = re.compile(r"http://(localhost|127(?:\.[0-9]{1,3}){3}|\[::1\]):([0-9]{1,5})/?")

Answer = Tuple[int, Dict[str, Any]]
T = TypeVar("T")


@dataclass(frozen=True)
class DropIn:
    """A registered adapter."""

    name: str
    #: Of a hook on loopback: any process of the guest that holds its port gets the token.
    host: str = ""
    port: int = 0
    #: Of a hook on a Unix socket, and who must listen there.
    path: str = ""
    uid: int = 0
    #: Whom the file names, that is not root: who has a copy of the token.
    user: str = ""


def read_drop_in(path: str, owner_uid: int = 0) -> DropIn:
    """One drop-in file `{"name", "url", "user"}`; it must be the owner's, and no other user may write it.

    Raises: DropInError.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise DropInError(f"{path}: {error.strerror}") from None
    with os.fdopen(fd, "rb") as file:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            raise DropInError(f"{path}: is no regular file")
        if info.st_uid != owner_uid or info.st_mode & 0o022:
            raise DropInError(f"{path}: must belong to root and be writable by no other user")
        try:
            body = parse_json(file.read(BODY_BYTES))
        except ParseError as error:
            raise DropInError(f"{path}: {error}") from None
    if not isinstance(body, dict):
        raise DropInError(f"{path}: must hold an object")
    name, url = body.get("name"), body.get("url")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise DropInError(f"{path}: name: must match {_NAME.pattern}")
    user = body.get("user")
    uid = owner_uid if user is None else _uid(path, user)
    socket_path = _UNIX.fullmatch(url) if isinstance(url, str) else None
    if socket_path is not None and "/../" not in socket_path.group(1):
        return DropIn(name, path=socket_path.group(1), uid=uid, user=user or "")
    match = _URL.fullmatch(url) if isinstance(url, str) else None
    if match is None or not 0 < int(match.group(2)) < 65536:
        raise DropInError(f"{path}: url: must be unix:/PATH, or http://HOST:PORT with a loopback host")
    return DropIn(name, match.group(1).strip("[]"), int(match.group(2)), uid=uid if user else 0, user=user or "")


def _uid(path: str, user: Any) -> int:
    """The id of a user whose name can be that of a file. Raises: DropInError."""
    import pwd

    try:
        uid = pwd.getpwnam(user).pw_uid
    except (KeyError, TypeError, ValueError):
        raise DropInError(f"{path}: user: there is no such user") from None
    if "/" in user or user.startswith("."):
        raise DropInError(f"{path}: user: cannot be the name of a file")
    return uid


def read_drop_ins(directory: str, owner_uid: int = 0) -> tuple[dict[str, DropIn], dict[str, str]]:
    """Usable drop-ins, and a sentence for each file that was left out or for the directory; both by path."""
    found: dict[str, DropIn] = {}
    problems: dict[str, str] = {}
    try:
        info = os.stat(directory)
        names = sorted(name for name in os.listdir(directory) if name.endswith(".json"))
    except FileNotFoundError:
        return {}, {}
    except OSError as error:
        return {}, {directory: f"{directory}: {error.strerror}"}
    if info.st_uid != owner_uid or info.st_mode & 0o022:
        return {}, {directory: f"{directory}: must belong to root and be writable by no other user"}
    for path in [os.path.join(directory, name) for name in names]:
        try:
            drop_in = read_drop_in(path, owner_uid)
        except DropInError as error:
            problems[path] = str(error)
            continue
        if any(other.name == drop_in.name for other in found.values()):
            problems[path] = f"{path}: name: {drop_in.name} is taken by another file"
        elif len(found) == DROP_INS:
            problems[path] = f"{path}: {DROP_INS} adapters are the most"
        else:
            found[path] = drop_in
    return found, problems


class Tokens:
    """The VM's token in files of `run_dir`, which is root's: root's own, and a copy for each user that a hook runs as.

    `log` is given a sentence for a file that cannot be written; that is tried again before hooks are asked.
    """

    def __init__(self, run_dir: str, log: Callable[[str], None]) -> None:
        self._run_dir = run_dir
        self._log = log
        self._lock = threading.Lock()
        self._copied: dict[str, tuple[int, str]] = {}
        self._complaints: dict[str, str] = {}
        #: What the host gave last, empty before its first hello.
        self._given = ""
        #: What hooks can read: as long as the file has an older one, that.
        self.token = ""

    def take(self, token: str) -> None:
        """Have this one from now on, in root's file."""
        with self._lock:
            self._given = token
            self._write()

    def _write(self) -> None:
        if self._given == self.token:
            return
        path, what = os.path.join(self._run_dir, TOKEN_FILE), "the token cannot be written"
        try:
            make_run_dir(self._run_dir)
            replace(path, self._given, 0o640)
        except OSError as error:
            self._complain(what, str(error))
            self.token = self.token or _held(path)
            return
        self.token = self._given
        self._complaints.pop(what, None)

    def copy_for(self, users: dict[str, int]) -> None:
        """Have the token in `tokens/USER` for each of these, by name with their ids, and for nobody else."""
        with self._lock:
            self._write()
            wanted = {user: (uid, self.token) for user, uid in users.items()}
            if not self.token or wanted == self._copied:
                return
            directory = os.path.join(self._run_dir, TOKEN_COPIES)
            what = "the token cannot be written for the users of hooks"
            try:
                make_run_dir(directory)
                for name in set(os.listdir(directory)) - set(wanted):
                    os.unlink(os.path.join(directory, name))
                for user, (uid, token) in wanted.items():
                    replace(os.path.join(directory, user), token, 0o400, uid)
            except OSError as error:
                self._complain(what, str(error))
                return
            self._copied = wanted
            self._complaints.pop(what, None)

    def _complain(self, what: str, why: str) -> None:
        if self._complaints.get(what) != why:
            self._complaints[what] = why
            self._log(f"{what}: {why}")


def _held(path: str) -> str:
    """The token that an earlier life of this agent has written; empty: none."""
    try:
        with open(path) as file:
            return file.read(BODY_BYTES)
    except (OSError, ValueError):
        return ""


@dataclass(frozen=True)
class Told:
    """A hook's answer to a target."""

    promised: bool
    amounts: dict[str, float]
    expected_s: float
    retry_after_s: float | None
    reason: str


class Hook:
    """Client of one hook. Answers are checked: an application may say anything."""

    def __init__(self, drop_in: DropIn, token: Callable[[], str]) -> None:
        self.drop_in = drop_in
        self.name = drop_in.name
        self._token = token
        self._calls = threading.BoundedSemaphore(CALLS_PER_HOOK)

    def capabilities(self) -> AdapterCapabilities:
        """What the application offers.

        Raises: HookError.
        """
        status, body = self._request("capabilities", "GET", "/deflation/v1/capabilities")
        resources = body.get("resources")
        if status != 200 or not isinstance(resources, dict):
            raise HookError(f"answered capabilities with {status} {_excerpt(body)}")
        ranges = {}
        for component in (name for name in resources if name in COMPONENTS):
            sizes = amounts(resources, component)
            if not all(key in sizes for key in ("current", "minimum", "maximum", "step")):
                raise HookError(f"capabilities: resources.{component}: needs current, minimum, maximum and step")
            ranges[str(component)] = SizeRange(sizes["current"], sizes["minimum"], sizes["maximum"], sizes["step"])
        modes = body.get("modes")
        return AdapterCapabilities(
            name=self.name,
            version=str(body.get("version", ""))[:VERSION_LENGTH],
            resources=ranges,
            expected_s=_seconds(body, "expected_s"),
            reversible=bool(body.get("reversible")),
            modes=[mode for mode in MODES if mode in modes] if isinstance(modes, list) else [],
        )

    def target(self, body: dict[str, Any]) -> Told:
        """Ask for a size.

        Raises: HookError.
        """
        status, answer = self._request("target", "POST", "/deflation/v1/targets", body)
        state = answer.get("state")
        if status == 409 and state == "conflict":
            # The hook has this request from before a restart of this agent; its progress is told as ever.
            return Told(True, {}, 0.0, None, "is at it already")
        if (status, state) not in ((202, "promised"), (409, "refused")):
            raise HookError(f"answered the target with {status} {_excerpt(answer)}")
        _require_id(answer, body["request_id"])
        return Told(
            promised=state == "promised",
            amounts=amounts(answer, "promised"),
            expected_s=_seconds(answer, "expected_s"),
            retry_after_s=_seconds(answer, "retry_after_s") or None,
            reason=str(answer.get("reason") or "")[:REASON_LENGTH],
        )

    def progress(self, request_id: str) -> Answer:
        """How far a request is: (200, status) or (404, {}).

        Raises: HookError.
        """
        from urllib.parse import quote

        status, answer = self._request("progress", "GET", "/deflation/v1/targets/" + quote(request_id, safe=""))
        if status == 404:
            return 404, {}
        if status != 200 or answer.get("state") not in ("running", "released", "failed"):
            raise HookError(f"answered its status with {status} {_excerpt(answer)}")
        _require_id(answer, request_id)
        return status, answer

    def preemption(self, body: dict[str, Any]) -> None:
        """Tell that the VM goes, or stays after all.

        Raises: HookError, also where the hook knows nothing of this.
        """
        status, answer = self._request("preemption", "POST", "/deflation/v1/preemptions", body)
        if status != 200:
            raise HookError(f"answered the notice of preemption with {status} {_excerpt(answer)}")

    def _request(self, name: str, method: str, path: str, body: dict[str, Any] | None = None) -> Answer:
        from guestagent.calls import Listener, call

        if not self._calls.acquire(blocking=False):
            raise HookTimeout(f"still busy with {CALLS_PER_HOOK} earlier calls")
        trace, status = here(), 0
        traced, ended = trace.begin(self.name, name) if trace is not None else ({}, None)
        try:
            headers = {"Authorization": "Bearer " + self._token(), "Content-Type": "application/json"}
            headers.update(traced)
            data = None if body is None else json.dumps(body, allow_nan=False).encode("ascii")
            at = self.drop_in
            address = Listener(at.path, at.uid) if at.path else (at.host, at.port)
            status, text = call(address, (method, path), headers, data, CALL_LIMIT_S, BODY_BYTES)
        finally:
            self._calls.release()
            if ended is not None:
                ended(status)
        try:
            answer = cleaned(parse_json(text))
        except (ParseError, RecursionError):
            answer = None
        if not isinstance(answer, dict):
            raise HookError(f"answered {status} without a JSON object")
        return status, answer


def amounts(body: dict[str, Any], field: str) -> dict[str, float]:
    """A vector of an answer, without what is not a finite amount."""
    value = body.get(field)
    if not isinstance(value, dict):
        return {}
    return {str(name): float(amount) for name, amount in value.items() if is_amount(amount) and amount <= AMOUNT_LIMIT}


def _require_id(answer: dict[str, Any], request_id: str) -> None:
    """Raises: HookError where the answer is to something else."""
    if answer.get("request_id") != request_id:
        raise HookError(f"answered for another request: {str(answer.get('request_id'))[:100]}")


def _seconds(body: dict[str, Any], field: str) -> float:
    value = body.get(field)
    return min(float(value), SECONDS_LIMIT) if value is not None and is_amount(value) else 0.0


def _excerpt(body: dict[str, Any]) -> str:
    return str(body.get("error") or body.get("reason") or body)[:200]


def in_parallel(calls: dict[str, Callable[[], T]], limit_s: float) -> dict[str, T | HookError]:
    """Results by name; a call that has not ended after `limit_s` seconds goes on alone and counts as a HookTimeout."""
    results: dict[str, T | HookError] = {}

    def run(name: str, call: Callable[[], T]) -> None:
        try:
            results[name] = call()
        except HookError as error:
            results[name] = error
        except Exception as error:  # a hook's odd answer must not leave its caller without a result
            results[name] = HookError(f"{type(error).__name__}: {error}")

    threads = [
        threading.Thread(target=carried(run), args=(name, call), name=f"hook-{name}", daemon=True)
        for name, call in calls.items()
    ]
    for thread in threads:
        thread.start()
    end = time.monotonic() + limit_s
    for thread in threads:
        thread.join(max(end - time.monotonic(), 0.0))
    done = dict(results)
    return {name: done.get(name, HookTimeout(f"no answer within {limit_s:.1f} s")) for name in calls}
