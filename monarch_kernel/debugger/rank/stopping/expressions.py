"""Run source in a frame: conditions, input of the user at a stop, assignments to variables."""

from __future__ import annotations

import ast
import ctypes
import inspect
import itertools
import reprlib
import string
import sys
import textwrap
import traceback
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any

# Format values and their children with bounded length and work, whatever the value.
#
# A tensor on a device is never read, because that would wait for the device, which may be hanging. Of a large array,
# only the first elements are read. A large container is never traversed. User code runs only if a class defines
# `__repr__`.

#: The maximum lengths of a short form and of the answer to an evaluation (characters).
SHORT, LONG = 200, 20_000
#: Arrays on the CPU with at most this many elements are shown in full, in the short and in the long form.
_FEW, _MANY = 8, 1000
#: Arrays in this process's memory with at most this many elements are read completely, larger ones only at the start.
_MEASURED = 1 << 15
_FIRST = 4
#: The number of children that are returned without a request for a page.
PAGE = 1000

_PLAIN = (int, float, complex, bool, bytes, str, type(None), type(Ellipsis), range, slice)
_FUNCTIONS = (FunctionType, BuiltinFunctionType, MethodType)


class Shortener(reprlib.Repr):
    """`repr` of limited length: arrays by their shape, containers by their first items."""

    def __init__(self, limit: int, items: int, elements: int) -> None:
        super().__init__()
        self.maxlevel = 4
        self.maxtuple = self.maxlist = self.maxset = self.maxfrozenset = self.maxdeque = self.maxdict = items
        self.maxarray = items
        self.maxstring = self.maxlong = self.maxother = limit
        self._elements = elements

    def repr1(self, x: object, level: int) -> str:
        """Format a value, and each value inside it."""
        kind = type(x)
        array = array_form(x, self._elements)
        if array is not None:
            return array
        if isinstance(x, (bytes, bytearray)) and len(x) > self.maxother:
            return f"{x[: self.maxother // 4]!r}... ({len(x)} bytes)"
        if kind.__repr__ is object.__repr__:
            return f"<{type_name(x)} object>"
        if isinstance(x, (list, tuple, dict, set, frozenset)) and kind.__repr__ in _CONTAINER_REPRS:
            text = super().repr1(x, level)
            return text if kind in (list, tuple, dict, set, frozenset) else f"{kind.__name__}({text})"
        try:
            return super().repr1(x, level)
        except Exception as error:
            return f"<{type_name(x)} whose repr raised {type(error).__name__}>"

    def repr_int(self, x: int, level: int) -> str:
        """Format an integer. A huge one is not converted, because that takes time quadratic in its digits."""
        if x.bit_length() > 4 * self.maxlong:
            return f"<int of {x.bit_length()} bits>"
        return super().repr_int(x, level)

    def repr_instance(self, x: object, level: int) -> str:
        """Format any other object."""
        text = repr(x)
        return text if len(text) <= self.maxother else f"{text[: self.maxother - 3]}..."


_CONTAINER_REPRS = (list.__repr__, tuple.__repr__, dict.__repr__, set.__repr__, frozenset.__repr__)
_short, _long = Shortener(SHORT, 10, _FEW), Shortener(LONG, 200, _MANY)


def short(value: object) -> str:
    """Format a value in one line of at most about `SHORT` characters."""
    text = _safe(_short, value)
    text = " ".join(text.split("\n")) if "\n" in text else text
    return text if len(text) <= SHORT else f"{text[: SHORT - 3]}..."


def long(value: object) -> str:
    """Return the long form of a value, for a request: several lines, at most about `LONG` characters."""
    text = _safe(_long, value)
    return text if len(text) <= LONG else f"{text[: LONG - 3]}..."


def _safe(form: Shortener, value: object) -> str:
    try:
        return form.repr(value)
    except RecursionError:
        return f"<{type_name(value)} that is nested too deeply>"


def type_name(value: object) -> str:
    """Return the name of its class, with the module unless that is `builtins` or `__main__`."""
    kind = type(value)
    module = kind.__module__
    return kind.__qualname__ if module in ("builtins", "__main__") else f"{module}.{kind.__qualname__}"


