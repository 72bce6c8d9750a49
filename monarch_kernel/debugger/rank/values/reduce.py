"""Reduce a value to its leaves: take containers, modules, optimizers, dataclasses and other objects apart.

Runs in the rank that has the value. User code is called only by `repr`, and no hook of a module or an optimizer runs.
No collective is entered (a state dict of a sharded module would enter one). At most one block is copied at a time.
torch and NumPy are used only if the process has imported them; otherwise no value is of their types.
"""

from __future__ import annotations

import array
import dataclasses
import enum
import functools
import math
import os
import re
import sys
import types
from collections import deque
from collections.abc import ItemsView, Iterable, Iterator, KeysView, Mapping, Sequence, ValuesView
from io import IOBase
from typing import TYPE_CHECKING, Any

from monarch_kernel.debugger.model.readings import (
    Contrast,
    Leaf,
    Reading,
    Stats,
    digest_of,
    root_digest,
    short,
    shown,
    shown_pair,
)
from monarch_kernel.debugger.rank.values.blocks import Array, Deadline, TimeLimitError, digest_of_block

if TYPE_CHECKING:
    from types import ModuleType

# Read NumPy arrays and plain lists of numbers as arrays of blocks; see `blocks`.

#: A list of at least this many numbers is read as an array.
LONG = 64

_SMALLEST_NORM = 1e-15  # the square of a smaller number loses digits in single precision


def number_array(values: Sequence[Any]) -> NumberArray | None:
    """Convert a long list or tuple of floats only, or of integers only, to an array; None for any other."""
    if len(values) < LONG or type(values[0]) not in (int, float):
        return None
    kind = type(values[0])
    if not all(type(value) is kind for value in values):
        return None
    try:
        return NumberArray(array.array("d" if kind is float else "q", values), type(values).__name__)
    except OverflowError:  # integers beyond 64 bits
        return None


class NumberArray(Array):
    """Packed Python numbers.

    Args:
        numbers: packed as C doubles or 64-bit integers.
        name: the type name of their original container.
    """

    def __init__(self, numbers: array.array[Any], name: str) -> None:
        super().__init__((len(numbers),), numbers.itemsize)
        self._numbers = numbers
        self._name = name

    def facts(self) -> str:
        """Describe the container and the type of the numbers: `list of 1,000 float`."""
        return f"{self._name} of {self.size:,} {'float' if self._numbers.typecode == 'd' else 'int'}"

    def read(self, deadline: Deadline) -> None:
        """See `Array`."""
        view = memoryview(self._numbers).cast("B")
        step = self.block * self.itemsize
        digests: list[bytes] = []
        for start in range(0, len(view), step):
            deadline.check()
            digests.append(digest_of_block(view[start : start + step]))
        self.digests = b"".join(digests)
        if self._numbers.typecode == "q":
            self.stats = Stats(None, min(self._numbers), max(self._numbers))
            return
        fine = [number for number in self._numbers if math.isfinite(number)]
        nans = sum(map(math.isnan, self._numbers))
        infs = self.size - nans - len(fine)
        self.stats = Stats(math.hypot(*fine), min(fine, default=None), max(fine, default=None), nans, infs)

    def digest_now(self, block: int) -> bytes:
        """See `Array`."""
        return digest_of_block(self.piece(block * self.block, self.block))

    def piece(self, start: int, count: int) -> bytes:
        """See `Array`."""
        return self._numbers[start : start + count].tobytes()

    def contrast(self, start: int, other: bytes) -> Contrast:
        """See `Array`."""
        theirs = array.array(self._numbers.typecode, other)
        ours = self._numbers[start : start + len(theirs)]
        size = self.itemsize
        mine = ours.tobytes()
        where = [
            at for at in range(len(ours)) if mine[at * size : at * size + size] != other[at * size : at * size + size]
        ]
        return contrast_of([(ours[at], theirs[at]) for at in where], start + where[0] if where else 0, len(theirs))

    def sample(self, count: int) -> str:
        """See `Array`."""
        return f"[{', '.join(map(shown, self._numbers[:count]))}]"


