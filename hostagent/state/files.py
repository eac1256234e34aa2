"""Files that are replaced as a whole: a kill or a power cut leaves the old text or the new one; and whose they are."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final, TextIO

from hostagent.errors import HostAgentError

#: Where ``ebb doctor --probe-acpi`` leaves its verdict and the agent reads it.
ACPI_VERDICT: Final = Path("/var/cache/ebbtide/acpi-unplug.json")
#: Where libvirt keeps saved memory, unless it was built otherwise.
SAVE_DIR: Final = Path("/var/lib/libvirt/qemu/save")
#: Locks that go with the process.
_HELD: Final[list[TextIO]] = []


def replace(path: Path, text: str) -> None:
    """Write a file durably in the place of an older one, for its owner alone. Blocks.

    :raises OSError: it could not be written, and nothing of it is left; after a power cut the older one may be there.
    """
    temporary = path.with_name(f"{path.name}.new")
    try:
        # Not every program that writes here has a umask of its own.
        with open(temporary, "w", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    sync_names(path.parent)


def sync_names(directory: Path) -> None:
    """Have on the disk which files a directory has: without that a power cut takes a new name back. Blocks."""
    opened = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


@contextlib.contextmanager
def alone_in(state_dir: Path) -> Iterator[None]:
    """Have a state directory, made if it is not there, to oneself up to the end of the block; a kill gives it back.

    :raises HostAgentError: another process has it.
    :raises OSError: it cannot be used.
    """
    with _locked(state_dir):
        yield


def alone_to_the_end_in(state_dir: Path) -> None:
    """As `alone_in`, up to the end of the process: so long threads may write that are not waited for."""
    _HELD.append(_locked(state_dir))


def _locked(state_dir: Path) -> TextIO:
    state_dir.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(
            open(state_dir / "lock", "w", opener=lambda name, flags: os.open(name, flags, 0o600))
        )
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise HostAgentError(
                f"an agent runs with the state directory {state_dir} (--state-dir): stop it first"
            ) from None
        stack.pop_all()  # it stays open
    return file


def make_parents(directory: Path, mode: int = 0o711) -> None:
    """Make what is missing above a directory, whatever the umask: QEMU's user passes through, but root alone can list.

    :param mode: 0755 where others may list, too.
    :raises OSError: it could not be made.
    """
    for parent in reversed([parent for parent in directory.parents if not parent.exists()]):
        parent.mkdir(mode=mode, exist_ok=True)  # others make directories, too
        parent.chmod(mode)