def array_form(value: Any, elements: int) -> str | None:
    """Format an array that is not small: `tensor(shape=(3, 4), dtype=torch.float32, device='cuda:0')`; else None.

    Arrays are recognised by their attributes, so neither torch nor numpy is needed.
    """
    kind = type(value)
    if not _is_array(kind):
        return None
    described = getattr(kind, "_short_form_", None)
    if callable(described):  # a handle of a tensor on a mesh
        return str(described(value))
    root = kind.__module__.partition(".")[0]
    try:
        shape, dtype = tuple(value.shape), getattr(value, "dtype", None)
    except Exception:
        return None
    if root == "pandas":
        return f"<{kind.__name__} {' x '.join(map(str, shape))}>"
    device = getattr(value, "device", None)
    count = 1
    for size in shape:
        count *= int(size)
    name = "tensor" if kind.__name__ == "Tensor" else "array" if kind.__name__ == "ndarray" else kind.__name__
    place = "" if device is None or root == "numpy" else f", device='{device}'"
    facts = f"shape={shape}, dtype={dtype}{place}"
    if count <= elements and (device is None or str(device) == "cpu"):
        values = _values(value) if elements == _FEW else ""  # a user who requests the value gets its repr
        return f"{name}({values}, {facts})" if values else None
    figures = _figures(value)
    return f"{name}({facts}{f', {figures}' if figures else ''})"


def _readable(value: Any) -> Any:
    """Return a plain array in this process's memory that can be read without user code; None for other values.

    A tensor is detached. Subclasses are not read: reading a part of a sharded tensor may require a collective.
    """
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None and type(value) is numpy.ndarray:
        return value if value.dtype.kind in "biufc" else None
    if torch is None or type(value) not in (torch.Tensor, torch.nn.Parameter):
        return None
    plain = value.layout is torch.strided and not (value.is_quantized or value.is_nested)
    if not plain or torch._C._functorch.is_functorch_wrapped_tensor(value):
        return None
    # FSDP temporarily releases the memory of parameters.
    return value.detach() if value.untyped_storage().nbytes() or not value.numel() else None


def _values(value: Any) -> str:
    try:
        with _plainly():
            array = _readable(value)
            return "" if array is None else _listed(array.tolist())
    except Exception:  # packed types, which only special kernels can read
        return ""


def _figures(value: Any) -> str:
    """Format `min=-3, max=4.1, mean=0.2` of an array; its first elements if it is large; "" if it is not read."""
    try:
        with _plainly():
            array = _readable(value)
            if array is None or str(getattr(array, "device", "cpu")) != "cpu":
                return ""
            if array.nbytes > _MEASURED * array.itemsize:
                row = array
                while row.ndim > 1:
                    row = row[0]
                return f"first={_listed(row[:_FIRST].tolist())[:-1]}, ...]"
            torch: ModuleType | None = sys.modules.get("torch")
            if torch is not None and isinstance(array, torch.Tensor):
                array = array.resolve_conj().resolve_neg()
                array = (array.float() if array.dtype in (torch.bfloat16, torch.float16) else array).numpy()
            return _measured(array)
    except Exception:  # see `_values`
        return ""


def _measured(array: Any) -> str:
    numpy = sys.modules["numpy"]
    fine = array[numpy.isfinite(array)]
    nans = int(numpy.isnan(array).sum())
    infinite = int(array.size - fine.size - nans)
    parts: list[str] = []
    if fine.size:
        ends = [] if fine.dtype.kind == "c" else [("min", fine.min().item()), ("max", fine.max().item())]
        mean = fine.mean(dtype=numpy.complex128 if fine.dtype.kind == "c" else numpy.float64).item()
        parts = [f"{name}={_listed(number)}" for name, number in [*ends, ("mean", mean)]]
    parts += [f"{count} {name}" for name, count in (("NaN", nans), ("infinite", infinite)) if count]
    return ", ".join(parts)


def _listed(values: object) -> str:
    """Format a number, or lists of numbers, with four digits."""
    if isinstance(values, list):
        return f"[{', '.join(map(_listed, values))}]"
    if isinstance(values, float):
        return repr(float(f"{values:.4g}"))
    return f"{values:.4g}" if isinstance(values, complex) else str(values)


@contextmanager
def _plainly() -> Generator[None]:
    """Run torch as if no mode were active (autograd, functorch, a profiler of user code, ...)."""
    torch = sys.modules.get("torch")
    if torch is None:
        yield
        return
    with torch.no_grad(), torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
        yield


def _is_array(kind: type) -> bool:
    roots = ("torch", "numpy", "jax", "jaxlib", "cupy", "pandas")
    if callable(getattr(kind, "_short_form_", None)) or kind.__module__.partition(".")[0] in roots:
        return True
    return any(base.__module__.startswith("torch") and base.__name__ == "Tensor" for base in kind.__mro__)


