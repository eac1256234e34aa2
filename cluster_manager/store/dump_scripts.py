"""The script that pg_restore makes of a dump, carried out on a server of any version.

pg_restore would send it itself; but whatever the server is, it begins with all settings that its own version knows, of
which one that the server does not know ends it: that of PostgreSQL 17 could restore nothing to an older server. psql
would carry out more of a script than SQL.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, TYPE_CHECKING, Any, Final

from cluster_manager.errors import StoreError
from cluster_manager.store.backup import not_run, said_of

if TYPE_CHECKING:
    from psycopg import Connection

_SETTING: Final = re.compile(rb"SET (\w+) = .*;\n")
_COPY: Final = re.compile(rb"(COPY .* FROM stdin);\n")
#: The end of the rows of a COPY.
_END: Final = b"\\.\n"
_KNOWN: Final = "SELECT 1 FROM pg_settings WHERE name = %s"


@contextmanager
def script_of(file: Path, wanted: bytes) -> Iterator[IO[bytes]]:
    """The script that restores a dump, line by line.

    :param wanted: the list of what is taken of it.
    :raises StoreError: pg_restore is missing, or has failed: then at the end.
    """
    argv = ["pg_restore", "--no-owner", "--no-privileges", "--use-list=/dev/stdin", "--file=-", str(file)]
    with TemporaryFile() as said:
        try:
            program = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said)
        except OSError as error:
            raise not_run(argv, error) from error
        with program:
            assert program.stdin is not None
            assert program.stdout is not None
            try:
                with suppress(BrokenPipeError), program.stdin as list_:
                    list_.write(wanted)
                yield program.stdout
            except BaseException:
                program.kill()
                raise
        if program.returncode != 0:
            said.seek(0)
            raise said_of(argv, said.read(), program.returncode)


def carry_out(connection: Connection[Any], script: Iterable[bytes]) -> None:
    """Run a script in the transaction of a connection.

    :raises StoreError: it ends too early.
    :raises psycopg.Error: the server does not take it.
    """
    lines, statements = iter(script), b""
    for line in lines:
        if (copy := _COPY.fullmatch(line)) is not None:
            connection.execute(statements)
            statements = b""
            with connection.cursor().copy(copy[1]) as rows:
                for row in iter(partial(next, lines, b""), _END):
                    if not row:
                        raise StoreError("pg_restore has ended in the middle of a table")
                    rows.write(row)
        elif _is_for(connection, line):
            statements += line
    connection.execute(statements)


def _is_for(connection: Connection[Any], line: bytes) -> bool:
    """Whether a line is for this server, and not for psql or for a server of another version."""
    setting = _SETTING.fullmatch(line)
    if setting is not None:
        return bool(connection.execute(_KNOWN, [setting[1].decode()]).fetchone())
    return not line.startswith(b"\\")
