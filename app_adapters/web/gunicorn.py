"""gunicorn: fewer or more workers, by its control socket (25.1 and later) or by signals.

Signals of one kind merge, and the master says nothing: one at a time, and the workers are counted after each. A removed
worker finishes its requests first. A reload (SIGHUP) goes back to the configured number.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import signal
import threading
import time
from typing import Callable, NamedTuple

from app_adapters.adapter import Deadline
from app_adapters.errors import ApplicationError
from app_adapters.processes.originals import Originals
from app_adapters.processes.process import arguments, children, environment, signals, started
from app_adapters.processes.process_memory import read_pid
from app_adapters.registry import Ready
from app_adapters.web.balancer import balanced, balancer_options
from app_adapters.web.gunicorn_control import GunicornControl, Stats, find_control
from app_adapters.web.pool_adapter import PoolAdapter, Processes
from app_adapters.web.pool_options import full_cores, pool_options, whole

LOOK_S = 0.05
# A signal that shows no effect by then was taken: the worker to go still finishes its requests.
SIGNAL_TAKEN_S = 2.0
CONTROL_LIMIT_S = 5.0
# A worker that was told to end is counted as a serving one again after this time.
ENDING_LIMIT_S = 120.0
STATE_DIR = "/run/ebbtide/gunicorn"
# In the state of a master: its workers at full size, and those that were told to end.
FULL, ENDING = "workers", "ending"


class _Told(NamedTuple):
    """A worker that a signal told to end: when it began, and when it was told, by the clock of this boot."""

    began: int
    at: float


class GunicornAdapter(PoolAdapter):
    """A gunicorn on this machine. `master` tells the process id of its master, which may change (SIGUSR2).

    `workers` is their number at full size, by default what gunicorn is configured for. `control` False leaves the
    control socket alone; a path names it, otherwise it is found. Where nothing tells the number at full size,
    `state_dir` remembers it while workers are missing: a new adapter sees fewer.
    """

    name = "gunicorn"

    def __init__(
        self,
        master: Callable[[], int],
        full_cores: float,
        minimum_workers: int = 1,
        workers: int | None = None,
        control: str | bool = True,
        state_dir: str = STATE_DIR,
    ) -> None:
        super().__init__(full_cores, minimum_workers)
        self._master = master
        self._workers = workers
        self._control_option = control
        self._originals = Originals(state_dir)
        self._identity = (0, 0)  # process id of the master, and when it began
        self._control: GunicornControl | None = None
        self._configured = 0
        self._most_seen = 0
        self._set: int | None = None  # what this adapter made of it
        self._sets = 0  # how often it did
        self._serving = 0
        # Workers before the first deflation that was not undone, 0: nothing is taken. None: not yet looked.
        self._taken: int | None = None
        self._note = ""  # for the next answer
        self._lock = threading.Lock()  # sizes are asked for while work runs
        # Those by which gunicorn's own number is less than the workers that live.
        self._ending: dict[int, _Told] = {}

    def _processes(self) -> Processes:
        sets = self._sets
        master = self._check_master()
        stats = self._stats(master)
        pids = _workers(master, stats)
        serving = _without(pids, self._ending)
        if stats is not None:
            serving = _youngest(pids, stats.target)
        self._serving = len(serving)
        self._most_seen = max(self._most_seen, len(serving))
        nominal = self._nominal()
        if self._taken is None:  # another adapter may have taken those that are missing
            self._taken = nominal if len(serving) < nominal else 0
        return Processes(master, pids, serving, nominal, self._reset_note(stats, serving, sets))

    def _most(self, nominal: int) -> int:
        """As before the first deflation: fewer than it is configured for where others have set that."""
        return min(self._taken or 0, nominal)

    def _is_right(self, wanted: int) -> bool:
        """Not before it is noted that all is given back."""
        return not self._taken or wanted < self._taken

    def _check_master(self) -> int:
        master = self._master()
        start = started(master)
        if start is None:
            raise ApplicationError(f"gunicorn: there is no process {master}")
        identity = (master, start)
        if not handles(master, signal.SIGTTIN, signal.SIGTTOU, signal.SIGHUP):
            raise ApplicationError(f"process {master} is no master of gunicorn: it does not handle SIGTTIN and SIGTTOU")
        with self._lock:
            if identity != self._identity:
                state = self._originals.load(master, start)
                if self._set is not None:
                    self._note = (
                        f"gunicorn is process {master} now, {self._identity[0]} had been set to {self._set} workers"
                    )
                self._identity, self._set, self._taken = identity, None, None
                self._ending = _read_ending(state.get(ENDING, ""))
                self._configured, self._most_seen = _configured_workers(master), _number(state.get(FULL, ""))
                self._control = None
                self._find_control(master)
        return master

    def _find_control(self, master: int) -> None:
        if isinstance(self._control_option, str):
            self._control = GunicornControl(self._control_option)
        elif self._control_option and self._control is None:
            self._control = find_control(master)

    def _stats(self, master: int) -> Stats | None:
        """What the master says of itself, None where it has no control socket or is forking just now."""
        if self._control is None:
            return None
        try:
            stats = self._control.stats()
            if stats.pid != master:  # that of a master which took over, and left
                return None
            self._configured = self._control.configured_workers() or self._configured
        except ApplicationError:
            return None
        return stats

    def _nominal(self) -> int:
        return self._workers or self._configured or max(self._most_seen, 1)

    def _reset_note(self, stats: Stats | None, serving: list[int], sets: int) -> str:
        """Whether the number is not the one that was set, as after a reload.

        :param sets: how often one had been set before this look.
        """
        if stats is None and self._control is not None:
            # It is forking just now, and says at the next look what it means by that.
            return self._note
        now = len(serving) if stats is None else stats.target
        with self._lock:
            # Without the control socket a worker that was restarted just now is missing, which is expected.
            if self._set is not None and (now > self._set if stats is None else now != self._set):
                self._note = (
                    f"gunicorn has {now} workers, {self._set} were set: it was reloaded (SIGHUP), or told by others"
                )
                self._set = None
                # By gunicorn's own word alone: without it, a worker that ends for long counts as a serving one again.
                if stats is not None and sets == self._sets and now >= (self._taken or 0):
                    self._taken = 0
            return self._note

    def _note_told(self) -> None:
        self._note = ""

    def _obstacle(self) -> str:
        master = self._identity[0]
        if self._control is None and any(word.startswith("--dirty-app") for word in arguments(master)):
            return "gunicorn runs dirty workers, which cannot be told from its others without its control socket"
        return ""

    def _resize(self, workers: int, deadline: Deadline) -> str:
        master = self._check_master()
        self._find_control(master)
        start, nominal = self._identity[1], self._nominal()
        only_seen = not (self._workers or self._configured)
        forgetful = ""
        if only_seen and workers < nominal:
            try:
                self._originals.remember(master, start, {FULL: str(nominal)})
            except ApplicationError as error:
                forgetful = f"{nominal} workers at full size, which a restart of this adapter forgets: {error}"
        with self._lock:  # from here on a look must not take the number of before for another's
            self._set = None
        if workers < self._serving:
            self._taken = max(self._taken or 0, min(self._serving, nominal))
        problem = self._have(master, workers, deadline)
        given_back = workers >= (self._taken or 0) and not problem
        if given_back:
            self._taken = 0
        if forgetful and not self._note:
            self._note = forgetful
        if only_seen and given_back:
            try:
                self._originals.replace(master, start, FULL, "")
            except ApplicationError as error:
                # A restart of this adapter takes what its owner removes until then for taken; the work is done.
                self._note = self._note or str(error)
        return problem

    def _have(self, master: int, workers: int, deadline: Deadline) -> str:
        self._keep_ending(self._ending)
        if self._control is None:
            self._step(master, workers, deadline)
        elif not self._command(master, workers, deadline):
            return "the deadline passed before gunicorn's control socket answered"
        with self._lock:
            self._set, self._sets = workers, self._sets + 1
        pids: list[int] = []
        changed = time.monotonic()
        while True:
            before, pids = pids, _workers(master, self._stats(master))
            told = len(pids) if self._control is not None else len(_without(pids, self._ending))
            if len(pids) == workers == told:
                return ""
            if pids != before:
                changed = time.monotonic()
            elif self._control is None and time.monotonic() - changed > SIGNAL_TAKEN_S and self._is_off(pids, workers):
                self._step(master, workers, deadline)  # a signal was lost
                changed = time.monotonic()
            if deadline.wait(LOOK_S):
                break
        if len(pids) > workers:
            return f"{len(pids) - workers} workers still finish their requests"
        return f"{workers - min(len(pids), told)} workers did not start by the deadline"

    def _is_off(self, pids: list[int], workers: int) -> bool:
        """Whether more serve than should, or fewer though none that ends holds a place."""
        return len(_without(pids, self._ending)) > workers or len(pids) < workers

    def _command(self, master: int, workers: int, deadline: Deadline) -> bool:
        """By the control socket; returns whether the number was asked for by the deadline.

        The old master of an upgrade takes the new one's socket away as it ends, for good: then signals do the rest.
        """
        assert self._control is not None
        began = time.monotonic()
        while not deadline.passed:
            try:
                stats = self._control.stats()
                if stats.pid != master:
                    raise ApplicationError(f"{self._control.path} belongs to process {stats.pid}, not to {master}")
                if stats.target == workers:
                    return True
                self._control.change(workers - stats.target)
            except ApplicationError:
                # It forks, or is busy. What was asked may have been done, so the next round looks first.
                if time.monotonic() - began > CONTROL_LIMIT_S:
                    if os.path.exists(self._control.path):
                        raise
                    self._control = None
                    self._step(master, workers, deadline)
                    return True
            deadline.wait(LOOK_S)
        return False

    def _step(self, master: int, workers: int, deadline: Deadline) -> None:
        """By signals, one at a time, each when the one before has shown its effect."""
        while not deadline.passed:
            pids = _workers(master, None)
            serving = _without(pids, self._ending)
            if len(serving) == workers:
                return
            if len(serving) < workers:
                _signal(master, signal.SIGTTIN)
                # A new worker comes in the place of one that ends, when that has ended.
                self._keep_ending({pid: self._ending[pid] for pid in pids if pid not in serving}, but_one=True)
                self._wait_for_effect(master, pids, deadline)
                continue
            _signal(master, signal.SIGTTOU)
            # At once, whatever comes between: gunicorn's number is less from now on. It ends the oldest.
            going = _youngest(serving, len(serving))[-1]
            before = self._ending
            self._keep_ending({**before, going: _Told(started(going) or 0, time.monotonic())})
            now = self._wait_for_effect(master, pids, deadline)
            if going in now and any(pid not in now for pid in serving):
                self._keep_ending(before)  # another one has gone for it

    def _wait_for_effect(self, master: int, pids: list[int], deadline: Deadline) -> list[int]:
        """Until the workers are others, or the signal must have been taken; returns those that there are."""
        began = time.monotonic()
        while True:
            now = _workers(master, None)
            if now != pids or time.monotonic() - began > SIGNAL_TAKEN_S or deadline.wait(LOOK_S):
                return now

    def _keep_ending(self, ending: dict[int, _Told], but_one: bool = False) -> None:
        """Remember who was told to end and has not; `but_one`: without the one that was told last."""
        now = time.monotonic()
        kept = {
            pid: told
            for pid, told in sorted(ending.items(), key=lambda item: item[1].at)
            if now - told.at < ENDING_LIMIT_S and started(pid) == told.began
        }
        if but_one and kept:
            kept.popitem()
        self._ending = kept
        text = " ".join(f"{pid},{told.began},{told.at:.3f}" for pid, told in kept.items())
        # Where it cannot be written, only a restart of this adapter forgets it.
        with contextlib.suppress(ApplicationError):
            self._originals.replace(*self._identity, ENDING, text)


def handles(pid: int, *numbers: signal.Signals, procfs: str = "/proc") -> bool:
    """Whether the process has handlers of its own for all these signals: to others they would be the end, or a stop."""
    caught = signals(pid, "SigCgt", procfs=procfs)
    return all(caught >> (number - 1) & 1 for number in numbers)


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except OSError as error:
        raise ApplicationError(f"process {pid} cannot be signalled: {error.strerror}") from None


def _workers(master: int, stats: Stats | None) -> list[int]:
    """The master's workers, by pid: not the master of an upgrade, not its helper processes."""
    own = arguments(master)
    found = []
    for pid in children(master):
        words = arguments(pid)
        # A process that is ending has lost its command line before all that it held is free.
        titled = bool(words) and words[0].startswith("gunicorn: ")
        if words and not (words[0].startswith("gunicorn: worker") if titled else words == own):
            continue
        if stats is not None and pid == stats.dirty_pid:
            continue
        # A new master was started by exec, with its parent in its environment; workers were not.
        if (environment(pid) or {}).get(b"GUNICORN_PID") == b"%d" % master:
            continue
        found.append(pid)
    return found