class NumpyArray(Array):
    """A NumPy array of any type that does not hold Python objects.

    Args:
        values: the array; it is not written to.
    """

    def __init__(self, values: Any) -> None:
        super().__init__(values.shape, values.itemsize)
        self._values = values
        self._numpy: ModuleType = sys.modules["numpy"]

    @property
    def block(self) -> int:
        """The number of elements per block."""
        return super().block if self.itemsize else 1

    def facts(self) -> str:
        """Describe element type and shape: `float32 [3, 4]`."""
        return f"{self._values.dtype.name if not self._values.dtype.names else self._values.dtype} {list(self.shape)}"

    def read(self, deadline: Deadline) -> None:
        """See `Array`."""
        digests: list[bytes] = []
        stats: list[Stats] = []
        with self._numpy.errstate(all="ignore"):
            for start in range(0, self.size, self.block):
                deadline.check()
                block = self._window(start, min(self.block, self.size - start))
                digests.append(digest_of_block(block.tobytes() if block.nbytes < 64 else block.view("u1").data))
                measured = self._measured(block)
                if measured is not None:
                    stats.append(measured)
        self.digests = b"".join(digests)
        self.stats = Stats.over(stats) if stats else None

    def _window(self, start: int, count: int) -> Any:
        """Return elements in row-major order, contiguous, in native byte order; copied only if necessary."""
        values = self._values
        if values.flags.c_contiguous:
            found = values.reshape(-1)[start : start + count]
        else:
            found = values.flat[start : start + count]  # copies only these elements
        if not found.dtype.isnative:
            found = found.astype(found.dtype.newbyteorder("="))
        return found.view(self._numpy.ndarray)

    def _measured(self, block: Any) -> Stats | None:
        numpy = self._numpy
        kind = block.dtype.kind
        if kind in "iub":
            return Stats(None, int(block.min()), int(block.max()))
        if kind not in "fc":
            return None
        if kind == "f" and block.itemsize >= 4:
            low, high, norm = float(block.min()), float(block.max()), math.sqrt(numpy.dot(block, block))
            fits = _SMALLEST_NORM < norm < math.inf or low == high == 0
            if fits and math.isfinite(low) and math.isfinite(high):
                return Stats(norm, low, high)
        # NaN or infinite elements, squares that do not fit the type, or a type for which NumPy is slow.
        wide = block.astype(numpy.complex128 if kind == "c" else numpy.float64)
        fine = wide[numpy.isfinite(wide)]
        nans = int(numpy.isnan(wide).sum())
        infs = len(wide) - nans - len(fine)
        largest = float(abs(fine).max()) if len(fine) else 0.0
        norm = largest * float(numpy.linalg.norm(fine / largest)) if largest else 0.0
        if kind == "c" or not len(fine):
            return Stats(norm, None, None, nans, infs)
        return Stats(norm, float(fine.min()), float(fine.max()), nans, infs)

    def digest_now(self, block: int) -> bytes:
        """See `Array`."""
        start = block * self.block
        return digest_of_block(self.piece(start, min(self.block, self.size - start)))

    def piece(self, start: int, count: int) -> bytes:
        """See `Array`."""
        return self._window(start, count).tobytes()

    def contrast(self, start: int, other: bytes) -> Contrast:
        """See `Array`."""
        numpy = self._numpy
        count = len(other) // self.itemsize
        ours = self._window(start, count)
        theirs = numpy.frombuffer(other, dtype=ours.dtype)
        raw = numpy.frombuffer(ours.tobytes(), "u1") != numpy.frombuffer(other, "u1")
        where = raw.reshape(count, self.itemsize).any(1).nonzero()[0]
        if not len(where):
            return Contrast(compared=count)
        first = int(where[0])
        texts = shown_pair(ours[first].item(), theirs[first].item())
        if ours.dtype.kind not in "biufc":
            return Contrast((start + first,), *texts, len(where), None, None, count)
        wide = numpy.complex128 if ours.dtype.kind == "c" else numpy.float64
        with numpy.errstate(all="ignore"):
            one, two = ours[where].astype(wide), theirs[where].astype(wide)
            gap = abs(one - two)
            scale = numpy.maximum(abs(one), abs(two))
            known = numpy.isfinite(gap)
            ratio = (gap / scale)[known & (scale > 0)]
        gap = gap[known]
        most = float(gap.max()) if len(gap) else None
        relative = float(ratio.max()) if len(ratio) else (0.0 if len(gap) else None)
        return Contrast((start + first,), *texts, len(where), most, relative, count)

    def sample(self, count: int) -> str:
        """See `Array`."""
        items = [shown(item) for item in self._window(0, min(count, self.size)).tolist()]
        return items[0] if not self.shape else f"[{', '.join(items)}]"


