"""Connections to PostgreSQL by psycopg 3, which speaks through libpq: its URIs, passfiles, TLS, several hosts.

psycopg is imported on first use: a manager on SQLite needs none (extra ``postgresql``).
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from cluster_manager.errors import StoreError
from cluster_manager.store.database import PostgreSQL
from ebbtide.extras import installing

if TYPE_CHECKING:
    from psycopg import AsyncConnection, ConnectionInfo

#: ``idle_session_timeout``, by which the server takes the lock from a leader that hangs, came with this version.
OLDEST_SERVER: Final = 140_000
#: How long a connection may take to come about, seconds.
CONNECT_S: Final = 5.0
#: How long one of several hosts may take to answer, seconds: the least that psycopg takes.
ONE_HOST_S: Final = 2
#: A dead peer is noticed by TCP within these; a dead manager's connection is the server's to notice.
KEEPALIVES: Final = {"keepalives_idle": 2, "keepalives_interval": 1, "keepalives_count": 3, "tcp_user_timeout": 5000}
#: A writer that hangs in its transaction would hold up the next leader: the server ends it before that one gives up.
IN_TRANSACTION_MS: Final = 3000
#: No statement of the manager takes so long; reading a whole store may.
STATEMENT_MS: Final = 30_000
#: A commit is on the disk, of a synchronous replica too, before it is believed; a stricter setting stays.
SYNCHRONOUS: Final = (
    "SELECT set_config('synchronous_commit', 'on', false)"
    " WHERE current_setting('synchronous_commit') IN ('off', 'local', 'remote_write')"
)
#: Of one server from its start to its end, and of no copy of it.
SERVER: Final = "SELECT extract(epoch FROM pg_postmaster_start_time())::text"
#: Which of several hosts of a URL is asked first: the one that answered last, after a failure the one behind it.
_FIRST: Final[dict[str, int]] = {}


async def connect(database: PostgreSQL, name: str, idle_s: float = 0.0) -> AsyncConnection[Any]:
    """A new connection in autocommit mode.

    :param name: what the server's list of sessions calls it.
    :param idle_s: after so long without a statement the server ends the session; 0 for never.
    :raises StoreError: psycopg or the server cannot be used.
    """
    options = options_of(database, name)
    import psycopg

    try:
        first = _FIRST.get(database.url, 0)
        try:
            async with asyncio.timeout(CONNECT_S):
                password = await asyncio.to_thread(database.present_password)
                options = options_of(database, name, await _addresses(database))
                connection = await psycopg.AsyncConnection.connect(**options, password=password, autocommit=True)
        except BaseException:
            # Also where whoever asks gives it up.
            _FIRST[database.url] = first + 1
            raise
        _FIRST[database.url] = first + _place_of(connection.info, options)
    except (psycopg.Error, OSError) as error:
        raise StoreError(f"cannot use the {database}: {sentence_of(error)}") from error
    except TimeoutError as error:
        raise StoreError(f"cannot use the {database}: no connection within {CONNECT_S:g} s") from error
    try:
        if connection.info.server_version < OLDEST_SERVER:
            raise StoreError(f"cannot use the {database}: its server must be PostgreSQL 14 or newer")
        if (encoding := connection.info.parameter_status("server_encoding")) != "UTF8":
            raise StoreError(
                f"cannot use the {database}: its encoding is {encoding}, not UTF8 (createdb --encoding UTF8 --template "
                "template0)"
            )
        async with asyncio.timeout(CONNECT_S):
            await connection.execute(_session_settings(idle_s))
    except BaseException as error:
        await connection.close()
        if isinstance(error, psycopg.Error | TimeoutError):
            raise StoreError(f"cannot use the {database}: {sentence_of(error)}") from error
        raise
    return connection


def turn_to_next(database: PostgreSQL) -> None:
    """Ask another one of several hosts first from now on: this one is not where the others go on."""
    _FIRST[database.url] = _FIRST.get(database.url, 0) + 1


def options_of(database: PostgreSQL, name: str, addresses: Mapping[str, str] = {}) -> dict[str, Any]:
    """How to connect, for libpq, without the password; what the URL says goes before.

    :param name: what the server's list of sessions calls it.
    :param addresses: lists of its hosts by all their addresses, in the place of the URL's.
    :raises StoreError: psycopg cannot be used, or the URL.
    """
    given = {**_given(database), **addresses}
    # Of several hosts the one that can be written to.
    options: dict[str, Any] = {"target_session_attrs": "read-write", "application_name": name, **KEEPALIVES}
    if several := _rotated(given, _FIRST.get(database.url, 0)):
        # A host that is silent must not use up the time of the others.
        options["connect_timeout"] = ONE_HOST_S
    # Texts are Unicode, whatever PGCLIENTENCODING says.
    return options | given | several | {"client_encoding": "utf8"}


def _given(database: PostgreSQL) -> dict[str, Any]:
    try:
        import psycopg
        from psycopg.conninfo import conninfo_to_dict
    except ImportError as error:
        raise StoreError(f"a PostgreSQL store needs psycopg: {installing('postgresql')}") from error
    try:
        return dict(conninfo_to_dict(database.url))
    except psycopg.Error as error:
        raise StoreError(f"cannot use the {database}: {sentence_of(error)}") from error


async def _addresses(database: PostgreSQL) -> dict[str, str]:
    """The hosts of a URL by all addresses that their names have: one of several that is silent must not use up the time
    of the others, whether it has a name of its own or not. Empty where the URL names no host, or addresses itself.
    """
    given = _given(database)
    hosts = str(given.get("host") or "").split(",")
    ports = str(given.get("port") or "").split(",")
    if hosts == [""] or given.get("hostaddr") or len(ports) not in (1, len(hosts)):
        return {}
    if len(ports) == 1:
        ports = ports * len(hosts)
    found: list[tuple[str, str, str]] = []
    loop = asyncio.get_running_loop()
    for host, port in zip(hosts, ports, strict=True):
        names = {"": None}
        if host and not host.startswith(("/", "@")):
            try:
                answers = await loop.getaddrinfo(host, None, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP)
                names = {str(answer[4][0]): None for answer in answers}
            except OSError:
                pass  # psycopg says so, or comes to another one
        found += [(host, address, port) for address in names]
    lists = zip(("host", "hostaddr", "port"), zip(*found, strict=True), strict=True)
    return {name: ",".join(words) for name, words in lists if any(words)}


def _rotated(given: dict[str, Any], first: int) -> dict[str, str]:
    """The lists of hosts, addresses and ports of a URL, begun at another place; empty where there is one host."""
    lists = {name: str(given.get(name, "")).split(",") for name in ("host", "hostaddr", "port")}
    return {
        name: ",".join(words[first % len(words) :] + words[: first % len(words)])
        for name, words in lists.items()
        if len(words) > 1
    }


def _place_of(info: ConnectionInfo, options: dict[str, Any]) -> int:
    """Where in its lists a host stands; 0 where it is not found."""
    hosts = str(options.get("host", options.get("hostaddr", ""))).split(",")
    ports, addresses = (str(options.get(name, "")).split(",") for name in ("port", "hostaddr"))
    if len(ports) != len(hosts):
        ports = [""] * len(hosts)
    if len(addresses) != len(hosts):
        addresses = [""] * len(hosts)
    for place, (name, port, address) in enumerate(zip(hosts, ports, addresses, strict=True)):
        if name in (info.host, address) and port in ("", str(info.port)) and address in ("", info.hostaddr):
            return place
    return 0


def _session_settings(idle_s: float) -> str:
    """What the manager relies on, whatever the server's defaults are; it has time limits of its own."""
    return (
        f"SET idle_session_timeout = {round(idle_s * 1000)};"
        f"SET idle_in_transaction_session_timeout = {IN_TRANSACTION_MS};"
        f"SET statement_timeout = {STATEMENT_MS};"
        # The first came with PostgreSQL 17. A migration takes as long as it needs.
        "SELECT set_config(name, '0', false) FROM pg_settings WHERE name IN ('transaction_timeout', 'lock_timeout');"
        f"{SYNCHRONOUS}"
    )


def sentence_of(error: BaseException) -> str:
    """The driver's words in one line; it never says the password."""
    return " ".join(str(error).split()) or type(error).__name__