def _without(pids: list[int], ending: dict[int, _Told]) -> list[int]:
    """Without those that end, one that has just ended among them: but a pid may be used again."""
    return [pid for pid in pids if pid not in ending or started(pid) not in (None, ending[pid].began)]


def _read_ending(text: str) -> dict[int, _Told]:
    """As it was remembered; what cannot be understood is left out."""
    found = {}
    for word in text.split():
        with contextlib.suppress(ValueError):
            pid, began, at = word.split(",")
            found[int(pid)] = _Told(int(began), float(at))
    return found


def _youngest(pids: list[int], count: int) -> list[int]:
    """So many of them, the youngest first: gunicorn ends the oldest."""
    return sorted(pids, key=lambda pid: (started(pid) or 0, pid), reverse=True)[: max(count, 0)]


def _configured_workers(master: int) -> int:
    """From its command line and environment, 0 where they do not say (gunicorn's settings: workers)."""
    found = environment(master) or {}
    by_environment = found.get(b"GUNICORN_CMD_ARGS", b"").decode("utf-8", "replace")
    try:
        words = shlex.split(by_environment)
    except ValueError:
        words = []
    given = (words, arguments(master))
    # gunicorn's own default, which a configuration file takes the place of: what that says is not known.
    in_file = os.path.exists(f"/proc/{master}/cwd/gunicorn.conf.py") or any(map(names_file, given))
    number = "" if in_file else found.get(b"WEB_CONCURRENCY", b"").decode("utf-8", "replace")
    for words_ in given:
        number = workers_option(words_) or number
    return _number(number)


