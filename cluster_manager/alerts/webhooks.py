"""Webhooks of the operator's: the TOML file of ``--alerts-file``. No request can change them."""

from __future__ import annotations

import base64
import binascii
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final, Literal, get_args
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from cluster_manager.errors import SettingsError
from ebbtide.messages.explanations import Event, EventKind
from ebbtide.rest.errors import AccessError
from ebbtide.rest.tokens import check_private, read_token

#: The label `webhook` of metrics has so many values.
MOST: Final = 16
#: As Standard Webhooks has them: this word, and 24 to 64 bytes as base64.
PREFIX: Final = "whsec_"
ALL: Final = "*"

Form = Literal["event", "chat", "alertmanager"]


@dataclass(frozen=True, slots=True)
class Webhook:
    """Where events of some kinds are sent to.

    :param url: http or https; often a secret by itself, so never logged.
    :param key: of the signature.
    :param kinds: of events; one is `ALL`.
    """

    name: str
    url: str = field(repr=False)
    key: bytes = field(repr=False)
    kinds: frozenset[str]
    form: Form = "event"

    def wants(self, event: Event) -> bool:
        """Whether it is told of an event."""
        return event.kind in self.kinds or ALL in self.kinds


def _known(kind: str) -> str:
    if kind != ALL and kind not in get_args(EventKind):
        raise ValueError(f"{kind[:40]} is no kind of event; there are * and {', '.join(get_args(EventKind))}")
    return kind


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?$")]
    url: Annotated[str, Field(max_length=2000)]
    secret_file: Path
    events: Annotated[tuple[Annotated[str, AfterValidator(_known)], ...], Field(min_length=1)]
    form: Form = "event"


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid")

    webhook: Annotated[tuple[_Entry, ...], Field(min_length=1, max_length=MOST)]


def read_webhooks(path: Path) -> tuple[Webhook, ...]:
    """The webhooks in a TOML file, which is secret as their URLs are. Relative secret files are looked for beside it.

    :raises SettingsError: it cannot be read, or an entry is wrong; the sentence names the entry and the field.
    """
    try:
        check_private(path, "alerts file")
        values = tomllib.loads(path.read_text(encoding="utf-8"))
        found = _File.model_validate(values)
    except OSError as error:
        raise SettingsError(f"cannot read the alerts file {path}: {error.strerror}") from error
    except ValidationError as error:
        # Without the cause, whose text holds what was given.
        first = error.errors(include_input=False, include_url=False)[0]
        raise SettingsError(f"the alerts file {path}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    except AccessError as error:
        raise SettingsError(str(error)) from None
    except (ValueError, RecursionError) as error:
        raise SettingsError(f"the alerts file {path} is no TOML: {error}") from None
    webhooks = tuple(_webhook(path, number, entry) for number, entry in enumerate(found.webhook))
    names = [webhook.name for webhook in webhooks]
    if twice := {name for name in names if names.count(name) > 1}:
        raise SettingsError(f"the alerts file {path}: there are two webhooks named {min(twice)}")
    return webhooks


def _webhook(path: Path, number: int, entry: _Entry) -> Webhook:
    where = f"the alerts file {path}: webhook.{number} ({entry.name})"
    try:
        parts = urlsplit(entry.url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable or not entry.url.isprintable() or " " in entry.url:
        raise SettingsError(f"{where}: url: must be http://HOST... or https://HOST...")
    try:
        word: Any = read_token(path.parent / entry.secret_file)
    except AccessError as error:
        raise SettingsError(f"{where}: secret_file: {error}") from None
    return Webhook(entry.name, entry.url, _key(word, where), frozenset(entry.events), entry.form)


def _key(word: str, where: str) -> bytes:
    try:
        key = base64.b64decode(word.removeprefix(PREFIX), validate=True)
    except (ValueError, binascii.Error):
        key = b""
    if not word.startswith(PREFIX) or not 24 <= len(key) <= 64:
        raise SettingsError(f"{where}: secret_file: must hold {PREFIX} and 24 to 64 bytes as base64")
    return key
