"""What numba compiles beside our loops, and need not: parts of them by themselves, and its runtime.

Numba optimises each function with all that it calls, and makes machine code of it, before it does the same with what
calls it: a function seven calls down is compiled seven times. Here that is done once, in the loop that is called from
Python. And it compiles functions that count references before any loop, also where that is loaded only: here this is
done when they are first asked for (19 MiB of a process that never does).

What this changes in numba is no public interface of it: a numba that lacks it compiles as it always does.
"""

from __future__ import annotations

import functools
from importlib import import_module
from typing import Any, Final

#: Of numba's library of a function, and of what makes them.
_OF_LIBRARY: Final = ("_optimize_final_module", "_finalize_final_module", "_finalize_dynamic_globals")
_OF_CODEGEN: Final = ("_create_empty_module", "_add_module")


@functools.cache
def part_compiler() -> Any:
    """The pipeline for such functions, for numba's `pipeline_class`; None: this numba has no place for it."""
    binding: Any = import_module("llvmlite.binding")
    codegen: Any = import_module("numba.core.codegen")
    compiler: Any = import_module("numba.core.compiler")
    for name, parts in (("JITCodeLibrary", _OF_LIBRARY), ("JITCPUCodegen", _OF_CODEGEN)):
        if not all(hasattr(getattr(codegen, name, None), part) for part in parts):
            return None

    class Part(codegen.JITCodeLibrary):  # type: ignore[misc]
        def _optimize_final_module(self) -> None:
            pass

        def _finalize_final_module(self) -> None:
            self._finalize_dynamic_globals()
            # Only what numba writes to: where the constants of the function are.
            names = [found.name for found in self._final_module.global_variables if "NumbaEnv" in found.name]
            text = "".join(f'@"{name}" = common global i8* null\n' for name in names)
            module = binding.parse_assembly(f"{self._codegen._create_empty_module(self.name)}\n{text}")
            self._codegen._add_module(module)
            self._codegen._engine.finalize_object()
            self._finalized = True

    class PartCompiler(compiler.Compiler):  # type: ignore[misc]
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            if self.state.library is None:
                self.state.library = Part(self.state.targetctx.codegen(), "part")

    return PartCompiler


@functools.cache
def runtime_later() -> None:
    """Let numba compile its runtime when it is first linked into a function. To be called before all compiling."""
    runtime: Any = import_module("numba.core.runtime.nrtdynmod")
    if not hasattr(runtime, "compile_nrt_functions"):
        return
    compile_now = runtime.compile_nrt_functions

    class Library:
        """Numba's own, from the first look at it on."""

        def __init__(self, context: Any) -> None:
            self._context = context

        @functools.cached_property
        def _made(self) -> Any:
            return compile_now(self._context)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._made, name)

    runtime.compile_nrt_functions = Library
