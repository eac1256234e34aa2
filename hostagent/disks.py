"""The disks of VMs: one qcow2 overlay each over the template's base image."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from hostagent.errors import HypervisorError


def create_overlay(base: Path, directory: Path) -> Path:
    """Make ``directory`` with an empty overlay over ``base`` in it. Blocks: call it in a thread.

    :raises HypervisorError: qemu-img failed; nothing is left behind.
    """
    if not base.is_file():
        raise HypervisorError(f"there is no base image at {base}: build it with `ebb lab image build`")
    directory.mkdir(parents=True, exist_ok=True)
    directory.chmod(0o755)
    overlay = directory / "disk.qcow2"
    command = ["qemu-img", "create", "-q", "-f", "qcow2", "-F", "qcow2", "-b", str(base), str(overlay)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if result.returncode != 0:
        shutil.rmtree(directory, ignore_errors=True)
        raise HypervisorError(f"qemu-img could not make an overlay: {result.stderr.strip()}")
    return overlay


def remove(directory: Path) -> None:
    """Remove a VM's directory with all in it; no error if it is gone."""
    shutil.rmtree(directory, ignore_errors=True)