def contrast_of(pairs: Sequence[tuple[float, float]], first: int, compared: int) -> Contrast:
    """Compute the contrast of pairs of numbers that differ, the first of which is at position `first`."""
    if not pairs:
        return Contrast(compared=compared)
    most = relative = None
    for one, two in pairs:
        gap = abs(one - two)
        if math.isfinite(gap):
            scale = max(abs(one), abs(two))
            most = max(most or 0.0, float(gap))
            relative = max(relative or 0.0, gap / scale if scale else 0.0)
    return Contrast((first,), *shown_pair(*pairs[0]), len(pairs), most, relative, compared)


#: The time limit for reading in `digest` (seconds).
DIGEST_TIMEOUT = 5.0
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def plain_leaf(value: object, path: str = "") -> Leaf:
    """Build the leaf of a number, a text or None."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        text = repr(value)
        try:
            number = float(value)
        except OverflowError:
            number = None
        return Leaf(path, "number", type(value).__name__, short(text), content_of(text), number=number)
    content = bytes(value) if isinstance(value, bytes | bytearray) else None
    if content is None:
        content = (value if isinstance(value, str) else repr(value)).encode("utf-8", "surrogatepass")
    text = short(repr(value[:400] if isinstance(value, str | bytes | bytearray) else value))
    if isinstance(value, str | bytes | bytearray) and len(value) > 400:
        text = f"{text}  length {len(value):,}"
    return Leaf(path, "text", type(value).__name__, text, digest_of(content))


def object_leaf(value: object, path: str = "") -> Leaf:
    """Build the leaf of an object without parts: its `repr` without addresses, which differ between ranks."""
    function = getattr(value, "__func__", value)
    if isinstance(function, types.FunctionType):
        code = function.__code__
        text = f"function {function.__qualname__} ({os.path.basename(code.co_filename)}:{code.co_firstlineno})"
        return Leaf(path, "text", "function", text, _code_digest(code, function.__defaults__))
    if isinstance(value, type):
        return text_leaf(path, "type", type_name(value))
    if isinstance(value, types.ModuleType):
        return text_leaf(path, "module", f"module {value.__name__}")
    if isinstance(value, os.PathLike):
        return text_leaf(path, type(value).__name__, repr(os.fspath(value)))
    text = plain_repr(value)
    return Leaf(path, "text", type_name(type(value)), short(text), content_of(text))


def _code_digest(code: types.CodeType, defaults: object) -> bytes:
    """Compute a digest that is equal for functions that do the same, and differs for edited code."""
    inner = [_code_digest(const, None) for const in code.co_consts if isinstance(const, types.CodeType)]
    consts = plain_repr([const for const in code.co_consts if not isinstance(const, types.CodeType)])
    names = repr((code.co_names, code.co_varnames, code.co_freevars))
    return digest_of(code.co_code, consts.encode(), names.encode(), plain_repr(defaults).encode(), *inner)


def text_leaf(path: str, facts: str, text: str) -> Leaf:
    """Build the leaf of a part that is compared by its text."""
    return Leaf(path.lstrip(), "text", facts, short(text), content_of(text))


def content_of(text: str) -> bytes:
    """Compute the digest of a text."""
    return digest_of(text.encode("utf-8", "surrogatepass"))


def module_text(module: Any) -> str:
    """Format a torch module in one line, without its submodules."""
    mode = "training" if module.training else "eval"
    return f"{type(module).__name__}({' '.join(module.extra_repr().split())}), {mode}"


def type_name(kind: type) -> str:
    """Return the name of a type with its module, unless that is Python's or the notebook's."""
    return (
        kind.__qualname__ if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}.{kind.__qualname__}"
    )


def plain_repr(value: object) -> str:
    """Return `repr` without addresses; never raises."""
    try:
        return _ADDRESS.sub("", repr(value))
    except Exception as error:  # user code
        return f"<{type(value).__qualname__} whose repr raised {type(error).__name__}>"


#: The maximum number of parts of a value. Further parts are left out.
MOST_LEAVES = 50_000
#: The maximum nesting depth of containers. Deeper ones are not entered.
MOST_DEPTH = 40

_PLAIN = (type(None), bool, int, float, complex, str, bytes, bytearray, type(Ellipsis), range, slice)
_CONTAINERS = (
    *(Mapping, list, tuple, set, frozenset, deque, KeysView, ValuesView, ItemsView),
    *(functools.partial, Iterator),
)
_UNSET = "<not set>"
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType, type)


class Parts:
    """The parts of one value, taken apart and read.

    Args:
        value: anything.
        deadline: raises `TimeLimitError` when reading takes too long.
        grads: for a module, its parameters' gradients instead of its parameters.

    Attributes:
        leaves: the parts, in order.
        arrays: the parts with elements, by path.
        left_out: whether there were more than `MOST_LEAVES`.
        unsettled: whether a device was still computing.
    """

    def __init__(self, value: object, deadline: Deadline, grads: bool = False) -> None:
        self.leaves: list[Leaf] = []
        self.arrays: dict[str, Array] = {}
        self.left_out = False
        self.unsettled = False
        self._deadline = deadline
        self._grads = grads
        self._open: dict[int, str] = {}  # containers that are being taken apart; one that contains itself ends there
        self._read: dict[tuple[object, ...], Array] = {}  # tensors that were already read, such as tied weights
        self._torch = _imported("torch", "optim")
        self._numpy = _imported("numpy", "ma")
        self._value = value
        self._walk(value, "")

    def reading(self) -> Reading:
        """Summarize the value in one line."""
        leaves, arrays = self.leaves, [leaf for leaf in self.leaves if leaf.is_array]
        whole = leaves[0] if len(leaves) == 1 and not leaves[0].path else None
        stats = [leaf.stats for leaf in arrays if leaf.stats is not None]
        together = Stats.over(stats) if stats else None
        return Reading(
            digest=root_digest(leaves),
            text=whole.text if whole is not None else self._summary(arrays, together),
            leaves=len(leaves),
            arrays=len(arrays),
            elements=sum(leaf.size for leaf in arrays),
            stats=together,
            number=whole.number if whole is not None else None,
            part="; ".join(dict.fromkeys(leaf.part for leaf in leaves if leaf.part)),
            unread=tuple(f"{leaf.path}: {leaf.text}" for leaf in leaves if leaf.kind == "unread"),
            sampled=self._sampled(),
        )

    def _sampled(self) -> str:
        said: list[str] = []
        if self.left_out:
            said.append(f"only its first {MOST_LEAVES:,} parts were read")
        if self.unsettled:
            said.append("its device was still computing when it was read")
        return "; ".join(said)

    def _summary(self, arrays: list[Leaf], stats: Stats | None) -> str:
        name = type(self._value).__name__
        what = "array"
        if self._torch is not None and isinstance(self._value, self._torch.nn.Module):
            what = "gradient" if self._grads else "parameter or buffer"
        elif not arrays and (small := self._small()):
            return small
        elif isinstance(self._value, Mapping | list | tuple):
            name = f"{name} of {len(self._value):,}"
        if arrays:
            name += f", {_counted(len(arrays), what)}, {_counted(sum(leaf.size for leaf in arrays), 'element')}"
        figures = stats.text() if stats is not None else ""
        return f"{name}: {figures}" if figures else name

    def _small(self) -> str:
        """Format a small plain container as it prints."""
        if len(self.leaves) > 12 or any(leaf.kind not in ("number", "text") for leaf in self.leaves):
            return ""
        value = self._value
        if type(value).__repr__ is object.__repr__:  # that form only names the type
            fields = ", ".join(f"{name}={plain_repr(field)}" for name, field in _dict_of(value).items())
            text = f"{type(value).__name__}({fields})"
        else:
            text = plain_repr(value)
        return text if len(text) <= 160 else ""

    # -- walking -------------------------------------------------------------------------------

    def _walk(self, value: object, path: str) -> None:
        """Add the leaves of `value`. Exceptions of user code become leaves."""
        if len(self.leaves) >= MOST_LEAVES:
            self.left_out = True
            return
        if isinstance(value, _PLAIN):
            self._add(plain_leaf(value, path))
            return
        self._deadline.check()
        mark = len(self.leaves)
        try:
            self._take_apart(value, path)
        except TimeLimitError:
            raise
        except Exception as error:  # raised by properties, iterators and devices
            del self.leaves[mark:]
            self._unread(path, f"{type(value).__name__} cannot be read: {type(error).__name__}: {error}")

    def _take_apart(self, value: Any, path: str) -> None:
        torch = self._torch
        if torch is not None and isinstance(value, torch.Tensor):
            self._tensor(value, path)
        elif torch is not None and isinstance(value, torch.Generator):
            self._tensor(value.get_state(), f"{path}.get_state()")
        elif self._numpy is not None and isinstance(value, self._numpy.ndarray | self._numpy.generic):
            self._numpy_array(value, path)
        elif isinstance(value, (enum.Enum, os.PathLike, *_FUNCTIONS)) or not _has_parts(value):
            self._add(object_leaf(value, path))
        elif isinstance(value, Iterator) and not isinstance(value, IOBase):
            self._unread(path, f"{type(value).__name__}, which would be consumed: compare list(...) of it")
        elif id(value) in self._open:
            back = self._open[id(value)] or "the whole"
            self._add(text_leaf(path, "reference", f"refers back to {back}"))
        elif len(self._open) >= MOST_DEPTH:
            self._unread(path, f"{type(value).__name__}, more than {MOST_DEPTH} levels deep")
        else:
            self._open[id(value)] = path
            try:
                self._inside(value, path)
            finally:
                del self._open[id(value)]

    def _inside(self, value: Any, path: str) -> None:
        if self._torch is not None and isinstance(value, self._torch.nn.Module):
            self._module(value, path)
        elif self._torch is not None and isinstance(value, self._torch.optim.Optimizer):
            self._optimizer(value, path)
        elif isinstance(value, Mapping):
            self._mapping(value, path)
        elif isinstance(value, tuple) and hasattr(value, "_fields"):
            self._fields(value, path, getattr(value, "_fields", ()))
        elif isinstance(value, list | tuple | deque):
            self._sequence(value, path)
        elif isinstance(value, KeysView | ValuesView | ItemsView):
            self._sequence(list(value), path)
        elif isinstance(value, set | frozenset):
            self._set(value, path)
        elif isinstance(value, functools.partial):
            self._fields(value, path, ("func", "args", "keywords"))
        elif (
            self._numpy is not None and hasattr(type(value), "__array__") and not hasattr(value, "__dataclass_fields__")
        ):
            self._numpy_array(self._numpy.asarray(value), path, type(value).__name__)
        elif dataclasses.is_dataclass(value):
            self._fields(value, path, [field.name for field in dataclasses.fields(value)])
        else:
            self._fields(value, path, _attributes(value))

    def _mapping(self, value: Mapping[Any, Any], path: str) -> None:
        items = list(value.items())
        if not items:
            self._add(Leaf(path, "text", "mapping", plain_repr(value), b""))
        for at, (key, item) in enumerate(items):
            tensor = self._torch is not None and isinstance(key, self._torch.Tensor)
            self._walk(item, f"{path}[#{at}]" if tensor else f"{path}[{plain_repr(key)}]")

    def _sequence(self, value: Any, path: str) -> None:
        numbers = number_array(value) if isinstance(value, list | tuple) else None
        if numbers is not None:
            self._array(numbers, path)
            return
        name = type(value).__name__
        if not value:
            self._add(Leaf(path, "text", name, plain_repr(value), b""))
            return
        self._add(text_leaf(f"{path} (length)", name, str(len(value))))
        for at, item in enumerate(value):
            self._walk(item, f"{path}[{at}]")

    def _set(self, value: Any, path: str) -> None:
        elements: list[tuple[bytes, str]] = []
        for item in value:
            inner = Parts(item, self._deadline)
            elements.append((root_digest(inner.leaves), plain_repr(item)))
        texts = ", ".join(sorted(text for _, text in elements))
        content = digest_of(*sorted(digest for digest, _ in elements))
        name = type(value).__name__
        self._add(Leaf(path, "text", name, short(f"{name} of {len(elements)}: {texts}"), content))

    def _fields(self, value: object, path: str, names: Iterable[str]) -> None:
        self._add(text_leaf(f"{path} (type)", "type", type_name(type(value))))
        held = _dict_of(value)
        for name in names:
            self._walk(held[name] if name in held else getattr(value, name, _UNSET), f"{path}.{name}")

    # -- arrays --------------------------------------------------------------------------------

    def _array(self, array: Array, path: str, facts: str = "", part: str = "", note: str = "") -> None:
        self._add(array.leaf(path, self._deadline, facts, part, note))
        self.arrays[path] = array

    def _numpy_array(self, value: Any, path: str, name: str = "") -> None:
        if isinstance(value, self._numpy.ma.MaskedArray):
            self._numpy_array(value.data, f"{path}.data")
            self._numpy_array(self._numpy.ma.getmaskarray(value), f"{path}.mask")
        elif value.dtype.hasobject:
            self._add(text_leaf(f"{path} (shape)", name or "ndarray", f"{value.dtype} {list(value.shape)}"))
            self._sequence(value.ravel().tolist(), path)
        else:
            self._array(NumpyArray(self._numpy.asarray(value)), path, note=name)

    def _tensor(self, value: Any, path: str) -> None:
        from monarch_kernel.debugger.rank.values.tensors import (
            pieces_of,  # a tensor exists, so torch is imported
        )

        with self._torch.no_grad():
            for piece in pieces_of(value):
                where = f"{path}{piece.path}".lstrip()
                if piece.tensor is None:
                    self._add(
                        Leaf(where, "unread" if piece.unread else "text", "tensor", piece.text, content_of(piece.text))
                    )
                elif piece.nested:
                    self._tensor(piece.tensor, where)
                else:
                    needs_grad = value.requires_grad and not piece.facts
                    array = self._strided(piece.tensor, needs_grad)
                    self._array(array, where, piece.facts, piece.part, piece.text)
                    self.unsettled = self.unsettled or array.unsettled

    def _strided(self, tensor: Any, needs_grad: bool) -> Any:
        from monarch_kernel.debugger.rank.values.tensors import TensorArray

        place = (tensor.data_ptr(), tensor.dtype, tensor.device, tensor.shape, tensor.stride(), needs_grad)
        array = self._read.get(place)
        if array is None:
            array = self._read[place] = TensorArray(tensor, needs_grad)
        return array

    # -- torch's objects -----------------------------------------------------------------------

    def _module(self, value: Any, path: str) -> None:
        prefix = f"{path}." if path else ""
        parameters = list(value.named_parameters(remove_duplicate=False))
        if self._grads:
            for name, parameter in parameters:
                self._walk(parameter.grad, f"{prefix}{name}")
            return
        for name, module in value.named_modules():
            where = f"{prefix}{name}".rstrip(".")
            self._add(text_leaf(f"{where} (module)", "module", module_text(module)))
        if len(parameters) > 1:
            order = content_of("\n".join(name for name, _ in parameters))
            text = f"{len(parameters):,} names, first {', '.join(name for name, _ in parameters[:3])}"
            self._add(Leaf(f"{path} (order of parameters)".lstrip(), "text", "order", text, order))
        for name, tensor in (*parameters, *value.named_buffers(remove_duplicate=False)):
            self._walk(tensor, f"{prefix}{name}")

    def _optimizer(self, value: Any, path: str) -> None:
        """Add the attributes of an optimizer. `state_dict()` may enter a collective through hooks or sharding."""
        self._add(text_leaf(f"{path} (type)", "type", type_name(type(value))))
        count = 0
        for at, group in enumerate(value.param_groups):
            where = f"{path}.param_groups[{at}]"
            for key, item in group.items():
                if key != "params":
                    self._walk(item, f"{where}[{key!r}]")
            self._add(text_leaf(f"{where}['params'] (length)", "list", str(len(group["params"]))))
            for parameter in group["params"]:
                state = value.state.get(parameter, {})
                for key, item in state.items():
                    self._walk(item, f"{path}.state[{count}][{key!r}]")
                count += 1

    # -- leaves --------------------------------------------------------------------------------

    def _add(self, leaf: Leaf) -> None:
        self.leaves.append(leaf)

    def _unread(self, path: str, why: str) -> None:
        self._add(Leaf(path, "unread", "", short(why), content_of(why)))


def _imported(name: str, last: str) -> Any:
    """Return a module that the process has imported; None until another thread's import has defined `last`."""
    module = sys.modules.get(name)
    return module if hasattr(module, last) else None


