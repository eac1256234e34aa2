"""Finder of the JVM's process: by pid, by a file with it, or by its command line. Followed over restarts."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from app_adapters.errors import ApplicationError
from app_adapters.processes.process import arguments, started

HOTSPOT = "HotSpot"
OPENJ9 = "OpenJ9"
#: Options of java(1) whose value is the next word.
_WITH_VALUE = {
    "-cp", "-classpath", "--class-path", "-p", "--module-path", "--upgrade-module-path", "--add-modules",
    "--add-reads", "--add-exports", "--add-opens", "--limit-modules", "--patch-module", "-d", "--describe-module",
    "--enable-native-access", "--source",
}  # fmt: skip


@dataclass(frozen=True)
class Process:
    """A JVM that runs: a pid that is used again began at another time, in ticks since boot."""

    pid: int
    start: int


@dataclass(frozen=True)
class Choice:
    """How the JVM is told from others; exactly one is given. `match`: a regular expression for its command line."""

    pid: int | None = None
    pid_file: str = ""
    main_class: str = ""
    match: str = ""

    def __str__(self) -> str:
        if self.pid is not None:
            return f"process {self.pid}"
        return self.pid_file or self.main_class or f"a command line like {self.match}"


class Finder:
    """Finds the process again whenever the one that was found has ended."""

    def __init__(self, choice: Choice, procfs: str = "/proc") -> None:
        self._choice = choice
        self._procfs = procfs
        self._last: Process | None = None

    def find(self) -> Process:
        """The JVM. Raises: ApplicationError where there is none, or more than one."""
        last = self._last
        # A pid file is read each time: its service may have been started again while the old one ends.
        if last is None or self._choice.pid_file or started(last.pid, self._procfs) != last.start:
            last = self._last = self._look()
        return last

    def _look(self) -> Process:
        choice = self._choice
        if choice.pid is not None:
            pids = [choice.pid]
        elif choice.pid_file:
            pids = [_read_pid(choice.pid_file)]
        else:
            pids = self._matching()
        start = started(pids[0], self._procfs)
        if start is None:
            raise ApplicationError(f"process {pids[0]} does not run")
        kind = jvm_kind(pids[0], self._procfs)
        if kind != HOTSPOT:
            is_what = "an OpenJ9 JVM: untested, so it is not touched" if kind else "no JVM"
            raise ApplicationError(f"process {pids[0]} is {is_what}")
        return Process(pids[0], start)

    def _matching(self) -> list[int]:
        choice = self._choice
        pids = []
        for name in os.listdir(self._procfs):
            if not name.isdigit() or int(name) == os.getpid():
                continue
            words = arguments(int(name), self._procfs)
            if choice.match:
                matches = re.search(choice.match, " ".join(words)) is not None
            else:
                matches = choice.main_class in main_classes(words)
            # A shell that starts a JVM has the same words on its command line.
            if matches and jvm_kind(int(name), self._procfs):
                pids.append(int(name))
        if len(pids) != 1:
            found = "several JVMs match" if pids else "no JVM matches"
            numbers = f" ({', '.join(map(str, sorted(pids)))})" if pids else ""
            raise ApplicationError(f"{found} {choice}{numbers}")
        return pids


def jvm_kind(pid: int, procfs: str = "/proc") -> str:
    """HotSpot or OpenJ9 by the libraries that the process has loaded, empty where it is no JVM."""
    try:
        with open(f"{procfs}/{pid}/maps", errors="replace") as file:
            names = file.read()
    except OSError:
        return ""
    # OpenJ9 has a libjvm.so as well, which only leads to the other one.
    if "/libj9vm" in names:
        return OPENJ9
    return HOTSPOT if "/libjvm.so" in names else ""


def main_classes(words: list[str]) -> list[str]:
    """What a java command line runs: the class in full and by its last name, or the jar by its path and by its name."""
    rest = iter(words[1:])
    for word in rest:
        if word == "-jar":
            path = next(rest, "")
            return [path, os.path.basename(path)]
        if word in ("-m", "--module"):
            return _names(next(rest, "").rpartition("/")[2])
        if word.startswith("--module="):
            return _names(word.rpartition("/")[2])
        if word in _WITH_VALUE:
            next(rest, "")
        elif not word.startswith(("-", "@")):
            return _names(word)
    return []


def _names(name: str) -> list[str]:
    return [name, name.rpartition(".")[2]]


def _read_pid(path: str) -> int:
    try:
        with open(path, errors="replace") as file:
            text = file.read(64).strip()
    except OSError as error:
        raise ApplicationError(f"{path} cannot be read: {error.strerror}") from None
    if not text.isdigit() or not 0 < int(text) < 2**31:
        raise ApplicationError(f"{path} does not hold a pid")
    return int(text)
