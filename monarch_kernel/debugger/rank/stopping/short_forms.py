"""Format values and their children with bounded length and work, whatever the value.

A tensor on a device is never read, because that would wait for the device, which may be hanging. Of a large array, only
the first elements are read. A large container is never traversed. User code runs only if a class defines `__repr__`.
"""

from __future__ import annotations

import itertools
import reprlib
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

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

    def repr1(self, x: Any, level: int) -> str:
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

    def repr_instance(self, x: Any, level: int) -> str:
        """Format any other object."""
        text = repr(x)
        return text if len(text) <= self.maxother else f"{text[: self.maxother - 3]}..."


_CONTAINER_REPRS = (list.__repr__, tuple.__repr__, dict.__repr__, set.__repr__, frozenset.__repr__)
_short, _long = Shortener(SHORT, 10, _FEW), Shortener(LONG, 200, _MANY)


def short(value: Any) -> str:
    """Format a value in one line of at most about `SHORT` characters."""
    text = _safe(_short, value)
    text = " ".join(text.split("\n")) if "\n" in text else text
    return text if len(text) <= SHORT else f"{text[: SHORT - 3]}..."


def long(value: Any) -> str:
    """Return the long form of a value, for a request: several lines, at most about `LONG` characters."""
    text = _safe(_long, value)
    return text if len(text) <= LONG else f"{text[: LONG - 3]}..."


def _safe(form: Shortener, value: Any) -> str:
    try:
        return form.repr(value)
    except RecursionError:
        return f"<{type_name(value)} that is nested too deeply>"


def type_name(value: Any) -> str:
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
            torch: Any = sys.modules.get("torch")
            if torch is not None and isinstance(array, torch.Tensor):
                array = array.resolve_conj().resolve_neg()
                array = (array.float() if array.dtype in (torch.bfloat16, torch.float16) else array).numpy()
            return _measured(array)
    except Exception:  # see `_values`
        return ""


def _measured(array: Any) -> str:
    numpy: Any = sys.modules["numpy"]
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


def _listed(values: Any) -> str:
    """Format a number, or lists of numbers, with four digits."""
    if isinstance(values, list):
        return f"[{', '.join(map(_listed, values))}]"
    if isinstance(values, float):
        return repr(float(f"{values:.4g}"))
    return f"{values:.4g}" if isinstance(values, complex) else str(values)


@contextmanager
def _plainly() -> Generator[None]:
    """Run torch as if no mode were active (autograd, functorch, a profiler of user code, ...)."""
    torch: Any = sys.modules.get("torch")
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


def put(container: Any, key: Any, value: Any) -> None:
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


def attributes(value: Any) -> dict[str, Any]:
    """Return the attributes of an object itself, and the cheap ones of an array. No property is computed."""
    if isinstance(value, (*_PLAIN, *_FUNCTIONS)):
        return {}
    if _is_array(type(value)) and _static(value, "shape") is not _ABSENT:
        names = ("shape", "dtype", "device", "requires_grad", "is_leaf", "strides")
        return {name: found for name in names if (found := _static(value, name)) is not _ABSENT}
    found: dict[str, Any] = {}
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


def _static(value: Any, name: str) -> Any:
    try:
        return type.__getattribute__(value, name) if isinstance(value, type) else object.__getattribute__(value, name)
    except Exception:
        return _ABSENT


def _is_sequence(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray, memoryview))


__all__ = [
    "LONG",
    "PAGE",
    "SHORT",
    "Attribute",
    "array_form",
    "attributes",
    "children",
    "counts",
    "long",
    "put",
    "short",
    "type_name",
]