def counts(value: Any) -> tuple[int, int]:
    """Return how many children a value has: (named, indexed). Only lengths are read."""
    if isinstance(value, (*_PLAIN, *_FUNCTIONS)):
        return 0, 0
    try:
        if isinstance(value, dict):
            return len(value) + len(attributes(value)), 0
        if isinstance(value, (list, tuple)):
            return len(attributes(value)), len(value)
        if isinstance(value, (set, frozenset)):
            return 0, len(value)
        if _is_sequence(value):
            return len(attributes(value)), len(value)
        if rows := _rows(value):
            return len(attributes(value)), rows
    except Exception:  # a `__len__` of user code that fails
        return 0, 0
    return len(attributes(value)), 0


def children(value: Any, start: int = 0, count: int = 0) -> list[tuple[str, Any, Any]]:
    """List (name, key, value) of `count` children (0: at most `PAGE`) from `start` on, those with an index first.

    `key` is for `put`: an index, a key, or an `Attribute`; None if the child cannot be replaced.
    """
    if isinstance(value, (*_PLAIN, *_FUNCTIONS)):
        return []
    stop = start + (count or PAGE)
    items: list[tuple[str, Any, Any]] = []
    if isinstance(value, dict):
        items = [(short(key), key, item) for key, item in itertools.islice(value.items(), start, stop)]
    elif isinstance(value, (set, frozenset)):
        return [(f"[{i}]", None, item) for i, item in enumerate(itertools.islice(value, start, stop), start)]
    elif isinstance(value, (list, tuple)) or _is_sequence(value):
        items = [(f"[{i}]", i, value[i]) for i in range(start, min(stop, len(value)))]
    elif rows := _rows(value):
        with _plainly():  # also on a device: indexing a row does not wait for it
            array = _readable(value)
            items = [(f"[{i}]", i, array[i]) for i in range(start, min(stop, rows))]
    elsewhere = len(value) if isinstance(value, dict) or _is_sequence(value) else _rows(value)
    rest = list(attributes(value).items())[max(0, start - elsewhere) : max(0, stop - elsewhere)]
    return items + [(name, Attribute(name), item) for name, item in rest]


def _rows(value: Any) -> int:
    """Return the number of rows of an array that can be indexed; 0 for other values."""
    if not _is_array(type(value)):
        return 0
    with _plainly():
        array = _readable(value)
        return 0 if array is None or not array.ndim else int(array.shape[0])


class Attribute(str):
    """The name of an attribute, as opposed to a key of a mapping."""

    __slots__ = ()


def put(container: Any, key: object, value: object) -> None:
    """Replace a child.

    Raises:
        TypeError, AttributeError, ...: the container does not allow it.
    """
    if isinstance(key, Attribute):
        setattr(container, str(key), value)
    elif key is None:
        raise TypeError(f"the items of a {type_name(container)} cannot be replaced")
    else:
        container[key] = value


def attributes(value: Any) -> dict[str, object]:
    """Return the attributes of an object itself, and the cheap ones of an array. No property is computed."""
    if isinstance(value, (*_PLAIN, *_FUNCTIONS)):
        return {}
    if _is_array(type(value)) and _static(value, "shape") is not _ABSENT:
        names = ("shape", "dtype", "device", "requires_grad", "is_leaf", "strides")
        return {name: found for name in names if (found := _static(value, name)) is not _ABSENT}
    found: dict[str, object] = {}
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and (slot := _static(value, name)) is not _ABSENT:
                found[name] = slot
    own = _static(value, "__dict__")
    if isinstance(own, Mapping):
        hidden = isinstance(value, (type, ModuleType))
        found.update((str(k), v) for k, v in list(own.items()) if not (hidden and str(k).startswith("__")))
    return found


_ABSENT = object()


def _static(value: object, name: str) -> Any:
    try:
        return type.__getattribute__(value, name) if isinstance(value, type) else object.__getattribute__(value, name)
    except Exception:
        return _ABSENT


def _is_sequence(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray, memoryview))


_FILE = "<debugger>"

Names = dict[str, object]


def value_of(frame: FrameType, source: str, extra: Names | None = None) -> object:
    """Evaluate an expression in a frame.

    Args:
        frame: provides the names; it may have ended.
        source: one expression.
        extra: further names, hidden by those of the function.

    Raises:
        BaseException: raised by the expression; SyntaxError if it is not one.
    """
    code = _compiled(source.strip())
    if not extra and not any(isinstance(constant, CodeType) for constant in code.co_consts):
        return eval(code, frame.f_globals, frame.f_locals)
    # Lambdas and comprehensions see only globals.
    return eval(code, _merged(frame, extra))


