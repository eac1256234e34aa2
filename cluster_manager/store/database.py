"""Place of a manager's store, a file or a PostgreSQL database by its URL, shown without a password."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import structlog

from cluster_manager.errors import SettingsError
from ebbtide.rest.errors import AccessError
from ebbtide.rest.tokens import check_private

log = structlog.get_logger()

SCHEMES = ("postgresql", "postgres")
#: Parameters of a URL: of the user, and of the key of a client certificate.
_PASSWORDS = {"password", "sslpassword"}


@dataclass(frozen=True, slots=True)
class PostgreSQL:
    """A database of a PostgreSQL server, 14 or newer.

    :param url: a connection URI of libpq, with several hosts and parameters where wanted, without a password.
    :param password: a secret; None leaves it to libpq (its passfile, a client certificate, a peer on the socket).
    :param password_file: where that stands.
    """

    url: str
    password: str | None = field(default=None, repr=False)
    password_file: Path | None = field(default=None, repr=False)

    def present_password(self) -> str | None:
        """What counts at this moment: it may have been changed, in the file too. Blocks."""
        if self.password_file is None:
            return self.password
        try:
            return _password(self.password_file)
        except SettingsError as error:
            log.warning("the password of the database is the one of before", why=str(error))
            return self.password

    def __str__(self) -> str:
        """For people: no password, and none of the parameters either, since they can hold one."""
        parts = urlsplit(self.url)
        where = parts.netloc.rpartition("@")[2] or ",".join(parse_qs(parts.query).get("host", ["its socket"]))
        return f"PostgreSQL database {parts.path.lstrip('/') or '(of its user)'} at {where}"


Database = Path | PostgreSQL


def database_of(text: str, password_file: Path | None = None) -> Database:
    """The database that ``--database`` names.

    :param password_file: holds the password of a PostgreSQL user, and nothing else.
    :raises SettingsError: another kind of URL, a password in it, or a password file that cannot be used.
    """
    scheme, separator, _ = text.partition("://")
    if not separator:
        if password_file is not None:
            raise SettingsError("--database-password-file is for --database postgresql://...; a file has no password")
        return Path(text)
    if scheme not in SCHEMES:
        raise SettingsError("--database must be a file or begin with postgresql://")
    try:
        parts = urlsplit(text)
        has_password = ":" in parts.netloc.rpartition("@")[0]
    except ValueError as error:
        raise SettingsError(f"--database is no URL: {error}") from error
    # The list of processes shows the command line to every user of this machine.
    if has_password or _PASSWORDS & parse_qs(parts.query, keep_blank_values=True).keys():
        raise SettingsError(
            "--database must not hold a password: put it into a file for --database-password-file, or into a passfile; "
            "that of a key (sslpassword) into a service file of libpq"
        )
    return PostgreSQL(text, _password(password_file) if password_file is not None else None, password_file)


def _password(path: Path) -> str:
    try:
        check_private(path, "password file")
        text = path.read_text(encoding="utf-8").rstrip("\r\n")
    except AccessError as error:
        raise SettingsError(str(error)) from error
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"cannot read the password file {path}: {error}") from error
    if not text or "\n" in text or "\x00" in text:
        raise SettingsError(f"the password file {path} must hold one line")
    return text
