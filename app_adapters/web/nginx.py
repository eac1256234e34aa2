"""nginx: fewer or more worker processes.

nginx has no command for that, so the adapter owns a small file with the directive `worker_processes`, which nginx.conf
includes, and has it read by a reload (SIGHUP). Old workers finish their requests first, for as long as
`worker_shutdown_timeout` lets them; for that time there are more workers than before, not fewer.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
from typing import Callable

from app_adapters.adapter import Deadline
from app_adapters.errors import ApplicationError
from app_adapters.processes.owned_files import put_back, read_text, write_atomically
from app_adapters.processes.process import arguments, children
from app_adapters.processes.process_memory import cpus_possible, read_pid
from app_adapters.processes.programs import run
from app_adapters.registry import Ready
from app_adapters.web.balancer import balanced, balancer_options
from app_adapters.web.pool_adapter import PoolAdapter, Processes
from app_adapters.web.pool_options import full_cores, pool_options, whole

WORKERS_FILE = "/etc/nginx/ebbtide-workers.conf"
PID_FILE = "/run/nginx.pid"
LOOK_S = 0.05
# A reload whose new workers do not show by then was refused by the master, whatever the test said.
RELOAD_LIMIT_S = 10.0
MASTER = "nginx: master process"
SERVING, ENDING, STARTING = "serving", "ending", "starting"  # a worker that is starting has its master's title yet
_HEADER = re.compile(r"# configuration file (.+):")
_DIRECTIVE = re.compile(r"\s*worker_processes\s+([^;]+);")


class NginxAdapter(PoolAdapter):
    """An nginx on this machine. `command` is the program with the options that it was started with (-c, -p).

    `workers` is their number at full size; `workers_file` is written by this adapter only.
    """

    name = "nginx"

    def __init__(
        self,
        command: list[str],
        workers_file: str,
        master: Callable[[], int],
        workers: int,
        full_cores: float,
        minimum_workers: int = 1,
    ) -> None:
        super().__init__(full_cores, minimum_workers)
        self._command = command
        self._file = workers_file
        self._master = master
        self._workers = workers

    def _processes(self) -> Processes:
        master = self._master()
        found = _workers(master)
        if found is None:
            raise ApplicationError(f"process {master} is no master of nginx")
        return Processes(master, sorted(found), [pid for pid in found if found[pid] != ENDING], self._workers)

    def _obstacle(self) -> str:
        """What nginx.conf lacks. Costs two runs of nginx, which read its configuration and change nothing."""
        if read_text(self._file) is None:
            return f"{self._file} is missing; write 'worker_processes {self._workers};' into it, and {self._advice()}"
        try:
            dump = run([*self._command, "-T"])
        except ApplicationError as error:
            return f"nginx refuses its own configuration, or cannot be asked: {error}"
        return missing(dump, self._file)

    def _advice(self) -> str:
        return f"put the line 'include {self._file};' at the top of nginx.conf, instead of its line worker_processes"

    def _is_right(self, wanted: int) -> bool:
        """What was written without its reload, by an adapter that was killed between, the next start would take."""
        found = _DIRECTIVE.match(read_text(self._file) or "")
        return found is not None and found.group(1).strip() == str(wanted)

    def _resize(self, workers: int, deadline: Deadline) -> str:
        master = self._master()
        before = _workers(master)
        if before is None:
            raise ApplicationError(f"process {master} is no master of nginx")
        old, new = read_text(self._file), f"worker_processes {workers};\n"
        if old == new and sum(state != ENDING for state in before.values()) == workers:
            # All is done but the end of old workers; a reload would make more of them.
            ending = {pid for pid, state in before.items() if state == ENDING}
            return self._follow(master, ending, workers, old, deadline)
        write_atomically(self._file, new)
        try:
            run([*self._command, "-t"], 10.0)
            os.kill(master, signal.SIGHUP)
        except (ApplicationError, OSError) as error:
            put_back(self._file, old)
            raise ApplicationError(f"nginx was left as it was: {error}") from None
        return self._follow(master, set(before), workers, old, deadline)

    def _follow(self, master: int, before: set[int], workers: int, old: str | None, deadline: Deadline) -> str:
        """Wait for the new workers, then for the end of the old ones."""
        patience = Deadline(RELOAD_LIMIT_S)
        while True:
            found = _workers(master) or {}
            fresh = [pid for pid in found if found[pid] == SERVING and pid not in before]
            staying = [pid for pid in found if pid in before]
            if len(fresh) == len(found) == workers:
                return ""
            if not fresh and patience.passed:
                put_back(self._file, old)
                raise ApplicationError(
                    "nginx did not take the reload, see its error log; its configuration was put back"
                )
            if deadline.wait(LOOK_S):
                break
        if staying and len(fresh) == workers:
            return f"{len(staying)} old workers still finish their requests (worker_shutdown_timeout limits that)"
        return f"{len(fresh)} of {workers} new workers were there by the deadline"


def missing(dump: str, path: str) -> str:
    """What a configuration, as `nginx -T` prints it, lacks to include the file; empty where it does.

    With the file included, another `worker_processes` is a duplicate, which nginx refuses by itself.
    """
    wanted = os.path.realpath(path)
    first, name, line = "", "", 0
    set_at = ""
    for text in dump.splitlines():
        header = _HEADER.fullmatch(text)
        if header:
            name, line = header.group(1), 0
            first = first or name
            if os.path.realpath(name) == wanted:
                return ""
            continue
        line += 1
        if not set_at and _DIRECTIVE.match(text):
            set_at = f"instead of '{text.strip()}' ({name}, line {line})"
    if not first:
        return "nginx -T printed no configuration"
    return f"nginx does not read {path}: put the line 'include {path};' into {first}, " + (set_at or "at its top")


def _workers(master: int) -> dict[int, str] | None:
    """The master's workers, and what they do; None where this is no master of nginx."""
    if not " ".join(arguments(master)).startswith(MASTER):
        return None
    found = {}
    for pid in children(master):
        title = " ".join(arguments(pid)).strip()
        if title.startswith("nginx: worker process"):
            found[pid] = ENDING if "shutting down" in title else SERVING
        elif title.startswith(MASTER):
            # Not the master of an upgrade: that one is in the pid file, and this is its child.
            found[pid] = STARTING
        elif not title:
            # A process that is ending has lost its command line before all that it held is free.
            found[pid] = ENDING
    return found


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--nginx", default="nginx", metavar="PROGRAM", help="default: %(default)s")
    parser.add_argument("--config", metavar="FILE", help="nginx's -c")
    parser.add_argument("--prefix", metavar="DIRECTORY", help="nginx's -p")
    parser.add_argument("--pid-file", default=PID_FILE, metavar="FILE", help="default: %(default)s")
    parser.add_argument(
        "--workers-file", default=WORKERS_FILE, metavar="FILE", help="which nginx.conf includes (default: %(default)s)"
    )
    parser.add_argument("--workers", type=whole, metavar="N", help="at full size (default: the CPUs of this machine)")
    pool_options(parser)
    balancer_options(parser)


def _build(options: argparse.Namespace) -> NginxAdapter:
    path = os.path.abspath(options.workers_file)
    if re.search(r"[\s;{}'\"]", path):
        raise ApplicationError(f"--workers-file: {path} cannot be named in nginx.conf")
    command = [options.nginx]
    command += ["-c", options.config] if options.config else []
    command += ["-p", options.prefix] if options.prefix else []
    pid_file = options.pid_file
    return NginxAdapter(
        command,
        path,
        lambda: read_pid(pid_file),
        options.workers or cpus_possible(),
        full_cores(options),
        options.minimum_workers,
    )


READY = Ready(
    "the worker processes of an nginx on this machine",
    f"""\
Sets worker_processes in a file of its own, and has nginx read it by a reload.
Once, in place of the line worker_processes in nginx.conf:  include {WORKERS_FILE};

example:
  echo 'worker_processes 4;' > {WORKERS_FILE}
  ebb-adapter nginx --workers 4
""",
    _options,
    lambda options: balanced(_build(options), options),
)
