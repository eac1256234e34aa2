"""Arrays by name in a .npz file: written whole or not at all; whatever is wrong with one that is read is one error."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ebbtide.files import replacing


def write(path: Path, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Replace a file at once; where that fails, what was there stays.

    :raises OSError: it cannot be written.
    """
    with replacing(path, 0o666, durable=False) as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]


def read(path: Path) -> dict[str, NDArray[Any]]:
    """All arrays of a file.

    :raises OSError: it cannot be opened.
    :raises ValueError: it is no such file, or damaged.
    """
    with path.open("rb") as file:
        try:
            with np.load(file, allow_pickle=False) as stored:
                return {name: stored[name] for name in stored.files}
        except Exception as error:
            # NumPy, zipfile and zlib have errors of their own for what can be wrong, and some that tell a user nothing.
            raise ValueError(f"it holds no arrays, or is damaged: {error}") from error
