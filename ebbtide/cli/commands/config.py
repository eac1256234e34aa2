"""Commands for the files of the daemons' options: `ebb config`."""

from __future__ import annotations

import enum
import os
import pwd
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer

from cluster_manager.options import ManagerOptions
from cluster_manager.privileges import SERVICE_DIRECTORY, acting_as, service_user
from ebbtide.cli.commands.options import Printing
from ebbtide.cli.output import print_error
from ebbtide.errors import EbbError
from ebbtide.rest.errors import AccessError
from ebbtide.rest.options import DaemonOptions, collect, example_of
from hostagent.options import HostAgentOptions, access_of, is_unnamed, notes_on


class Daemon(enum.StrEnum):
    """Whose options they are."""

    MANAGER = "manager"
    HOSTAGENT = "hostagent"


_MODELS: dict[Daemon, type[DaemonOptions]] = {Daemon.MANAGER: ManagerOptions, Daemon.HOSTAGENT: HostAgentOptions}


def check(
    file: Annotated[Path | None, typer.Argument(help="Default: those in /etc/ebbtide.")] = None,
    daemon: Annotated[Daemon | None, typer.Option(help="Default: by the file's name.")] = None,
    *,
    to: Printing,
) -> None:
    """Check the files of the daemons' options, and the files that they name, as the daemons do at their start.

    Root checks the manager's as the user of its service, where there is one. Without FILE a host agent's that names no
    host, as the package brings it, is passed over beside a manager's.
    """
    if file is None:
        found = {one: model.file for one, model in _MODELS.items() if daemon in (None, one) and model.file.exists()}
        if not found:
            raise EbbError("there is no file of options in /etc/ebbtide: `ebb config example` prints one")
        if len(found) > 1 and is_unnamed(agents := found[Daemon.HOSTAGENT]):
            del found[Daemon.HOSTAGENT]
            print(f"note: {agents} names no host, so it was not checked", file=sys.stderr)
    else:
        if daemon is None and file.stem not in list(Daemon):
            raise EbbError(f"--daemon: {file} is neither manager.toml nor hostagent.toml by its name: say whose it is")
        found = {daemon or Daemon(file.stem): file}
    looked = {path: _looked(one, path) for one, path in found.items()}
    wrong = {path: errors for path, (errors, _) in looked.items()}
    users = {path: _checks_as(one) for one, path in found.items()}

    def told() -> None:
        for one, path in found.items():
            for sentence in wrong[path]:
                print_error(sentence)
            for sentence in looked[path][1]:
                print(f"note: {path}: {sentence}", file=sys.stderr)
            if wrong[path]:
                print(f"note: {path} was checked as user {users[path]}", file=sys.stderr)
            else:
                print(f"{path}: the {one} can start with it as user {users[path]}")

    rows = [
        {"file": str(path), "user": users[path], "errors": errors, "notes": notes}
        for path, (errors, notes) in looked.items()
    ]
    to.say(rows, told)
    if any(wrong.values()):
        raise typer.Exit(2)


def _checks_as(daemon: Daemon) -> str:
    """The name of the user whose rights count: the service's, or the caller's."""
    user = service_user() if daemon is Daemon.MANAGER else None
    try:
        return (user or pwd.getpwuid(os.geteuid())).pw_name
    except KeyError:
        return str(os.geteuid())


def _looked(daemon: Daemon, path: Path) -> tuple[list[str], list[str]]:
    """What keeps the daemon from its start, and notes on the rest."""
    try:
        return [], list(checked(daemon, path))
    except AccessError as error:
        return str(error).splitlines(), []


def checked(daemon: Daemon, path: Path) -> tuple[str, ...]:
    """What the daemon would warn of at its start, or its service may lack.

    :raises AccessError: what keeps it from that, a sentence a line.
    """
    if daemon is Daemon.MANAGER:
        from cluster_manager.configured import settings_of_all
        from cluster_manager.errors import SettingsError
        from ebbtide.matcher.errors import EngineSettingsError

        with ExitStack() as stack:
            if (user := service_user()) is not None:
                groups = os.getgrouplist(user.pw_name, user.pw_gid)
                stack.enter_context(acting_as(user.pw_uid, user.pw_gid, groups))
            given = collect(ManagerOptions, path, {})
            try:
                settings, _ = settings_of_all(given.options)
                if isinstance(settings.database, Path):
                    _check_directory(settings.database.parent)
                return settings.notes
            except (SettingsError, AccessError, EngineSettingsError) as error:
                raise AccessError(given.said(str(error))) from None
    else:
        from hostagent.access import check_files
        from hostagent.errors import HostAgentError

        asked = collect(HostAgentOptions, path, {})
        try:
            check_files(asked.options, access_of(asked.options))
        except (AccessError, HostAgentError) as error:
            raise AccessError(asked.said(str(error))) from None
        return notes_on(asked.options.state_dir, asked.options.disk_dir)


def _check_directory(directory: Path) -> None:
    """The store's directory; that of the service is made by systemd at its start."""
    if directory == SERVICE_DIRECTORY and not directory.exists():
        return
    if not os.access(directory, os.W_OK | os.X_OK, effective_ids=True):
        raise AccessError(f"--database: the directory {directory} is not there, or cannot be written")


def example(daemon: Annotated[Daemon, typer.Argument(help="Whose.")], *, to: Printing) -> None:
    """Print a file with every option of a daemon at its default."""
    model = _MODELS[daemon]
    values = {name: None if field.is_required() else _json(field.default) for name, field in model.model_fields.items()}
    to.say(values, lambda: print(example_of(model), end=""))


def _json(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value
