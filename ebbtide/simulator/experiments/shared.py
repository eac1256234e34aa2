"""Arrays that all runs of a sweep read: files in a cache directory, mapped into each process and never copied."""

from __future__ import annotations

import functools
import hashlib
import io
import json
import os
import pickle
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ebbtide.simulator.errors import ExperimentError
from ebbtide.simulator.experiments import code
from ebbtide.simulator.modules import hashes

CACHE_VARIABLE: Final = "EBB_CACHE_DIR"
#: Seconds that arrays are kept which are not asked for.
_KEPT_S: Final = 30 * 86400.0
#: Of directories that are ours to remove.
_NAME: Final = re.compile("[0-9a-f]{32}")


def cache_dir(environment: Mapping[str, str] = os.environ) -> Path:
    """Where prepared data is kept: ebbtide/simulator/ below EBB_CACHE_DIR, else below the user's cache."""
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
            try:
                self._arrays[name] = np.load(path, mmap_mode="r", allow_pickle=False)
            except (EOFError, OSError, ValueError) as error:
                problem = f"has {path}, which is damaged ({error}): remove {self.directory}"
                raise ExperimentError("cache", problem) from error
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
    """Arrays that are made once for each ``what`` and each code, and kept in the cache.

    :param what: all that the arrays depend on but code, as JSON: the model's name, a version of its own, fingerprints
        of inputs (`fingerprint`), their formats and options, settings.
    :param make: makes them, of numbers, flags or texts; names are file names. Its module, and what that imports from
        where it is itself, are code that the arrays depend on.
    :raises ExperimentError: the cache cannot be written, or that code has changed since this process imported it.
    """
    maker: Any = make
    while isinstance(maker, functools.partial):
        maker = maker.func
    own = hashes(code.beside({str(getattr(maker, "__module__", ""))}))
    key = hashlib.sha256(json.dumps([code.code_fingerprint(), what, *own], sort_keys=True).encode()).hexdigest()[:32]
    place = (cache_dir() if directory is None else directory) / key
    if place.is_dir():
        with suppress(OSError):
            os.utime(place)
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
    _tidy(place.parent)
    return SharedArrays(place)


def keep_reading(path: Path, terms: Sequence[Any], report: Mapping[str, Any]) -> None:
    """Keep in the cache what a whole reading of a file counted, for whoever tells of it (`reading`).

    :param terms: how it was read.
    """
    # Who reads may be anywhere, and reads all the same where there is no cache.
    with suppress(ExperimentError, OSError):
        shared_arrays(["reading", _content(path), *terms], lambda: {"report": np.array([json.dumps(report)])})


def reading(content: str, terms: Sequence[Any]) -> dict[str, Any] | None:
    """What the last whole reading of a file of this content counted; None: nobody has read it so.

    :param content: its `fingerprint`.
    """

    def make() -> dict[str, Any]:
        raise KeyError(content)

    with suppress(KeyError, ExperimentError, OSError):
        found: dict[str, Any] = json.loads(str(shared_arrays(["reading", content, *terms], make)["report"][0]))
        return found
    return None


def _content(path: Path) -> str:
    """The `fingerprint` of a file that each run reads, which is worked out once a process."""
    found = path.stat()
    return _content_of(path, found.st_size, found.st_mtime_ns, found.st_ino)


@functools.lru_cache(maxsize=64)
def _content_of(path: Path, *_: int) -> str:
    return fingerprint(path)


def _tidy(directory: Path) -> None:
    """Remove what was not asked for in a long time: each change of the code makes its arrays again."""
    oldest = time.time() - _KEPT_S
    for old in directory.iterdir():
        with suppress(OSError):
            if _NAME.fullmatch(old.name) and old.stat().st_mtime < oldest:
                shutil.rmtree(old)


def fingerprint(path: Path) -> str:
    """What a file holds, in one word.

    :raises ExperimentError: it cannot be read.
    """
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ExperimentError("input", f"{path} cannot be read: {error.strerror}") from error


class Files:
    """Files that must stay as they are while a sweep runs.

    :param paths: by the inputs' names.
    :raises ExperimentError: one cannot be read.
    """

    def __init__(self, paths: Mapping[str, Path]) -> None:
        self._paths = dict(paths)
        self._seen = {name: self._look(name) for name in paths}

    def size(self, name: str) -> int:
        """Bytes."""
        return self._seen[name][0]

    def check(self) -> None:
        """:raises ExperimentError: one has changed, or has gone."""
        for name, before in self._seen.items():
            if self._look(name) != before:
                problem = f"has changed while the sweep ran: {self._paths[name]}; what was done before is kept"
                raise ExperimentError(f"inputs.{name}", problem)

    def _look(self, name: str) -> tuple[int, int, int]:
        try:
            found = self._paths[name].stat()
        except OSError as error:
            raise ExperimentError(f"inputs.{name}", f"cannot be read: {self._paths[name]}: {error.strerror}") from error
        return found.st_size, found.st_mtime_ns, found.st_ino


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
