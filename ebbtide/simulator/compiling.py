"""Compiled loops that call the policies' own functions (numba, of the extra `sim`).

A policy's function is interpreted where a daemon calls it and compiled where a loop of the simulator does: one function
object, no copy. Machine code is kept between runs, in a directory named by a digest of the sources that it was made
from, which are the modules of its functions and all that they import from their own packages, from beside themselves
and from Ebbtide: numba itself looks at the file of a loop only.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import importlib
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from pickle import UnpicklingError
from types import CodeType, FunctionType
from typing import Any, Final, TypeVar, cast

from ebbtide.simulator.errors import MissingExtra
from ebbtide.simulator.extras import Later
from ebbtide.simulator.modules import closure, seen
from ebbtide.simulator.references import teach

numba: Any = Later("numba", "numba.extending")

F = TypeVar("F", bound=Callable[..., Any])

#: Packages whose functions are compiled.
_ROOMS: Final = ("deflation", "matcher", "simulator")
#: Machine code that was not used for so long is removed.
_KEPT_S: Final = 30 * 86400.0
_SHARED: set[FunctionType] = set()
#: Seconds of compilation before a word is said: what was compiled before is loaded in less.
_SILENT_S: Final = 1.0
#: Are told what is compiled, and "" when that is done; from any thread.
LISTENERS: Final[list[Callable[[str], None]]] = []


def shared(function: F) -> F:
    """Let compiled loops call a policy's function, and those of its room that it calls; twice is as good as once.

    :raises MissingExtra: numba is not installed.
    """
    _check()
    if isinstance(function, FunctionType) and function not in _SHARED:
        _SHARED.add(function)
        numba.extending.register_jitable(**_part_options())(function)
        _share_calls(function)
    return function


def chosen_by_type(
    function: Callable[..., Any], argument: int, choose: Callable[[type[Any]], Callable[..., Any]]
) -> None:
    """Let compiled loops call, in place of a function, the one that is chosen by the class of an argument.

    :param argument: its place among the arguments; a NamedTuple.
    :raises MissingExtra: numba is not installed.
    """
    _check()
    assert isinstance(function, FunctionType)
    if function not in _SHARED:
        _SHARED.add(function)

        def implementation(*types: Any) -> Callable[..., Any]:
            return shared(choose(types[argument].instance_class))

        numba.extending.overload(function, strict=False, jit_options=_part_options())(implementation)


def compiled(function: F, calls: Sequence[Callable[..., Any]] = (), **options: Any) -> F:
    """Compile a loop at its first call; it may call others of these, and what is `inner` or `shared`.

    Functions of our rooms that it names are `shared`. With NUMBA_DISABLE_JIT=1 in the environment it stays as it
    is.

    :param calls: functions that it calls without naming them (`chosen_by_type`).
    :param options: more of numba's own.
    :raises MissingExtra: numba is not installed.
    """
    _check()
    teach()
    for called in calls:
        shared(called)
    return _compiled(function, [_module_of(function), *map(_module_of, calls)], options)


def inner(function: F) -> F:
    """Compile a part of a loop, which nothing but compiled loops calls: it takes less time than `compiled`.

    :raises MissingExtra: numba is not installed.
    """
    return _compiled(function, [_module_of(function)], {"no_cpython_wrapper": True, "no_cfunc_wrapper": True})


@functools.cache
def _part_options() -> dict[str, Any]:
    """Numba's options for what only compiled loops call."""
    from ebbtide.simulator.parts import part_compiler

    pipeline = part_compiler()
    return {"no_cfunc_wrapper": True} | ({"pipeline_class": pipeline} if pipeline is not None else {})


@functools.cache
def prepare() -> None:
    """Load what numba loads before it compiles, without scipy: .6 s and 35 MiB for linear algebra that no loop of ours
    has. Loops of others that have some load it when they are compiled.
    """
    if not numba:
        return
    from ebbtide.simulator.parts import runtime_later

    if "numba.np.arraymath" not in sys.modules:
        _without_scipy()
    runtime_later()


def _without_scipy() -> None:
    modules: dict[str, Any] = sys.modules
    # Distributions of durations may have brought it, and need no linear algebra either.
    before = {"scipy": modules["scipy"]} if "scipy" in modules else {}
    modules["scipy"] = None
    try:
        arraymath: Any = importlib.import_module("numba.np.arraymath")
    except ImportError:
        return
    finally:
        del modules["scipy"]
        modules.update(before)
    arraymath._HAVE_BLAS = bool(Later("scipy"))