def _counted(count: int, what: str) -> str:
    if count == 1:
        return f"1 {what}"
    return f"{count:,} " + " and ".join(f"{word}s" for word in what.split(" or "))


def _dict_of(value: object) -> dict[str, object]:
    try:
        held = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return held if isinstance(held, dict) else {}


def _attributes(value: object) -> list[str]:
    """Return the names of an object's attributes: in its `__dict__`, its `__slots__`, its msgspec fields."""
    names = dict.fromkeys(_dict_of(value))
    names.update(dict.fromkeys(getattr(type(value), "__struct_fields__", ())))
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        names.update(dict.fromkeys((slots,) if isinstance(slots, str) else slots))
    return [name for name in names if name not in ("__weakref__", "__dict__") and isinstance(name, str)]


def _has_parts(value: object) -> bool:
    if isinstance(value, _CONTAINERS) or dataclasses.is_dataclass(value):
        return True
    return bool(_attributes(value)) or hasattr(type(value), "__array__")


def digest(value: object) -> str:
    """Return a text that is the same for equal values in every process.

    All values that take longer to read than `DIGEST_TIMEOUT` have the same text, because they cannot be distinguished.
    """
    try:
        return Parts(value, Deadline(DIGEST_TIMEOUT)).reading().digest.hex()
    except TimeLimitError:
        return "too large to read"
