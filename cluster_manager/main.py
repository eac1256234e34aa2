"""The command ``ebb-manager``."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from cluster_manager.errors import ManagerError, SettingsError
from cluster_manager.options import ManagerOptions
from ebbtide.matcher.errors import EngineSettingsError
from ebbtide.rest.errors import AccessError
from ebbtide.rest.options import Given, read_options

ABOUT = "Places VMs on hosts, deflating low-priority VMs where that is needed. See also: ebb --help."
EXAMPLES = """\
examples:
  ebb-manager --token-file /etc/ebbtide/token --hosts-key-file /etc/ebbtide/hosts.key --database manager.sqlite
  ebb-manager --listen 127.0.0.1:7200 --token-file t --hosts-key-file k --database m.sqlite --policy first-fit
  ebb-manager --config manager.toml
  ebb-manager --token-file t --hosts-key-file k --database m.sqlite --rebalance --rebalance-most-moves 1
  ebb-manager restore backup.sqlite
      with the options of /etc/ebbtide/manager.toml, where no manager runs: make the store of a file of `ebb backup`,
      and end (docs/how-to/back-up-and-upgrade.md)
  ebb-manager --listen 192.0.2.1:7100 --tokens-file tokens.toml --hosts-key-file k --database m.sqlite \\
      --tls-certificate manager.pem --tls-key manager.key --client-ca ca.pem
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the manager until SIGTERM or SIGINT.

    :returns: 0 after a clean shutdown, 1 if it cannot start, 2 if its options cannot be, 130 if a restore was
        interrupted.
    """
    # NumPy here adds up columns: threads of its algebra would do nothing, and be warned of where few are allowed.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # Stores, journals and logs are for their owner.
    os.umask(0o077)
    words = list(sys.argv[1:] if arguments is None else arguments)
    restores = words[:1] == ["restore"]
    if not restores:
        # Until it can be reloaded, and after that: what asks for it then must not end it.
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    if restores and (len(words) < 2 or words[1].startswith("-")):
        return _refuse("restore needs the FILE of a backup as its first word", 2)
    try:
        given = options_of(words[2:] if restores else words)
    except AccessError as error:
        return _refuse(str(error), 2)
    # Imported here, so that --help and a wrong option are answered at once.
    import asyncio

    import structlog

    from cluster_manager.configured import settings_of_all
    from ebbtide.rest.logs import configure_logs

    configure_logs(given.options.log_level, given.options.log_json)
    if restores:
        return _restore(Path(words[1]), given)
    try:
        settings, gate = settings_of_all(given.options)
    except (SettingsError, AccessError, EngineSettingsError) as error:
        return _refuse(given.said(str(error)), 2)
    for note in settings.notes:
        structlog.get_logger().warning(note)
    from cluster_manager.serving import serve

    try:
        asyncio.run(serve(settings, gate, given))
    except (ManagerError, AccessError, OSError) as error:
        return _refuse(given.said(str(error)), 1)
    return 0


def _restore(file: Path, given: Given[ManagerOptions]) -> int:
    """Make the store of a backup, and say what became of it."""
    import asyncio

    from cluster_manager.restoring import Restored, restore
    from cluster_manager.store.database import database_of

    async def interruptible() -> Restored:
        task = asyncio.current_task()
        assert task is not None
        # By asyncio's own way the second Ctrl-C would not wait for what is at work.
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
        return await restore(database, file)

    try:
        database = database_of(given.options.database, given.options.database_password_file)
        made = asyncio.run(interruptible())
    except (asyncio.CancelledError, KeyboardInterrupt):
        return _refuse("interrupted: nothing has changed", 130)
    except SettingsError as error:
        return _refuse(given.said(str(error)), 2)
    except (ManagerError, OSError) as error:
        return _refuse(str(error), 1)
    if made.aside is not None:
        what = "the store of before is empty; its log" if made.aside.name.endswith("-wal") else "the store of before"
        print(f"{what} is kept as {made.aside}")
    for sentence in made.settled.ended:
        print(f"ended: {sentence}")
    settled = made.settled
    if made.unread:
        print("no store of before was read: revoke again who was revoked since the backup")
    print(f"revoked hosts: {', '.join(settled.revoked) or 'none'}; invitations are void")
    print(
        f"restored {file} to {database}: {settled.hosts} hosts and {settled.vms} VMs, as of epoch {settled.epoch}; "
        f"the next manager has epoch {settled.epoch_now + 1}"
    )
    if made.interrupted:
        return _refuse("interrupted too late: the store was restored, as is said above", 130)
    return 0


def _refuse(sentences: str, code: int) -> int:
    for sentence in sentences.splitlines():
        print(f"ebb-manager: {sentence}", file=sys.stderr)
    return code


def options_of(arguments: Sequence[str] | None) -> Given[ManagerOptions]:
    """:raises OptionsError: see `read_options`."""
    return read_options(ManagerOptions, arguments, ABOUT, EXAMPLES)


if __name__ == "__main__":
    sys.exit(main())