def _number(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() else 0


def names_file(words: list[str]) -> bool:
    """Whether a configuration file is named."""
    return any(word == "--config" or word.startswith(("-c", "--config=")) for word in words)


def workers_option(words: list[str]) -> str:
    """The value of the last -w or --workers, empty where there is none."""
    value = ""
    for i, word in enumerate(words):
        if word in ("-w", "--workers"):
            value = words[i + 1] if i + 1 < len(words) else ""
        elif word.startswith("--workers="):
            value = word.partition("=")[2]
        elif word.startswith("-w") and word[2:].isdigit():
            value = word[2:]
    return value


def _options(parser: argparse.ArgumentParser) -> None:
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--pid-file", metavar="FILE", help="gunicorn's --pid; read each time, so restarts are followed")
    which.add_argument("--pid", type=whole, metavar="N", help="its master, for as long as that lives")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--control-socket", metavar="FILE", help="default: found, if its name ends in .ctl")
    how.add_argument("--signals", action="store_true", help="leave the control socket alone")
    parser.add_argument(
        "--workers", type=whole, metavar="N", help="at full size (default: what gunicorn is configured for)"
    )
    parser.add_argument(
        "--state-dir",
        default=STATE_DIR,
        metavar="DIR",
        help="the number at full size, while there are fewer, where nothing tells it (default: %(default)s)",
    )
    pool_options(parser)
    balancer_options(parser)


def _build(options: argparse.Namespace) -> GunicornAdapter:
    path, pid = options.pid_file, options.pid
    return GunicornAdapter(
        (lambda: read_pid(path)) if path is not None else (lambda: int(pid)),
        full_cores(options),
        options.minimum_workers,
        options.workers,
        options.control_socket or not options.signals,
        options.state_dir,
    )


READY = Ready(
    "the workers of a gunicorn on this machine",
    """\
Takes workers from gunicorn and gives them back, through its control socket (gunicorn 25.1 and later) or by signals.

example:
  gunicorn --pid /run/app.pid --workers 8 app:app
  ebb-adapter gunicorn --pid-file /run/app.pid --minimum-workers 2 \\
      --weight-command '/usr/local/bin/set-weight {name} {weight}'
""",
    _options,
    lambda options: balanced(_build(options), options),
)
