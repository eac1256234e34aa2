"""PostgreSQL through its own `psql`: argument lists, no shell, the password only from a file of libpq."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from typing import Any

from app_adapters.errors import ApplicationError

CONNECT_LIMIT_S = 2  # the least that libpq knows
PASSED_ON = ("PATH", "HOME", "LANG")


class NoAnswer(ApplicationError):
    """What was asked for may yet be done."""


class Psql:
    """Calls psql. `run_as` is the system user that it runs as, by runuser (for peer authentication)."""

    def __init__(
        self,
        host: str = "",
        port: int = 5432,
        user: str = "postgres",
        database: str = "postgres",
        password_file: str = "",
        run_as: str = "",
    ) -> None:
        self._command = ["runuser", "-u", run_as, "--"] if run_as else []
        # No .psqlrc, no password prompt, unaligned tuples, and the first error ends it.
        self._command += ["psql", "-X", "-w", "-A", "-t", "-q", "-v", "ON_ERROR_STOP=1"]
        self._command += ["-p", str(port), "-U", user, "-d", database]
        self._command += ["-h", host] if host else []
        self._environment = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
        self._environment.update(
            {"PGCONNECT_TIMEOUT": str(CONNECT_LIMIT_S), "PGAPPNAME": "ebbtide", "LC_MESSAGES": "C", "LC_ALL": "C"}
        )
        if password_file:
            self._environment["PGPASSFILE"] = password_file

    def run(self, statements: list[str], limit_s: float = 10.0) -> str:
        """Run statements, each in a transaction of its own; returns what they print.

        Raises: ApplicationError with the server's first complaint, NoAnswer where there is none in time.
        """
        command = list(self._command)
        for statement in statements:
            command += ["-c", statement]
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=self._environment,
                cwd="/",  # a directory that every user may be in
                start_new_session=True,
            )
        except FileNotFoundError:
            raise ApplicationError(f"{command[0]} is not installed") from None
        except OSError as error:
            raise ApplicationError(f"psql cannot be run: {error.strerror}") from None
        try:
            output, complaint = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            raise NoAnswer(f"psql gave no answer within {limit_s:g} s") from None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # with what runuser has started
                process.communicate()
        if process.returncode != 0:
            lines = complaint.decode("utf-8", "replace").strip().splitlines() or ["without a word"]
            raise ApplicationError(f"psql failed: {lines[0][:300]}")
        return output.decode("utf-8", "replace")

    def query(self, sql: str) -> Any:
        """The JSON that a statement selects. Raises: ApplicationError."""
        text = self.run([sql])
        try:
            return json.loads(text)
        except ValueError:
            raise ApplicationError(f"psql printed what is no JSON: {text[:200]}") from None
