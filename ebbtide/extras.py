"""What an extra of Ebbtide brings along, and how it is installed: by the names of those packages, never by our own.

No index has Ebbtide: whoever took its name there would be installed in its place.
"""

from __future__ import annotations

import importlib.util
import shlex
import sys
from importlib import metadata


def installing(extra: str) -> str:
    """The command that installs what an extra lists, for the Python that runs."""
    end = f'extra == "{extra}"'
    try:
        wanted = [
            one.partition(";")[0].strip()
            for one in metadata.requires("ebbtide") or ()
            if one.partition(";")[2].strip().replace("'", '"') == end
        ]
    except metadata.PackageNotFoundError:
        wanted = []
    if not wanted:
        return f"what the extra {extra} lists in pyproject.toml"
    # A Debian package's environment has no pip of its own.
    pip = [sys.executable, "-m", "pip"]
    if importlib.util.find_spec("pip") is None:
        pip = ["python3", "-m", "pip", "--python", sys.executable]
    return shlex.join([*pip, "install", *wanted])