def announced(loop: F, what: str) -> F:
    """A compiled loop that says when its first call has to compile; of several processes one compiles, the others load.

    :param what: is compiled, for `LISTENERS`.
    """
    if not hasattr(loop, "compile"):  # NUMBA_DISABLE_JIT
        return loop
    dispatcher: Any = loop
    ready = False

    def call(*arguments: Any) -> Any:
        nonlocal ready
        if not ready:
            timer = threading.Timer(_SILENT_S, _say, (what,))
            timer.start()
            try:
                with _alone(dispatcher.stats.cache_path):
                    dispatcher.compile(tuple(numba.typeof(one) for one in arguments))
            finally:
                timer.cancel()
                timer.join()
                _say("")
            ready = True
        return dispatcher(*arguments)

    return cast(F, call)


def _say(what: str) -> None:
    for listener in LISTENERS:
        listener(what)


@contextmanager
def _alone(directory: str | None) -> Iterator[None]:
    """While no other process compiles into a directory: what one has compiled the next finds there."""
    if directory is None:
        yield
        return
    try:
        Path(directory).mkdir(parents=True, exist_ok=True)
        descriptor = os.open(Path(directory) / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
    except OSError:  # numba finds another place, or compiles again
        yield
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def plain(function: F) -> F:
    """What was compiled, as it was written."""
    return cast(F, getattr(function, "py_func", function))


def _compiled(function: F, modules: Iterable[str], options: dict[str, Any]) -> F:
    _check()
    _share_calls(function)
    loop = numba.njit(nogil=True, **options)(function)
    if not hasattr(loop, "enable_caching"):  # NUMBA_DISABLE_JIT
        return cast(F, loop)
    before = numba.config.CACHE_DIR
    if not before:
        # Only ours: other users' loops keep their own places.
        numba.config.CACHE_DIR = str(_directory(frozenset(modules)))
    try:
        # As numba's own `cache=True` does, which has errors of the disk be errors of the loop.
        with suppress(RuntimeError):  # no directory can be written
            loop._cache = _cache_class()(function)
    finally:
        numba.config.CACHE_DIR = before
    return cast(F, loop)


@functools.cache
def _cache_class() -> type[Any]:
    base: Any = numba.core.caching.FunctionCache

    class Cache(base):  # type: ignore[misc]
        """Of machine code: what cannot be read is compiled again, and what cannot be written is not kept."""

        def load_overload(self, signature: Any, target_context: Any) -> Any:
            with suppress(Exception):  # whatever a file raises that was cut short: numba writes them without fsync
                found = super().load_overload(signature, target_context)
                # The index names a file before it is written: one may be left there of another signature.
                if found is None or found.signature.args == signature:
                    return found
            with suppress(OSError):
                self.flush()  # its index: with a damaged one nothing would ever be kept
            return None

        def save_overload(self, signature: Any, data: Any) -> None:
            with suppress(OSError, EOFError, UnpicklingError):  # no room; it reads the index, too
                super().save_overload(signature, data)

    return Cache


def _check() -> None:
    """Before anything of numba is loaded."""
    if not numba:
        raise MissingExtra("numba", "sim", "the compiled loops of the simulator")
    prepare()


def _share_calls(function: Callable[..., Any]) -> None:
    assert isinstance(function, FunctionType)
    for name in _names(function.__code__):
        called = function.__globals__.get(name)
        if isinstance(called, FunctionType) and called.__module__.split(".")[1:2] in [[room] for room in _ROOMS]:
            shared(called)


def _names(code: CodeType) -> Iterator[str]:
    """All names that a function and its comprehensions look up."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


# --- where machine code is kept --------------------------------------------------------------------------------------


def _module_of(function: Callable[..., Any]) -> str:
    """The name of the module that defines a function."""
    return str(function.__module__)


def _directory(modules: frozenset[str]) -> Path:
    """The directory for machine code that is made from these modules and from what they import."""
    digest = hashlib.blake2b(digest_size=8)
    for name in sorted(closure(modules, ours=True)):
        # As they were imported: a file that has changed since is not what runs here.
        digest.update(f"{name} {seen(name)}\0".encode())
    home = _home()
    directory = home / digest.hexdigest()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        os.utime(directory)
        _tidy(home)
    except OSError:
        pass  # numba finds another place, or compiles again
    return directory


def _home() -> Path:
    """compiled/ below EBB_CACHE_DIR, else below the user's cache."""
    if given := os.environ.get("EBB_CACHE_DIR"):
        return Path(given).absolute() / "compiled"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ebbtide" / "compiled"


@functools.cache
def _tidy(home: Path) -> None:
    """Remove, once a process, machine code of sources that are long gone."""
    oldest = time.time() - _KEPT_S
    for old in home.iterdir():
        if old.stat().st_mtime < oldest:
            shutil.rmtree(old, ignore_errors=True)
