"""Credentials between a manager and its hosts: a token for each host and direction, all made from the manager's key.

A host has its own two and learns no other one's; the manager keeps its key only. Managers of one cluster share the key.
"""

from __future__ import annotations

import base64
import hashlib
import hmac


def report_token(key: str, host: str) -> str:
    """What a host agent carries towards its manager. It begins with the host's id, so that it can be checked."""
    return f"{host}.{_mac(key, f'report {host}')}"


def command_token(key: str, host: str) -> str:
    """What the manager carries towards a host agent."""
    return _mac(key, f"command {host}")


def host_of(key: str, token: str) -> str | None:
    """The host whose report token this is, in constant time; None: no host's."""
    host, _, _ = token.rpartition(".")
    wanted, given = (text.encode(errors="surrogateescape") for text in (report_token(key, host), token))
    return host if host and hmac.compare_digest(wanted, given) else None


def _mac(key: str, text: str) -> str:
    digest = hmac.new(key.encode(), text.encode(errors="surrogateescape"), hashlib.sha256).digest()
    return base64.urlsafe_b64encode(digest).decode().rstrip("=")
