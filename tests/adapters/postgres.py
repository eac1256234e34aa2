"""A real PostgreSQL cluster of its own on a Unix socket, sessions in it, and a client that runs all the time."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from tests.adapters import load
from tests.adapters.proc import children, pss_mib

OWNER = "postgres"


def programs() -> Path:
    """The newest PostgreSQL of Debian; its servers are not on the PATH."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]))
    assert found, "the Debian package postgresql is missing"
    return found[-1].parent


def as_owner() -> list[str]:
    """PostgreSQL refuses to run as root."""
    return ["runuser", "-u", OWNER, "--"] if os.geteuid() == 0 else []


class Session:
    """A psql that stays connected."""

    def __init__(self, cluster: Cluster) -> None:
        command = [*as_owner(), *cluster.psql_command(), "-q"]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd="/"
        )
        self.pid = int(self.ask("SELECT pg_backend_pid();"))

    def ask(self, sql: str) -> str:
        """The one line that is answered."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(sql + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise ConnectionError("the session has ended")
        return line.strip()

    def close(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=60)


class Cluster:
    """`settings` go into postgresql.conf. The directory is one that the server's own user can reach."""

    def __init__(self, *settings: str) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="ebb-pg-"))
        self.directory.chmod(0o755)
        self.data = self.directory / "data"
        self.data.mkdir()
        if as_owner():
            shutil.chown(self.directory, OWNER)
            shutil.chown(self.data, OWNER)
        self.sessions: list[Session] = []
        try:
            self._run(
                "initdb",
                "-D",
                str(self.data),
                "-A",
                "trust",
                "-U",
                OWNER,
                "-E",
                "UTF8",
                "--no-sync",
                "--no-instructions",
            )
            text = ["listen_addresses = ''", f"unix_socket_directories = '{self.directory}'", "fsync = off", *settings]
            with (self.data / "postgresql.conf").open("a") as file:
                file.write("\n".join(text) + "\n")
            self._run("pg_ctl", "-D", str(self.data), "-w", "-t", "60", "-l", str(self.directory / "log"), "start")
        except BaseException:
            self.stop()
            raise
        self.postmaster = int((self.data / "postmaster.pid").read_text().splitlines()[0])

    def _run(self, program: str, *arguments: str) -> None:
        command = [*as_owner(), str(programs() / program), *arguments]
        done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, cwd="/")
        assert done.returncode == 0, done.stderr

    def stop(self) -> None:
        for session in self.sessions:
            session.close()
        pid_file = self.data / "postmaster.pid"
        if pid_file.exists():
            self._run("pg_ctl", "-D", str(self.data), "-w", "-t", "60", "-m", "immediate", "stop")
        shutil.rmtree(self.directory)

    def restart(self) -> None:
        self._run("pg_ctl", "-D", str(self.data), "-w", "-t", "60", "-m", "fast", "-l", "/dev/null", "restart")
        self.postmaster = int((self.data / "postmaster.pid").read_text().splitlines()[0])

    def psql_command(self) -> list[str]:
        return ["psql", "-X", "-A", "-t", "-h", str(self.directory), "-U", OWNER, "-d", "postgres"]

    def ask(self, sql: str) -> str:
        command = [*as_owner(), *self.psql_command(), "-c", sql]
        return subprocess.run(command, capture_output=True, text=True, check=True, cwd="/").stdout.strip()

    def setting(self, name: str) -> str:
        return self.ask(f"SHOW {name}")

    def auto_conf(self) -> list[str]:
        """What ALTER SYSTEM has written."""
        lines = (self.data / "postgresql.auto.conf").read_text().splitlines()
        return sorted(line for line in lines if line and not line.startswith("#"))

    def session(self) -> Session:
        self.sessions.append(Session(self))
        return self.sessions[-1]

    def fat_session(self, mib: int) -> Session:
        """A session that keeps so much: buffers of a temporary table stay until it ends."""
        session = self.session()
        session.ask(f"SET temp_buffers = '{mib}MB'; CREATE TEMP TABLE fat (t text); SELECT 1;")
        rows = f"SELECT repeat('x', 1000) FROM generate_series(1, {mib * 1100})"
        session.ask(f"INSERT INTO fat {rows}; SELECT count(*) FROM fat;")
        return session

    def pss_mib(self) -> float:
        """Of the server and its children."""
        return pss_mib([self.postmaster, *children(self.postmaster)])


class Load(load.Load):
    """A session that writes and reads all the time."""

    pause_s = 0.005

    def __init__(self, cluster: Cluster) -> None:
        super().__init__()
        cluster.ask("CREATE TABLE IF NOT EXISTS load (n int)")
        self._session = cluster.session()

    def ask(self, number: int) -> None:
        with self.timed():
            answer = self._session.ask(f"INSERT INTO load VALUES ({number}) RETURNING n;")
        if answer != str(number):
            self.errors.append(answer)
