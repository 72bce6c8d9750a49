"""What a source imports from which module, read from its text."""

from __future__ import annotations

import ast
import dis
from collections.abc import Iterable, Iterator, Mapping
from types import CodeType

_STORES = frozenset({"STORE_NAME", "STORE_GLOBAL"})


class Imports:
    """The import statements of one source.

    Attributes:
        modules: the modules that it imports when it is executed, and those that may be ones (``from a import b``).
        names: what it imports by ``from``, outside functions and classes: by its own name, (module, name there).

    Args:
        source: the text.
        name: of the module, which relative imports start from.
        is_package: whether it is the ``__init__`` of a package.

    Raises:
        SyntaxError: the text is no Python.
    """

    def __init__(self, source: bytes | str, name: str, is_package: bool) -> None:
        self.modules: set[str] = set()
        self.names: dict[str, tuple[str, str]] = {}
        base = name if is_package else name.rpartition(".")[0]
        for node, at_top in _statements(ast.parse(source).body, True):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    self.modules.update(_with_parents(alias.name))
            elif isinstance(node, ast.ImportFrom):
                origin = _absolute(node, base)
                self.modules.update(_with_parents(origin))
                for alias in node.names:
                    self.modules.add(f"{origin}.{alias.name}")
                    if at_top:
                        self.names[alias.asname or alias.name] = (origin, alias.name)

    def names_from(self, module: str) -> dict[str, str]:
        """What is imported from one module: the name there by the own name."""
        return {own: name for own, (origin, name) in self.names.items() if origin == module}


def _statements(body: Iterable[ast.stmt], at_top: bool) -> Iterator[tuple[ast.stmt, bool]]:
    """All statements that run when the source is executed, and whether they bind names of the module."""
    for node in body:
        yield node, at_top
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        inside = at_top and not isinstance(node, ast.ClassDef)
        for field in ("body", "orelse", "finalbody"):
            yield from _statements(getattr(node, field, ()), inside)
        for handler in getattr(node, "handlers", ()):
            yield from _statements(handler.body, inside)
        for case in getattr(node, "cases", ()):
            yield from _statements(case.body, inside)


def _absolute(node: ast.ImportFrom, base: str) -> str:
    for _ in range(node.level - 1):
        base = base.rpartition(".")[0]
    if not node.level:
        return node.module or ""
    return ".".join(part for part in (base, node.module) if part)


def _with_parents(name: str) -> Iterator[str]:
    while name:
        yield name
        name = name.rpartition(".")[0]


def in_order(modules: Iterable[str], imports: Mapping[str, Iterable[str]]) -> list[str]:
    """Modules so that each comes after those that it imports; of a circle, any may be the first."""
    wanted = sorted(set(modules))
    order: list[str] = []
    seen: set[str] = set()

    def visit(name: str) -> None:
        todo: list[tuple[str, Iterator[str]]] = [(name, iter(sorted(imports.get(name, ()))))]
        seen.add(name)
        while todo:
            current, inner = todo[-1]
            nearest = next((each for each in inner if each in chosen and each not in seen), None)
            if nearest is None:
                todo.pop()
                order.append(current)
            else:
                seen.add(nearest)
                todo.append((nearest, iter(sorted(imports.get(nearest, ())))))

    chosen = set(wanted)
    for name in wanted:
        if name not in seen:
            visit(name)
    return order


def stored_names(code: CodeType) -> set[str]:
    """The names that the code of a module or class sets in its namespace."""
    return {instruction.argval for instruction in dis.get_instructions(code) if instruction.opname in _STORES}
