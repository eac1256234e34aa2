"""Which manager a command asks: by its options or variables, by a context, or the lab's."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING

from ebbtide.errors import EbbError

if TYPE_CHECKING:
    from ebbtide.client import ManagerClient

#: CA, certificate and key: the options that stand before the command.
TLS_FILES: ContextVar[tuple[Path | None, Path | None, Path | None]] = ContextVar("tls_files", default=(None,) * 3)
#: The context that was named before the command.
CONTEXT: ContextVar[str | None] = ContextVar("context", default=None)
#: Whether it was named on the command line, and not by a variable, which other variables come before.
CONTEXT_TYPED: ContextVar[bool] = ContextVar("context_typed", default=False)
#: Where --manager and --token-file are from, by the names of their parameters: COMMANDLINE, ENVIRONMENT or DEFAULT.
SOURCES: ContextVar[Mapping[str, str]] = ContextVar("sources", default={})  # noqa: B039
#: Where two of two managers may be from.
MIXED = {"COMMANDLINE", "ENVIRONMENT"}


def client_of(manager: str | None, token_file: Path | None) -> ManagerClient:
    """The client of the manager that the options name, else of the context's, else of the lab's. Raises EbbError."""
    from ebbtide.client import ManagerClient, TLSFiles

    if (manager is None) != (token_file is None):
        # The token of one manager is never sent to another.
        raise EbbError("--manager and --token-file (EBB_MANAGER, EBB_TOKEN_FILE) need each other")
    tls = TLS_FILES.get()
    if manager is None or token_file is None:
        from ebbtide.cli.contexts import chosen

        context = chosen(CONTEXT.get())
        if context is not None:
            manager, token_file = context.manager, context.token_file
            ca, certificate, key = tls
            if certificate is None and key is None:
                certificate, key = context.certificate, context.key
            tls = (ca or context.ca, certificate, key)
        else:
            from ebbtide.lab import paths
            from ebbtide.lab.state import StateFile

            try:
                state = StateFile(paths.state_dir()).running()
            except EbbError as error:
                raise EbbError(
                    "no manager is named: by `ebb context add` and `ebb context use`, or by --manager and --token-file "
                    f"(EBB_MANAGER, EBB_TOKEN_FILE); and {error}"
                ) from error
            manager, token_file = state.manager_url, state.manager_token_file
    try:
        token = token_file.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise EbbError(f"the token file {token_file} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise EbbError(f"the token file {token_file} is no text") from error
    if not token or any(c.isspace() or not c.isprintable() for c in token):
        raise EbbError(f"the token file {token_file} must hold one word")
    # One without TLS needs none of the files, which may be there for another manager.
    files = TLSFiles(*tls) if any(url.strip().startswith("https:") for url in manager.split(",")) else TLSFiles()
    client = ManagerClient(manager, token, tls=files.context())
    check_protected(manager)
    return client


def check_protected(manager: str) -> None:
    """:raises EbbError: an address to which the token would go over plain HTTP, beyond this machine."""
    from ebbtide.rest.tls import is_protected

    for url in manager.split(","):
        if not is_protected(url.strip()):
            # Without a password that may stand in it.
            shown = url.strip().rpartition("@")[2]
            if "://" not in url:
                raise EbbError(f"{shown!r} is no address: it must be like http://127.0.0.1:7100")
            raise EbbError(f"{shown} would get the token over plain HTTP: give https://")
