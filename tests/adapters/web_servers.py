"""gunicorn and nginx of a test, on loopback, and what the kernel says of them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from tests.adapters.cache import free_port
from tests.adapters.proc import children, pss_mib, state
from tests.waiting import until_sync

LIMIT_S = 60.0
# Some MiB that are the worker's own; the server's name tells who answered.
APPLICATION = """\
import os, time
DATA = b"x" * (int(os.environ["MIB"]) << 20)
def app(environ, start_response):
    path = environ["PATH_INFO"]
    if path.startswith("/slow/"):
        open(f"slow-{os.getpid()}", "w").close()
        time.sleep(float(path[6:]))
    body = f"{os.environ['NAME']} {os.getpid()}".encode()
    start_response("200 OK", [("Content-Type", "text/plain"), ("Content-Length", str(len(body)))])
    return [body]
"""

# gunicorn.conf.py, which gunicorn reads where it starts: a worker says that it is ready.
SETTINGS = """\
import os
def post_worker_init(worker):
    open(f"loaded-{os.getpid()}", "w").close()
"""


class Server:
    """A master process in the foreground, with its log. Stops it, and all its processes, whatever happens."""

    def __init__(self, command: list[str], directory: Path, environment: dict[str, str]) -> None:
        self.directory = directory
        self.log = directory / "log"
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command,
                cwd=directory,
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self.process.pid

    def workers(self) -> list[int]:
        return children(self.pid)

    def pss_mib(self) -> float:
        return pss_mib([self.pid, *self.workers()])

    def wait_for_workers(self, count: int) -> None:
        try:
            until_sync(lambda: self.process.poll() is not None or len(self.workers()) == count, f"{count} workers")
            assert self.process.poll() is None, "it has ended"
        except (AssertionError, TimeoutError) as error:
            raise AssertionError(f"{error}; {len(self.workers())} are there\n{self.log.read_text()[-2000:]}") from None

    def asleep(self) -> bool:
        """Whether no process of it has work for a moment: one that still starts on a busy machine is not asleep."""
        for _ in range(4):
            if any(state(pid) != psutil.STATUS_SLEEPING for pid in (self.pid, *self.workers())):
                return False
            time.sleep(0.05)
        return True

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            pass
        finally:
            # The session is this server's own: workers that outlive their master go with it.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(20)


class Gunicorn(Server):
    def __init__(
        self,
        directory: Path,
        options: tuple[str, ...] = (),
        workers: int = 4,
        mib: int = 12,
        name: str = "gunicorn",
        in_file: bool = False,
    ) -> None:
        """`in_file`: that its configuration file alone tells how many workers it has."""
        directory.mkdir(parents=True, exist_ok=True)
        self.port = free_port()
        self.pid_file = directory / "pid"
        (directory / "served.py").write_text(APPLICATION)
        (directory / "gunicorn.conf.py").write_text(SETTINGS + (f"workers = {workers}\n" if in_file else ""))
        command = [sys.executable, "-m", "gunicorn", "--bind", f"127.0.0.1:{self.port}"]
        command += [] if in_file else ["--workers", str(workers)]
        command += ["--pid", str(self.pid_file), "--control-socket", str(directory / "control.ctl"), *options]
        # Both the file and the command line take its place.
        environment = {"MIB": str(mib), "NAME": name, "WEB_CONCURRENCY": "1"}
        super().__init__([*command, "served:app"], directory, environment)
        self._workers_at_start = workers

    def slow_workers(self) -> list[int]:
        """Those that were asked for something slow."""
        return sorted(int(path.name[5:]) for path in self.directory.glob("slow-*"))

    def ready(self) -> Gunicorn:
        """Wait until all workers have the application."""
        self.wait_for_workers(self._workers_at_start)
        for pid in self.workers():
            until_sync((self.directory / f"loaded-{pid}").exists, f"the application in {pid}")
        until_sync(self.pid_file.exists, "the pid file")
        return self


CONFIGURATION = """\
{include}
daemon off;
pid {directory}/nginx.pid;
error_log {directory}/error.log;
worker_shutdown_timeout {shutdown_s}s;
events {{ worker_connections {connections}; }}
http {{
    access_log off;
    client_body_temp_path {directory}/body;
    proxy_temp_path {directory}/proxy;
    fastcgi_temp_path {directory}/fastcgi;
    uwsgi_temp_path {directory}/uwsgi;
    scgi_temp_path {directory}/scgi;
    {upstream}
    server {{
        listen 127.0.0.1:{port};
        location / {{ {location} }}
    }}
}}
"""


class Nginx(Server):
    """An nginx with a prefix and a configuration of its own; `include` is its first line."""

    def __init__(
        self,
        directory: Path,
        include: str = "",
        location: str = "return 200 nginx;",
        upstream: str = "",
        connections: int = 20000,
        shutdown_s: int = 10,
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        # Its workers run as another user, who must be let through to the files that it makes.
        directory.chmod(0o755)
        self.port = free_port()
        self.pid_file = directory / "nginx.pid"
        self.config = directory / "nginx.conf"
        self.config.write_text(
            CONFIGURATION.format(
                include=include,
                directory=directory,
                shutdown_s=shutdown_s,
                connections=connections,
                upstream=upstream,
                port=self.port,
                location=location,
            )
        )
        self.command = ["nginx", "-c", str(self.config), "-p", str(directory)]
        super().__init__(self.command, directory, {})

    def ready(self, workers: int) -> Nginx:
        self.wait_for_workers(workers)
        until_sync(self.pid_file.exists, "the pid file")
        return self
