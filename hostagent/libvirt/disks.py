"""Disks of VMs: a directory for each, made before its domain and removed after it.

What a kill leaves of a creation or a removal is swept by the next agent. The disk of a VM that was there is never taken
for such a rest: domains can be missing because another libvirt is asked, or were undefined by an operator.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Collection
from pathlib import Path
from typing import Final

import structlog

from hostagent.errors import HypervisorError
from hostagent.state.files import make_parents

#: Stands in the directory of a VM that is being made or removed: nothing in it is to be kept.
_UNFINISHED: Final = "unfinished"

log = structlog.get_logger()


def create_overlay(base: Path, directory: Path) -> Path:
    """Make ``directory`` with an empty overlay over ``base`` in it. Blocks: call it in a thread.

    It may be swept until it is `kept`: until then no guest has run with it.

    :raises HypervisorError: the directory is there already, or qemu-img failed; nothing new is left behind.
    """
    if not base.is_file():
        raise HypervisorError(f"there is no base image at {base}: put one there, or name its directory by --image-dir")
    try:
        make_parents(directory)
        directory.mkdir()
        directory.chmod(0o711)
        (directory / _UNFINISHED).touch()
    except OSError as error:
        raise HypervisorError(f"the VM's directory {directory} cannot be made: {error.strerror}") from error
    overlay = directory / "disk.qcow2"
    command = ["qemu-img", "create", "-q", "-f", "qcow2", "-F", "qcow2", "-b", str(base), str(overlay)]
    try:
        # Ours only: libvirt gives it to QEMU's user as long as the VM runs.
        os.close(os.open(overlay, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        overlay.chmod(0o600)
    except subprocess.CalledProcessError as error:
        remove_disk(directory)
        raise HypervisorError(f"qemu-img could not make an overlay: {error.stderr.strip()}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        remove_disk(directory)
        raise HypervisorError(f"qemu-img could not make an overlay: {error}") from error
    return overlay


def is_new(directory: Path) -> bool:
    """Whether the VM of this directory is being made or removed: nothing in it is to be kept. Blocks.

    Where that cannot be read it is not: what is there may have been worked with.
    """
    with contextlib.suppress(OSError):
        return (directory / _UNFINISHED).exists()
    return False


def kept(directory: Path) -> None:
    """The VM is there: from now on its disk is never swept. Blocks."""
    with contextlib.suppress(OSError):  # the next sweep tries again, as long as its domain is there
        (directory / _UNFINISHED).unlink()


def doomed(directory: Path) -> None:
    """The VM is about to be removed: what a kill leaves of it may be swept. Blocks."""
    with contextlib.suppress(OSError):
        (directory / _UNFINISHED).touch()


def remove_disk(directory: Path) -> None:
    """Remove a VM's directory with all in it; no error if it is gone."""
    shutil.rmtree(directory, ignore_errors=True)


def sweep(directories: Collection[Path], domains: Collection[str], creating: Collection[str] = ()) -> None:
    """Remove what a killed agent left of VMs that it was making or removing. Blocks.

    :param domains: names of all that are there, of any owner: a disk in use is never removed.
    :param creating: of those the ones that are still being made: whether their guests have run is asked later.
    """
    for directory in filter(Path.is_dir, directories):
        if directory.name in domains:
            if directory.name not in creating:
                kept(directory)
        elif (directory / _UNFINISHED).exists() or not any(directory.iterdir()):
            remove_disk(directory)
        else:
            log.warning("no domain has this disk; it is kept", directory=str(directory))
