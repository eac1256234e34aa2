"""Compiled loops that call the policies' own functions (numba, of the extra `sim`).

A policy's function is interpreted where a daemon calls it and compiled where a loop of the simulator does: one function
object, no copy. Machine code is kept between runs, in a directory named by the sources that it was made from: numba
itself looks at the file of a loop only, not at what the loop calls.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, Final, TypeVar, cast

from simulator.errors import MissingExtra

numba: Any
try:
    numba = importlib.import_module("numba")
    importlib.import_module("numba.extending")
except ImportError:  # an extra
    numba = None

F = TypeVar("F", bound=Callable[..., Any])

#: Packages whose functions are compiled.
_ROOMS: Final = ("deflation", "task_matcher", "simulator")
#: Machine code that nobody has used for so long goes.
_KEPT_S: Final = 30 * 86400.0
_SHARED: set[FunctionType] = set()


def shared(function: F) -> F:
    """Let compiled loops call a policy's function, and those of its room that it calls; twice is as good as once.

    :raises MissingExtra: numba is not installed.
    """
    _check()
    if isinstance(function, FunctionType) and function not in _SHARED:
        _SHARED.add(function)
        numba.extending.register_jitable(function)
        for name in _names(function.__code__):
            called = function.__globals__.get(name)
            if isinstance(called, FunctionType) and called.__module__.partition(".")[0] in _ROOMS:
                shared(called)
    return function


def share_calls(function: Callable[..., Any]) -> None:
    """Let a loop that is about to be compiled call what it calls: `shared` of all functions that it names.

    :raises MissingExtra: numba is not installed.
    """
    assert isinstance(function, FunctionType)
    for name in function.__code__.co_names:
        if isinstance(called := function.__globals__.get(name), FunctionType):
            shared(called)


def compiled(function: F, **options: Any) -> F:
    """Compile a loop at its first call; it may call others of these, and what is `inner` or `shared`.

    With NUMBA_DISABLE_JIT=1 in the environment it stays as it is.

    :param options: more of numba's own.
    :raises MissingExtra: numba is not installed.
    """
    return _compiled(function, options)


def inner(function: F) -> F:
    """Compile a part of a loop, which nothing but compiled loops calls: it takes less time than `compiled`.

    :raises MissingExtra: numba is not installed.
    """
    return _compiled(function, {"no_cpython_wrapper": True, "no_cfunc_wrapper": True})


def plain(function: F) -> F:
    """What was compiled, as it was written."""
    return cast(F, getattr(function, "py_func", function))


def _compiled(function: F, options: dict[str, Any]) -> F:
    _check()
    with _kept_apart():
        return cast(F, numba.njit(cache=True, nogil=True, **options)(function))


def _check() -> None:
    if numba is None:
        raise MissingExtra("numba", "sim", "the compiled loops of the simulator")


def _names(code: CodeType) -> Iterator[str]:
    """All names that a function and its comprehensions look up."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


@contextmanager
def _kept_apart() -> Iterator[None]:
    """Our loops' machine code has a directory of its own; that of others is not ours to move."""
    before = numba.config.CACHE_DIR
    if not before:
        numba.config.CACHE_DIR = str(_directory())
    try:
        yield
    finally:
        numba.config.CACHE_DIR = before


@functools.cache
def _directory() -> Path:
    """Where machine code of these very sources is kept."""
    root = Path(__file__).resolve().parents[1]
    digest = hashlib.blake2b(digest_size=8)
    for room in _ROOMS:
        for source in sorted((root / room).rglob("*.py")):
            digest.update(source.relative_to(root).as_posix().encode() + b"\0")
            digest.update(source.read_bytes())
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ebbtide" / "compiled"
    directory = home / digest.hexdigest()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        os.utime(directory)
        _tidy(home)
    except OSError:
        pass  # numba finds another place, or compiles anew
    return directory


def _tidy(home: Path) -> None:
    """Machine code of sources that are long gone."""
    oldest = time.time() - _KEPT_S
    for old in home.iterdir():
        if old.stat().st_mtime < oldest:
            shutil.rmtree(old, ignore_errors=True)
