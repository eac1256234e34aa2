"""Notice of a preemption inside the guest: a file for programs that poll, and drop-in programs with a deadline."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import stat
import threading
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Callable, Sequence

from guestagent.messages import PreemptionParams, PreemptionResult, WithdrawalParams, WithdrawalResult
from guestagent.notices import make_run_dir, replace
from guestagent.rpc import parse_json
from guestagent.tracing import carried

if TYPE_CHECKING:
    import subprocess

FILE_NAME = "preemption.json"
#: So many programs are run.
PROGRAMS = 16
#: Between two looks whether programs have ended, in seconds.
LOOK_S = 0.1
#: At the deadline all processes are looked through so often at the most: some start others meanwhile.
KILL_ROUNDS = 10
#: The kind that programs and applications are told when a notice is over, and how long programs then have, in seconds.
WITHDRAWN = "withdrawn"
WITHDRAWN_S = 30.0
#: Becomes the program in its arguments, which the kernel is to kill no later than others: it inherits the agent's -900.
#: What it writes is for others, too, whatever the agent's mask.
START = ("/bin/sh", "-c", 'umask 022; echo 0 >/proc/self/oom_score_adj; exec "$0" "$@"')
#: What becomes of the VM, for people.
SAID = {"stop": "it powers off", "suspend": "it is suspended", "delete": "it is deleted"}


@dataclass(frozen=True)
class _Program:
    """A program that was started for a notice, with the time of its start: another process may get its number. `child`
    is None where an earlier life of this agent started it.
    """

    path: str
    pid: int
    start: int | None
    child: subprocess.Popen[bytes] | None = None

    def has_ended(self) -> bool:
        """A child is not reaped by this, so that no other process, or group of them, gets its number."""
        if self.child is None:
            return self.start is None or _start_of(self.pid) != self.start
        try:
            return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:
            return True

    def end(self) -> str:
        """Kill what is left, with all that it has started; returns what became of it. Of an earlier life's program that
        has ended nothing is killed: the number of its group may be another's.
        """
        late = not self.has_ended()
        if late or self.child is not None:
            _kill_session(self.pid)
        if self.child is None:
            return "was killed at the deadline" if late else "ended"
        self.child.wait()
        return "was killed at the deadline" if late else f"ended with {self.child.returncode}"


def read_programs(directory: str, owner_uid: int = 0) -> tuple[list[str], list[str]]:
    """Usable programs by name, and a sentence for each file that is left out.

    Directory and files must be the owner's, and nobody else may write them; a link is none.
    """
    try:
        info = os.stat(directory)
        names = sorted(name for name in os.listdir(directory) if not name.startswith("."))
    except OSError:
        return [], []
    if info.st_uid != owner_uid or info.st_mode & 0o022:
        return [], [f"{directory}: must belong to root and be writable by nobody else"]
    found: list[str] = []
    problems: list[str] = []
    for name in names:
        path = os.path.join(directory, name)
        try:
            info = os.lstat(path)
        except OSError as error:
            problems.append(f"{path}: {error.strerror}")
            continue
        if not stat.S_ISREG(info.st_mode) or not info.st_mode & 0o100:
            problems.append(f"{path}: is no executable file")
        elif info.st_uid != owner_uid or info.st_mode & 0o022:
            problems.append(f"{path}: must belong to root and be writable by nobody else")
        elif len(found) == PROGRAMS:
            problems.append(f"{path}: {PROGRAMS} programs are the most")
        else:
            found.append(path)
    return found, problems


class Preemption:
    """Takes the host's notices, and their end; `log` is given a sentence for what is left out and what became of it.

    `tell_applications` is given the body for the hooks, for how many seconds they may be told, and whether they are
    still to be; `tell_people` a sentence for those who are logged in. Both are called in threads.
    """

    def __init__(
        self,
        directory: str,
        run_dir: str,
        log: Callable[[str], None],
        owner_uid: int = 0,
        tell_applications: Callable[[dict[str, Any], float, Callable[[], bool]], None] = lambda *_: None,
        tell_people: Callable[[str], None] = lambda sentence: None,
    ) -> None:
        self._directory = directory
        self._run_dir = run_dir
        self._log = log
        self._owner_uid = owner_uid
        self._tell_applications = tell_applications
        self._tell_people = tell_people
        self._lock = threading.Lock()
        self._request_id = ""
        self._until = 0.0  # of this notice, by the monotonic clock
        self._programs = 0
        self._running: list[_Program] = []
        self._spread_last: dict[str, Any] = {}
        self._unwritten: dict[str, Any] | None = None  # this notice, where the file cannot have it

    def tell(self, params: PreemptionParams) -> PreemptionResult:
        """Take a notice; the same one again only tells how far the programs are.

        Its programs run also where it cannot be written down.
        """
        with self._lock:
            if params.request_id != self._request_id:
                # An agent that was started again has run programs of this one already, and may have ended on the way.
                written = self._written() or {}
                is_known = written.get("request_id") == params.request_id
                programs = _programs_of(written) if is_known else []
                is_spread = is_known and written.get("spread") is not False
                self._write(params, programs, is_spread)
                if is_spread:
                    self._follow(programs, params.seconds_left)
                else:
                    note = partial(self._write, params)
                    self._start(params.kind, params.seconds_left, params.reason, programs, note)
                    self._spread(params.request_id, params.kind, params.seconds_left, params.reason)
                    self._write(params, self._running, True)
                self._request_id = params.request_id
                self._log(f"this VM is preempted ({params.reason}): {params.kind} in {params.seconds_left:g} s")
            self._until = time.monotonic() + params.seconds_left
            self._running = [program for program in self._running if not program.has_ended()]
            return PreemptionResult(self._programs, len(self._running))

    def withdraw(self, params: WithdrawalParams) -> WithdrawalResult:
        """The VM stays, or is back: the file goes, and whoever was told is told. Another notice is left alone."""
        with self._lock:
            written = self._written()
            if written is None or written.get("request_id") != params.request_id:
                return WithdrawalResult(False)
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(self._run_dir, FILE_NAME))
            self._unwritten = None
            self._request_id, self._until = "", 0.0
            self._start(WITHDRAWN, WITHDRAWN_S, params.reason)
            self._spread(params.request_id, WITHDRAWN, None, params.reason)
        self._log(f"the preemption of this VM is over: {params.reason}")
        return WithdrawalResult(True)

    def current(self) -> dict[str, Any] | None:
        """The notice that runs, with the seconds that are left now; None: there is none."""
        with self._lock:
            written = self._written()
            if written is None:
                return None
            until = written.get("until")
            # An agent that was started again has nothing but the guest's clock to go by.
            left_s = self._until - time.monotonic() if self._request_id else float(until or 0.0) - time.time()
            named = {name: str(written.get(name, "")) for name in ("request_id", "kind", "reason")}
            return {**named, "seconds_left": round(max(left_s, 0.0), 1)}

    def request_id(self) -> str:
        """Of the notice that this guest has, which its host may know nothing of; empty: it has none.

        Without the lock: programs that are being started keep nobody from asking.
        """
        return str((self._written() or {}).get("request_id", ""))

    def _written(self) -> dict[str, Any] | None:
        if self._unwritten is not None:
            return self._unwritten
        try:
            with open(os.path.join(self._run_dir, FILE_NAME), "rb") as file:
                found = parse_json(file.read(65536))
        except Exception:  # none, or none of ours
            return None
        return found if isinstance(found, dict) else None

    def _write(self, params: PreemptionParams, programs: Sequence[_Program], is_spread: bool = False) -> None:
        told: dict[str, Any] = {
            "request_id": params.request_id,
            "kind": params.kind,
            "reason": params.reason,
            "seconds_left": params.seconds_left,
            "until": round(time.time() + params.seconds_left, 3),
            "programs": [[program.path, program.pid, program.start] for program in programs],
            "spread": is_spread,
        }
        try:
            make_run_dir(self._run_dir)
            replace(os.path.join(self._run_dir, FILE_NAME), json.dumps(told), 0o644)
            self._unwritten = None
        except OSError as error:
            # An agent that is started again will not know of it, nor of its programs.
            if self._unwritten is None:
                self._log(f"the notice of preemption cannot be written for programs that poll: {error}")
            self._unwritten = told

    def _spread(self, request_id: str, kind: str, seconds_left: float | None, reason: str) -> None:
        """Tell applications and people, each in a thread: none holds up the answer to the host."""
        body = {"request_id": request_id, "seconds_left": seconds_left, "kind": kind, "reason": reason}
        sentence = f"This machine is not preempted any more ({reason})."
        if seconds_left is not None:
            sentence = f"This machine is preempted: {SAID.get(kind, kind)} in {seconds_left:.0f} s ({reason})."
        self._spread_last = body
        for_s = WITHDRAWN_S if seconds_left is None else seconds_left
        tell_hooks = partial(self._tell_applications, body, for_s, lambda: self._spread_last is body)
        for name, tell in (("hooks", tell_hooks), ("wall", partial(self._tell_people, sentence))):
            self._in_thread(carried(tell), f"preemption-{name}")

    def _start(
        self,
        kind: str,
        seconds: float,
        reason: str,
        before: Sequence[_Program] = (),
        note: Callable[[list[_Program]], None] = lambda programs: None,
    ) -> None:
        """Start all programs but those that were before; `note` is told of each, with all that run."""
        import subprocess  # seldom needed

        paths, problems = read_programs(self._directory, self._owner_uid)
        for problem in problems:
            self._log(problem)
        started = list(before)
        for path in paths:
            if any(program.path == path for program in before):
                continue
            try:
                program = subprocess.Popen(
                    [*START, path, kind, f"{seconds:g}", reason],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    cwd="/",
                    env={"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"},
                    start_new_session=True,
                )
            except OSError as error:
                self._log(f"{path}: could not be started: {error.strerror}")
                continue
            started.append(_Program(path, program.pid, _start_of(program.pid), program))
            note(started)
        self._follow(started, seconds)

    def _follow(self, programs: list[_Program], seconds: float) -> None:
        self._programs, self._running = len(programs), programs
        if programs:
            until = time.monotonic() + seconds
            self._in_thread(partial(self._watch, list(programs), until), "preemption-programs")

    def _in_thread(self, work: Callable[[], None], name: str) -> None:
        """The rest of a notice is carried out where the guest has no room for one."""
        try:
            threading.Thread(target=work, name=name, daemon=True).start()
        except RuntimeError as error:
            self._log(f"{name}: {error}")

    def _watch(self, programs: list[_Program], until: float) -> None:
        """End what runs at the deadline, with all that it has started."""
        while time.monotonic() < until:
            with self._lock:
                if all(program.has_ended() for program in programs):
                    break
            time.sleep(LOOK_S)
        for program in programs:
            self._log(f"{program.path!r} {program.end()}")


def _programs_of(written: dict[str, Any]) -> list[_Program]:
    """Those that an earlier life of this agent has started for a notice."""
    try:
        rows = [(str(path), int(pid), start) for path, pid, start in written.get("programs", [])]
    except (TypeError, ValueError):  # none of ours
        return []
    return [_Program(path, pid, start if isinstance(start, int) else None) for path, pid, start in rows]


def _start_of(pid: int) -> int | None:
    """When a process began, in ticks since boot; None: it has ended."""
    return _field(pid, 19)


def _field(pid: int, number: int) -> int | None:
    """A field after a process's name in /proc/PID/stat (proc(5)); None: it has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return int(fields[number]) if fields[0] not in (b"Z", b"X") else None


def _kill_session(session: int) -> None:
    """Kill all processes of a session: `timeout` and job control put some into groups of their own."""
    for _ in range(KILL_ROUNDS):
        found = False
        for name in os.listdir("/proc"):
            if name.isdigit() and _field(int(name), 3) == session:
                found = True
                with contextlib.suppress(OSError):
                    os.kill(int(name), signal.SIGKILL)
        if not found:
            return
