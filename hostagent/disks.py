"""The disks of VMs: one qcow2 overlay each over the template's base image."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from hostagent.errors import HypervisorError


def create_overlay(base: Path, directory: Path) -> Path:
    """Make ``directory`` with an empty overlay over ``base`` in it. Blocks: call it in a thread.

    :raises HypervisorError: the directory is there already, or qemu-img failed; nothing new is left behind.
    """
    if not base.is_file():
        raise HypervisorError(f"there is no base image at {base}: build it with `ebb lab image build`")
    try:
        directory.mkdir(parents=True)
    except OSError as error:
        raise HypervisorError(f"the VM's directory {directory} cannot be made: {error.strerror}") from error
    overlay = directory / "disk.qcow2"
    command = ["qemu-img", "create", "-q", "-f", "qcow2", "-F", "qcow2", "-b", str(base), str(overlay)]
    try:
        directory.chmod(0o755)
        subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except subprocess.CalledProcessError as error:
        remove(directory)
        raise HypervisorError(f"qemu-img could not make an overlay: {error.stderr.strip()}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        remove(directory)
        raise HypervisorError(f"qemu-img could not make an overlay: {error}") from error
    return overlay


def remove(directory: Path) -> None:
    """Remove a VM's directory with all in it; no error if it is gone."""
    shutil.rmtree(directory, ignore_errors=True)
