"""Runs one cell in a namespace, as IPython would: on a rank, but knows nothing of actors or meshes.

A cell's source is Python already (the kernel has transformed it). Its last expression is shown, `await` works
at the top level, and its traceback begins at the cell's own first frame.
"""

from __future__ import annotations
import __future__

import ast
import builtins
import inspect
import linecache
import pprint
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import CodeType
from typing import Any

from monarch_kernel.kernel.rank.cell_loop import CellLoop
from monarch_kernel.kernel.rank.value_size import size_at_least

_FUTURES = {getattr(__future__, name).compiler_flag for name in __future__.all_feature_names}

_LINE = 79
_SMALL = 10_000
_PLAIN = (int, float, complex, bool, str, bytes, type(None))
_CONTAINERS = (list, tuple, dict, set, frozenset)
_RICH = (
    "_ipython_display_", "_repr_mimebundle_", "_repr_html_", "_repr_png_", "_repr_jpeg_", "_repr_svg_",
    "_repr_markdown_", "_repr_latex_", "_repr_json_", "_repr_javascript_", "_repr_pdf_",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell as it travels to ranks.

    Attributes:
        id: whom its output belongs to.
        source: Python source; its line numbers are those of `raw`.
        filename: what tracebacks and breakpoints call it.
        raw: the whole cell as the user wrote it, magic line included.
        quiet: do not show the last expression (the cell ends in a semicolon).
    """

    id: str
    source: str
    filename: str
    raw: str
    quiet: bool = False


@dataclass(slots=True)
class Outcome:
    """How a cell ended: `error` is None when it ran through."""

    value: Any = None
    has_value: bool = False
    error: BaseException | None = None


class CellRunner:
    """Runs cells, one after the other, in one namespace.

    Args:
        namespace: the globals of all cells.
        show: is given the value of a cell's last expression, unless that is None.
    """

    def __init__(self, namespace: dict[str, Any], show: Callable[[Any], None]) -> None:
        self.namespace = namespace
        self._show = show
        self._flags = 0
        self.loop = CellLoop()

    def run(self, cell: Cell) -> Outcome:
        """Run `cell`; whatever it raises is in the outcome, even SystemExit and KeyboardInterrupt."""
        remember_source(cell.filename, cell.raw)
        outcome = Outcome()
        try:
            body, last = self._compile(cell)
            with self.loop.offered():
                self._execute(body)
                if last is not None:
                    outcome.value = self._execute(last)
            if last is not None:
                outcome.has_value = True
                if not cell.quiet and outcome.value is not None:
                    builtins._ = outcome.value  # type: ignore[attr-defined]
                    self._show(outcome.value)
        except BaseException as error:
            outcome.error = error
            outcome.has_value = False
            error.__traceback__ = _from_file(error.__traceback__, cell.filename)
        return outcome

    def close(self) -> None:
        """End what cells left behind in their event loop."""
        self.loop.close()

    def _compile(self, cell: Cell) -> tuple[CodeType, CodeType | None]:
        tree = ast.parse(cell.source, cell.filename)
        last: ast.expr | None = None
        if tree.body and isinstance(tree.body[-1], ast.Expr):
            last = tree.body.pop().value  # type: ignore[attr-defined]
        body = self._code(tree, cell.filename, "exec")
        return body, None if last is None else self._code(ast.Expression(last), cell.filename, "eval")

    def _code(self, tree: ast.Module | ast.Expression, filename: str, mode: str) -> CodeType:
        flags = self._flags | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        code: CodeType = compile(tree, filename, mode, flags, dont_inherit=True)
        for flag in _FUTURES:  # `from __future__ import ...` holds for the cells that follow
            self._flags |= code.co_flags & flag
        return code

    def _execute(self, code: CodeType) -> Any:
        if not code.co_flags & inspect.CO_COROUTINE:
            return eval(code, self.namespace)
        return self.loop.run(eval(code, self.namespace))


def remember_source(filename: str, source: str) -> None:
    """Let tracebacks, `inspect` and debuggers of this process find the source of a cell."""
    lines = source.splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        lines[-1] += "\n"
    linecache.cache[filename] = (len(source), None, lines, filename)


def check_syntax(source: str, filename: str) -> None:
    """Raise SyntaxError if ranks could not compile this."""
    compile(source, filename, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)


def plain_text(value: Any) -> str | None:
    """How a value is shown when text is all there is to it; None where it takes IPython to tell."""
    kind = type(value)
    if kind in _PLAIN:
        return repr(value)
    if kind in _CONTAINERS:
        if size_at_least(value, _SMALL) > _SMALL:  # its repr is not one line, and may be huge
            return None
        text = repr(value)
        return text if len(text) <= _LINE and "\n" not in text else None
    if isinstance(value, type) or any(_has(value, name) for name in _RICH):
        return None
    return repr(value)


def fallback_bundle(value: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The MIME bundle of a value where there is no IPython."""
    data: dict[str, Any] = {}
    metadata: dict[str, Any] = {}
    if _has(value, "_repr_mimebundle_"):
        bundle = value._repr_mimebundle_()
        data, metadata = bundle if isinstance(bundle, tuple) else (bundle, {})
        data = dict(data or {})
    if _has(value, "_repr_html_") and (html := value._repr_html_()) is not None:
        data.setdefault("text/html", html)
    if "text/plain" not in data:
        container = isinstance(value, _CONTAINERS)
        data["text/plain"] = pprint.pformat(value, sort_dicts=False) if container else repr(value)
    return data, metadata


def _has(value: Any, name: str) -> bool:
    # Looked up on the type: objects that answer to any attribute (mocks, proxies) are not rich by that.
    return callable(getattr(type(value), name, None))


def _from_file(traceback: Any, filename: str) -> Any:
    """A traceback without the frames above the first one in `filename`; whole if there is none."""
    at = traceback
    while at is not None:
        if at.tb_frame.f_code.co_filename == filename:
            return at
        at = at.tb_next
    return traceback


def where_is(thread: int, is_foreign: Callable[[str], bool]) -> tuple[str, int, str] | None:
    """File, line and function of the innermost frame of `thread` in a file that is not foreign."""
    frames: Mapping[int, Any] = sys._current_frames()
    frame = frames.get(thread)
    innermost = None
    while frame is not None:
        code = frame.f_code
        if not is_foreign(code.co_filename):
            return code.co_filename, frame.f_lineno, code.co_name
        innermost = innermost or (code.co_filename, frame.f_lineno, code.co_name)
        frame = frame.f_back
    return innermost
