"""Test that no module imports another in a circle, at import time or for annotations only."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping

from tests.architecture.test_rooms import ROOMS, ROOT, python_files, tree


def modules() -> dict[str, ast.Module]:
    """All modules of the rooms by their dotted names; a package goes by the name of its directory."""
    found = {}
    for path in python_files(*ROOMS):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = tree(path)
    return found


def imports_of(name: str, module: ast.Module, known: Mapping[str, object]) -> Iterator[str]:
    """Modules that a module imports anywhere in its text, TYPE_CHECKING blocks and function bodies included."""
    for node in ast.walk(module):
        targets: list[str] = []
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
            # `from package import module` imports the module, and nothing of a package that holds no more than it.
            targets = [
                full if (full := f"{node.module}.{alias.name}") in known else node.module for alias in node.names
            ]
        yield from (target for target in targets if target in known and target != name)


def circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Strongly connected components of more than one module (Tarjan 1972)."""
    numbers: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        numbers[name] = lowest[name] = len(numbers)
        stack.append(name)
        for target in sorted(graph[name]):
            if target not in numbers:
                visit(target)
                lowest[name] = min(lowest[name], lowest[target])
            elif target in stack:
                lowest[name] = min(lowest[name], numbers[target])
        if lowest[name] == numbers[name]:
            place = stack.index(name)
            if len(stack) - place > 1:
                found.append(sorted(stack[place:]))
            del stack[place:]

    for name in graph:
        if name not in numbers:
            visit(name)
    return found


def test_no_modules_import_each_other_in_a_circle() -> None:
    known = modules()
    graph = {name: set(imports_of(name, module, known)) for name, module in known.items()}
    assert not circles(graph)


def test_the_check_for_circles_can_fail() -> None:
    known = {
        "a": ast.parse("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from b import C\n"),
        "b": ast.parse("def f():\n    import c\n"),
        "c": ast.parse("import a\nimport d"),
        "d": ast.parse(""),
    }
    graph = {name: set(imports_of(name, module, known)) for name, module in known.items()}
    assert circles(graph) == [["a", "b", "c"]]
