"""Arrays that all runs of a sweep read: files in a cache directory, mapped into each process and never copied."""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from simulator.errors import ExperimentError

CACHE_VARIABLE: Final = "EBB_CACHE_DIR"


def cache_dir(environment: Mapping[str, str] = os.environ) -> Path:
    """Where prepared data is kept: simulator/ below EBB_CACHE_DIR, else below the user's cache."""
    if environment.get(CACHE_VARIABLE):
        return Path(environment[CACHE_VARIABLE]).absolute() / "simulator"
    home = environment.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "ebbtide" / "simulator"


class SharedArrays(Mapping[str, NDArray[Any]]):
    """Arrays by name, read-only. Pickled it is a path, and the other process maps the same files."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._arrays: dict[str, NDArray[Any]] = {}

    def __getitem__(self, name: str) -> NDArray[Any]:
        if name not in self._arrays:
            path = self.directory / f"{name}.npy"
            if not path.is_file():
                if not self.directory.is_dir():
                    raise ExperimentError("cache", f"{self.directory} is not on this machine, or has gone")
                raise KeyError(name)
            self._arrays[name] = np.load(path, mmap_mode="r", allow_pickle=False)
        return self._arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(path.stem for path in self.directory.glob("*.npy")))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __reduce__(self) -> tuple[Any, ...]:
        return SharedArrays, (self.directory,)


def shared_arrays(
    what: Any, make: Callable[[], Mapping[str, NDArray[Any]]], directory: Path | None = None
) -> SharedArrays:
    """Arrays that are made once for each ``what`` and kept in the cache.

    :param what: all that the arrays depend on, as JSON: the model's name, a version of its own, fingerprints of
        inputs (`fingerprint`), settings.
    :param make: makes them, of numbers, flags or texts; names are file names.
    :raises ExperimentError: the cache cannot be written.
    """
    key = hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:32]
    place = (cache_dir() if directory is None else directory) / key
    if place.is_dir():
        return SharedArrays(place)
    part = place.with_name(f".{key}.{os.getpid()}.part")
    arrays = make()
    try:
        try:
            part.mkdir(parents=True, exist_ok=True)
            for name, values in arrays.items():
                np.save(part / f"{name}.npy", np.ascontiguousarray(values), allow_pickle=False)
            try:
                part.rename(place)
            except OSError:
                # Another process was first with the same.
                if not place.is_dir():
                    raise
        finally:
            shutil.rmtree(part, ignore_errors=True)
    except OSError as error:
        raise ExperimentError("cache", f"{place.parent} cannot be written ({error}); set {CACHE_VARIABLE}") from error
    return SharedArrays(place)


def fingerprint(path: Path) -> str:
    """What a file holds, in one word.

    :raises ExperimentError: it cannot be read.
    """
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ExperimentError("input", f"{path} cannot be read: {error.strerror}") from error


def packed(prepared: Any, *, whole: bool = False) -> bytes:
    """Prepared data for another process.

    :param whole: with the arrays themselves, for a machine that does not see the cache.
    """
    buffer = io.BytesIO()
    _Pickler(buffer, whole).dump(prepared)
    return buffer.getvalue()


class _Pickler(pickle.Pickler):
    def __init__(self, buffer: io.BytesIO, whole: bool) -> None:
        super().__init__(buffer, protocol=pickle.HIGHEST_PROTOCOL)
        self._whole = whole

    def reducer_override(self, value: Any) -> Any:
        if self._whole and isinstance(value, SharedArrays):
            return dict, ({name: np.array(values) for name, values in value.items()},)
        return NotImplemented