def run(frame: FrameType, source: str, extra: Names) -> tuple[bool, Any]:
    """Run statements or an expression in a frame. Return whether the last one is an expression, and its value.

    Names that statements bind become variables of the function if it has such variables, and go to `extra` otherwise.
    At the top level of a module or cell, they become globals.

    Raises:
        BaseException: raised by the source. The statements before it have taken effect.
    """
    body = ast.parse(textwrap.dedent(source).strip(), _FILE)
    last: CodeType | None = None
    declared = {name for node in body.body if isinstance(node, ast.Global | ast.Nonlocal) for name in node.names}
    body.body = [node for node in body.body if not isinstance(node, ast.Nonlocal)]
    if body.body and isinstance(body.body[-1], ast.Expr):
        expression = body.body.pop()
        assert isinstance(expression, ast.Expr)
        last = compile(ast.Expression(expression.value), _FILE, "eval", dont_inherit=True)
    code = compile(body, _FILE, "exec", dont_inherit=True)
    with names_of(frame, extra, declared) as names:
        exec(code, names)
        return last is not None, None if last is None else eval(last, names)


@contextmanager
def names_of(frame: FrameType, extra: Names, declared: Collection[str] = ()) -> Generator[Names]:
    """Provide all names of a frame as globals to run code with.

    Names that the code binds are stored in the frame, or in `extra`.

    Args:
        declared: the names that the code declares as global.
    """
    if frame.f_locals is frame.f_globals:
        yield frame.f_globals
        return
    names = _merged(frame, extra)
    before = dict(names)
    try:
        yield names
    finally:
        _keep(frame, before, names, declared, extra)


def assign(frame: FrameType, name: str, value: object) -> None:
    """Set a variable of a frame.

    Raises:
        NameError: the function has no such variable.
    """
    code = frame.f_code
    if not code.co_flags & inspect.CO_OPTIMIZED:
        frame.f_locals[name] = value
        return
    if name not in code.co_varnames and name not in code.co_cellvars and name not in code.co_freevars:
        raise NameError(f"{code.co_qualname} has no variable {name!r}")
    names = frame.f_locals
    names[name] = value
    if sys.version_info < (3, 13):
        # Until Python 3.13, the dictionary was a copy (PEP 667).
        ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))


def fill(frame: FrameType, template: str, show: Callable[[object], str]) -> str:
    """Format a log point: each `{expression}` is replaced by its value, as `show` formats it, or by its error.

    Format specifications and `!r` work as in f-strings; `{{` is a literal brace.
    """
    try:
        parts = list(string.Formatter().parse(template))
    except ValueError:  # an unmatched brace
        return template
    text: list[str] = []
    for literal, source, specification, conversion in parts:
        text.append(literal)
        if source is None:
            continue
        try:
            value = value_of(frame, source)
            if conversion or specification:
                converted = {"r": repr, "a": ascii}.get(conversion or "s", str if conversion else lambda it: it)(value)
                text.append(format(converted, specification or ""))
            else:
                text.append(value if isinstance(value, str) else show(value))
        except Exception as error:
            text.append(f"<{summary(error)}>")
    return "".join(text)


def summary(error: BaseException) -> str:
    """Format an exception in one line, like the last line of a traceback."""
    try:
        lines = traceback.format_exception_only(error)
    except Exception:  # its own __str__ failed
        return type(error).__name__
    text = lines[-1].strip() if isinstance(error, SyntaxError) else "".join(lines).strip()
    return " ".join(text.split("\n")[:1]) or type(error).__name__


@lru_cache(maxsize=256)
def _compiled(source: str) -> CodeType:
    return compile(source, _FILE, "eval", dont_inherit=True)


def _merged(frame: FrameType, extra: Names | None) -> Names:
    """Merge all names of a frame into one set of globals."""
    return {**frame.f_globals, **(extra or {}), **frame.f_locals}


def _keep(frame: FrameType, before: Names, after: Names, declared: Collection[str], extra: Names) -> None:
    """Store the names that statements have bound."""
    missing = object()
    for name, value in after.items():
        if before.get(name, missing) is value or name == "__builtins__":
            continue
        if name in declared and name not in frame.f_locals:
            frame.f_globals[name] = value
            continue
        try:
            assign(frame, name, value)
        except NameError:
            extra[name] = value
    for name in before.keys() - after.keys():
        extra.pop(name, None)
        if name in declared:
            frame.f_globals.pop(name, None)
