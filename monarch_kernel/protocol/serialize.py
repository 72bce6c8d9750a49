"""Bodies of messages: pickle protocol 5, with large buffers out of band and notebook code by value.

``dumps`` tries the C pickler first. Classes and functions of ``__main__`` (a script or a notebook) do not exist
in the other process, so their first occurrence switches the whole object to cloudpickle, which sends them by
value. Everything else is sent by reference.

A body consists of the out-of-band buffers, each padded to 64 bytes so that arrays stay aligned, and the pickle.
"""

from __future__ import annotations

import contextvars
import copyreg
import functools
import io
import pickle
import sys
import types
import weakref
from collections.abc import Callable
from typing import Any, ClassVar, TypeAlias

from monarch_kernel.protocol.main_module import (
    MAIN,
    Annotations,
    arrived,
    keep_source,
    main_names,
    names_in_text,
    source_of,
)

#: Buffers of at least this many bytes are kept out of the pickle and never copied before they are sent.
OUT_OF_BAND = 16 * 1024
#: From this size on, a body without such buffers may travel apart from its message, too.
LARGE = 1 << 20
_ALIGN = 64
_PADDING = bytes(_ALIGN)

#: Types of small immutable scalars.
PLAIN = frozenset({int, float, str, bytes, bool, type(None)})

Buffers = list[Any]  # bytes-like pieces, in order
#: The part of a message after its header. To send: bytes-like, or ``Buffers``. Handlers get bytes-like data, an
#: ``Apart`` if its buffers are in shared memory, or a ``Death`` that has not left this process.
Body: TypeAlias = Any


class Apart:
    """A body whose large part came separately: ``memory()`` returns it, and may wait for it.

    That is its out-of-band buffers, and ``pickled`` the rest; or the whole pickle, if it has no such buffers.
    """

    __slots__ = ("memory", "pickled")

    def __init__(self, memory: Callable[[], memoryview], pickled: bytes) -> None:
        self.memory = memory
        self.pickled = pickled


class _ByValue(Exception):
    """An object must be sent by value: use cloudpickle."""


def _goes_by_value(obj: Any) -> bool:
    module = getattr(obj, "__module__", None)
    if module == MAIN or module is None:
        return True
    qualname = getattr(obj, "__qualname__", "")
    if "<locals>" in qualname or "<lambda>" in qualname:
        return True
    if module in _registered() or module.partition(".")[0] in _registered():
        return True
    return module not in sys.modules


def _registered() -> Any:
    if "cloudpickle" not in sys.modules:  # then no module can be registered
        return ()
    import cloudpickle

    return cloudpickle.list_registry_pickle_by_value()  # type: ignore[no-untyped-call]


_LRU = type(functools.lru_cache(lambda: None))
#: Types of values that pickle refuses, or sends by name as it does classes, or whose identity it loses.
_BY_VALUE_ONLY = frozenset({_LRU, contextvars.ContextVar, object})


class _FastPickler(pickle.Pickler):
    """The C pickler; raises as soon as it meets an object that only cloudpickle can send."""

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if kind is types.FunctionType or isinstance(obj, type):
            if obj is not _rebuild_array and obj is not _rebuild_tensor and _goes_by_value(obj):
                raise _ByValue
            return NotImplemented
        reduce = _OUT_OF_BAND.get(kind.__name__)
        if reduce is not None:
            return reduce(obj, kind)
        if isinstance(obj, types.ModuleType) or kind in _BY_VALUE_ONLY:
            raise _ByValue
        return NotImplemented


@functools.cache
def by_value_pickler() -> Any:
    """cloudpickle's pickler, with tensors' memory out of band, and with classes that stay what they are.

    cloudpickle recognizes a class that the receiver has already, its own or one that it was sent, and then sets all its
    attributes again, to what they were on the sender. What is of ``__main__`` also takes along its source, and what its
    annotations name as text; that goes last, so that ``by_value`` can leave it out.
    """
    import cloudpickle

    from monarch_kernel.protocol.class_identity import identify
    from monarch_kernel.protocol.restored_values import (
        MADE_ANEW,
        Anew,
        reduce_anew,
        reduce_function,
        reduce_misnamed,
        reduce_value,
    )

    class ByValuePickler(cloudpickle.Pickler):
        #: Whether the receiver gets what annotations name.
        with_names = True

        def __init__(self, file: Any, protocol: int | None = None, buffer_callback: Any = None) -> None:
            super().__init__(file, protocol, buffer_callback)
            self._file = file
            self._wanted: list[_Named] = []
            self._seen: set[tuple[int, str]] = set()
            self._anew: dict[int, Anew] = {}
            self._owners: list[Any] = []  # the classes and functions that go by value
            #: What is pickled now because an annotation names it, and where the first of these began.
            self.late: _Named | None = None
            self._began = 0

        @property
        def late_bytes(self) -> int:
            """How much has been written of what annotations name."""
            return self._file.tell() - self._began if self.late is not None else 0

        def dump(self, obj: Any) -> None:
            super().dump(_WithNames(obj) if self.with_names else obj)

        def reducer_override(self, obj: Any) -> Any:
            kind = type(obj)
            if self.late is not None and self.late_bytes > _MOST_NAMED:
                raise ValueError("too large for what an annotation names")
            reduce = _OUT_OF_BAND.get(kind.__name__)
            if reduce is not None:
                if self.late is not None and obj.nbytes > _MOST_NAMED:
                    raise ValueError("too large for what an annotation names")
                reduced = reduce(obj, kind)
                if reduced is not NotImplemented:
                    return reduced
            if kind in _PARTS or kind is Anew:
                return self._reduce_part(obj, kind)
            if isinstance(obj, type):
                identify(obj, _write_by_value)
            elif kind is types.CellType:
                return _reduce_cell(obj, self._anew_of)
            elif kind is not types.FunctionType:
                if kind is _LRU and not _goes_by_value(obj.__wrapped__):
                    return NotImplemented
                return reduce_value(obj, kind) or super().reducer_override(obj)
            elif _goes_by_value(obj) and (reduced := reduce_function(obj)):
                return reduced
            reduced = super().reducer_override(obj)
            if type(reduced) is not tuple or len(reduced) != 6:
                return reduced
            if isinstance(obj, type) and (elsewhere := reduce_misnamed(obj)):
                return elsewhere
            make, arguments, (state, slots), items, pairs, fill = reduced
            self._owners.append(obj)
            state = self._with_anew(state)
            if isinstance(obj, type):
                annotations = state.get("__annotations__")
                if obj.__module__ == MAIN and isinstance(annotations, dict) and names_in_text(annotations):
                    scope = annotations.scope if type(annotations) is Annotations else main_names()
                    state = {**state, "__annotations__": Annotations(annotations, self._want(annotations, scope))}
                arguments, make, fill = (make, *arguments), _class_of, functools.partial(_fill_class, fill)
            elif obj.__module__ == MAIN:
                self._want(obj.__annotations__, obj.__globals__)
                slots = {**slots, "__source__": source_of(obj), "__globals__": self._with_anew(slots["__globals__"])}
                fill = functools.partial(_fill_function, fill)
            return make, arguments, (state, slots), items, pairs, fill

        def _with_anew(self, names: dict[str, Any]) -> dict[str, Any]:
            """The attributes of a class, or globals of a function, with what is made anew marked."""
            if MADE_ANEW.isdisjoint(map(type, names.values())):
                return names
            return {name: self._anew_of(value) for name, value in names.items()}

        def _anew_of(self, value: Any) -> Any:
            if type(value) not in MADE_ANEW:
                return value
            return self._anew.setdefault(id(value), Anew(value))

        def culprit(self) -> str:
            """The attribute or global that cannot be pickled, and its class or function; "" if it is another value."""
            for owner in reversed(self._owners):
                kind, names = "an attribute", vars(owner)
                if isinstance(owner, types.FunctionType):
                    used = cloudpickle.cloudpickle._extract_code_globals(owner.__code__)
                    kind, names = "a global", {x: owner.__globals__[x] for x in used if x in owner.__globals__}
                for name, value in names.items():
                    if type(value) in PLAIN or type(value) in _DESCRIPTORS:
                        continue
                    try:
                        _write_by_value(value, _Nowhere())
                    except Exception:
                        return f"{name}, {kind} of {owner.__qualname__}"
            return ""

        def _reduce_part(self, obj: Any, kind: type) -> Any:
            if kind is _WithNames:
                return _first, (obj.value, _Names())
            if kind is Anew:
                reduced = reduce_anew(obj)
                return reduced[0], tuple(
                    self._anew_of(each.value) if type(each) is Anew else each for each in reduced[1]
                )
            if kind is Annotations:
                return Annotations, (dict(obj), obj.scope)
            if kind is _Named:
                if self.late is None:
                    self._began = self._file.tell()
                self.late = obj
                return _set_name, (obj.scope, obj.name, obj.value)
            # `_Names`: all that was to be pickled has been, and what its annotations name is known.
            wanted, self._wanted = self._wanted, []
            return (_first, (wanted, _Names())) if wanted else (bool, ())

        def _want(self, annotations: dict[str, Any], names: dict[str, Any]) -> dict[str, Any]:
            """Send along what annotations name; returns what the globals of these will be made of at the receiver."""
            scope = self.globals_ref.setdefault(id(names), {})
            if not scope:  # as cloudpickle begins it
                scope.update((key, names[key]) for key in _OF_MODULES if key in names)
            for name in names_in_text(annotations) if self.with_names else ():
                if name in names and (id(names), name) not in self._seen:
                    self._seen.add((id(names), name))
                    value = names[name]
                    if _left_out.get(name) != id(value):
                        self._wanted.append(_Named(scope, name, value))
            return scope

    return ByValuePickler


#: How much of a message may be what annotations name (bytes). The values of some names are large data.
_MOST_NAMED = 1 << 18
#: Names in annotations that do not go with messages, and the identity of the value that could not.
_left_out: dict[str, int] = {}
_OF_MODULES = ("__package__", "__name__", "__path__", "__file__")


class _WithNames:
    """An object to be pickled, and then what its annotations name."""

    def __init__(self, value: Any) -> None:
        self.value = value


class _Names:
    """Stands for what annotations name of all that was pickled before it."""


class _Named:
    """The value of a name in an annotation, and the globals of the class or function that has it."""

    def __init__(self, scope: dict[str, Any], name: str, value: Any) -> None:
        self.scope, self.name, self.value = scope, name, value


_PARTS = frozenset({_WithNames, _Names, _Named, Annotations})


def _reduce_cell(cell: types.CellType, anew_of: Callable[[Any], Any]) -> Any:
    from cloudpickle import cloudpickle

    try:
        content = cell.cell_contents
    except ValueError:
        return cloudpickle._make_empty_cell, ()
    return cloudpickle._make_cell, (anew_of(content),)


def _first(value: Any, _names: Any) -> Any:
    return value


def _set_name(scope: dict[str, Any], name: str, value: Any) -> None:
    scope.setdefault(name, value)


def by_value(obj: Any, kept: list[pickle.PickleBuffer] | None = None) -> bytes:
    """Serialize like ``cloudpickle.dumps``; large buffers are added to ``kept``, if it is given.

    What only an annotation names is left out if it is large or cannot be pickled.
    """
    while True:
        out = io.BytesIO()
        pickler = by_value_pickler()(out, 5, buffer_callback=None if kept is None else _keep_in(kept))
        try:
            pickler.dump(obj)
            if pickler.late_bytes <= _MOST_NAMED:
                return out.getvalue()
        except Exception as error:
            if pickler.late is None:
                if _is_of_pickler(error) and (culprit := pickler.culprit()):
                    raise TypeError(f"{error} ({culprit})") from error
                raise
        _left_out[pickler.late.name] = id(pickler.late.value)
        if kept is not None:
            kept.clear()


#: Parts of classes that Python makes, and that are never sent.
_DESCRIPTORS = frozenset({types.GetSetDescriptorType, types.MemberDescriptorType, types.WrapperDescriptorType})


class _Nowhere:
    """Takes a pickle, and drops it."""

    def write(self, data: Any) -> int:
        return len(data)

    def tell(self) -> int:
        return 0


def _write_by_value(obj: Any, out: Any) -> None:
    pickler = by_value_pickler()(out, 5)
    pickler.dump(pickler._anew_of(obj))


#: Classes that have been made here from a pickle, and have no attributes yet.
_empty_classes: weakref.WeakSet[type] = weakref.WeakSet()


def _class_of(make: Callable[..., type], *arguments: Any) -> type:
    """The class of this identity, which is next to last in `arguments`; a new, empty one if there is none here."""
    from cloudpickle import cloudpickle

    from monarch_kernel.protocol.class_identity import current_class

    identity = arguments[-2]
    known = current_class(identity, cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID.get(identity), _write_by_value)
    if known is not None:
        return known
    made = make(*arguments)
    _empty_classes.add(made)
    return made


def _fill_class(fill: Callable[[type, Any], object], made: type, state: Any) -> None:
    """Set the attributes of a class that has none yet; another is used as it is."""
    if made in _empty_classes:
        fill(made, state)
        _empty_classes.discard(made)
        arrived(made)


def _fill_function(fill: Callable[[Any, Any], object], function: Any, state: Any) -> None:
    """Set the state of a function of another process's ``__main__``."""
    source = state[1].pop("__source__")
    fill(function, state)
    if source is not None:
        keep_source(source)
    arrived(function)


def _reduce_array(array: Any, kind: type) -> Any:
    """Reduce a large plain array to a buffer, in half the time of NumPy's own pickling."""
    if kind.__module__ != "numpy":
        return NotImplemented
    _QUICK.add(kind)
    if array.nbytes < OUT_OF_BAND:
        return NotImplemented
    order = _order(array)
    if not order:
        return NotImplemented
    return _rebuild_array, (pickle.PickleBuffer(array), array.dtype.str, array.shape, order)


def _order(array: Any) -> str:
    """How the memory of a plain array is ordered: "C" or "F"; "" if it has gaps, or its elements are not numbers."""
    dtype, flags = array.dtype, array.flags
    if dtype.isbuiltin != 1 or dtype.kind not in "biufc" or dtype.metadata:
        return ""
    return "C" if flags.c_contiguous else "F" if flags.f_contiguous else ""


def _rebuild_array(buffer: Any, dtype: str, shape: tuple[int, ...], order: Any) -> Any:
    return _array_type()(shape, dtype, buffer, 0, None, order)


@functools.cache
def _array_type() -> Any:
    import numpy

    return numpy.ndarray


def _reduce_tensor(tensor: Any, kind: type) -> Any:
    """Reduce a plain CPU tensor, or any on a GPU, to a buffer.

    torch's own pickling would save its storage, as to a file, and fail in a process that has no such GPU.
    """
    if kind.__module__ != "torch":
        return NotImplemented
    import torch

    kind_of_device = tensor.device.type
    nbytes = tensor.numel() * tensor.element_size()
    if (
        kind_of_device not in ("cpu", "cuda")
        or tensor.layout is not torch.strided
        or tensor.is_quantized
        or tensor.is_conj()
        or tensor.is_neg()
        or (not nbytes if kind_of_device == "cuda" else nbytes < OUT_OF_BAND and not _is_bare(tensor, nbytes))
    ):
        return NotImplemented
    # One element may have any stride.
    raw = tensor.detach().cpu().contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy()
    device = None if kind_of_device == "cpu" else tensor.device.index
    return _rebuild_tensor, (pickle.PickleBuffer(raw), tensor.dtype, tuple(tensor.shape), tensor.requires_grad, device)


def _is_bare(tensor: Any, nbytes: int) -> bool:
    """Whether a small tensor is no more than its elements: torch's own pickling keeps what else it may have.

    While the tensor engine is loaded, it alone decides what an operation on a tensor does.
    """
    return (
        nbytes > 0
        and not tensor.__dict__
        and tensor._backward_hooks is None
        and not any(getattr(tensor, "names", ()))
        and Unpickling.function is pickle.loads
        and tensor.is_contiguous()
    )


def _rebuild_tensor(
    buffer: Any, dtype: Any, shape: tuple[int, ...], requires_grad: bool, device: int | None = None
) -> Any:
    """A tensor of this memory; on the GPU of this number, on the current one if there are fewer, else on the CPU."""
    import torch

    tensor = torch.frombuffer(buffer, dtype=dtype).view(shape)
    if device is not None and torch.cuda.is_available():
        tensor = tensor.to(f"cuda:{device}" if device < torch.cuda.device_count() else "cuda")
    return tensor.requires_grad_() if requires_grad else tensor


#: Types whose memory is kept out of the pickle, by name, so that nothing is imported for this.
_OUT_OF_BAND: dict[str, Callable[[Any, type], Any]] = {"ndarray": _reduce_array, "Tensor": _reduce_tensor}


def is_plain(obj: Any) -> bool:
    """Whether an ``(args, kwargs)`` pair or a result holds only small immutable scalars."""
    kind = type(obj)
    if kind is tuple:
        # One call in C for a tuple of scalars; a pair of arguments has a tuple and, mostly, an empty dict.
        if PLAIN.issuperset(map(type, obj)):
            return True
        for x in obj:
            kind = type(x)
            if kind in PLAIN or (kind is dict and not x):
                continue
            if kind is not tuple or not is_plain(x):
                return False
        return True
    return kind in PLAIN or (kind is dict and not obj)


def dumps(obj: Any) -> tuple[Any, tuple[int, ...]]:
    """Serialize for a message body.

    Returns:
        ``(body, buffers)``. ``body`` is ``bytes``, or a list of bytes-like pieces when there are
        out-of-band buffers; ``buffers`` are their lengths, for the header.

    Raises:
        Whatever the object's own pickling raises, mostly ``TypeError`` or ``pickle.PicklingError``.
    """
    if is_plain(obj):
        return pickle.dumps(obj, 5), ()
    return dumps_arrays(obj) or dumps_any(obj)


def dumps_any(obj: Any) -> tuple[Any, tuple[int, ...]]:
    """``dumps`` for an object that is neither plain nor made of arrays."""
    kept: list[pickle.PickleBuffer] = []
    out = io.BytesIO()
    try:
        _FastPickler(out, 5, buffer_callback=_keep_in(kept)).dump(obj)
        pickled = out.getvalue()
    except (_ByValue, pickle.PicklingError, AttributeError):
        # AttributeError and PicklingError: an object cannot be found by name; cloudpickle can send it in other ways
        kept.clear()
        pickled = by_value(obj, kept)
    return _body([buffer.raw() for buffer in kept], pickled)


def _keep_in(kept: list[pickle.PickleBuffer]) -> Callable[[pickle.PickleBuffer], bool]:
    """A function that keeps large buffers out of a pickle, and adds them to ``kept``."""

    def keep(buffer: pickle.PickleBuffer) -> bool:
        try:
            raw = buffer.raw()
        except BufferError:  # not contiguous: let pickle copy it
            return True
        if raw.nbytes < OUT_OF_BAND:
            return True
        kept.append(buffer)
        return False

    return keep


def _body(kept: list[memoryview], pickled: bytes) -> tuple[Any, tuple[int, ...]]:
    """The result of ``dumps``: what was kept out of the pickle, and the pickle."""
    if not kept:
        return pickled, ()
    pieces: Buffers = []
    for raw in kept:
        pieces.append(raw)
        if rest := -raw.nbytes % _ALIGN:
            pieces.append(_PADDING[:rest])
    pieces.append(pickled)
    return pieces, tuple([raw.nbytes for raw in kept])


# -- arrays among scalars ---------------------------------------------------------------------
#
# Most arguments and results are scalars and arrays. Their pickle is assembled here from the parts that are the same for
# all arrays of a kind. The pickler takes five times as long: it looks up names for each array, and so does its reader.

#: The number of `_rebuild_array` in pickles, instead of its name.
_ARRAY = 0x6D6B_0001
copyreg.add_extension(__name__, "_rebuild_array", _ARRAY)
_ARRAY_HEAD = pickle.EXT4 + _ARRAY.to_bytes(4, "little") + pickle.MARK
_MOST_KINDS = 1024
_HEAD = pickle.PROTO + b"\5"
_ARGUMENTS_HEAD = _HEAD + pickle.MARK
_ARGUMENTS_TAIL = pickle.TUPLE + pickle.EMPTY_DICT + pickle.TUPLE2 + pickle.STOP


#: The types of scalars, and NumPy's array once one was pickled.
_QUICK: set[type] = set(PLAIN)
#: By type number and shape, for small arrays in C order that can be written: their dtype, and the parts of the pickle
#: before and after the bytes.
_kinds: dict[tuple[int, tuple[int, ...]], tuple[Any, bytes, bytes]] = {}


def _scalar(value: Any) -> bytes:
    """The part of a pickle that makes one immutable value without references to other parts."""
    return pickle.dumps(value, 5)[2:-1]


def _described(array: Any, order: str) -> bytes:
    """The part of a pickle that describes an array, behind its bytes."""
    return b"".join([*map(_scalar, (array.dtype.str, array.shape, order)), pickle.TUPLE, pickle.REDUCE])


def dumps_arrays(obj: Any) -> tuple[Any, tuple[int, ...]] | None:
    """``dumps`` for an array, or for positional arguments of scalars and different arrays; None for all else."""
    if type(obj) is not tuple:
        values, head, tail = (obj,), _HEAD, pickle.STOP
    elif len(obj) == 2 and type(obj[0]) is tuple and type(obj[1]) is dict and not obj[1]:
        values, head, tail = obj[0], _ARGUMENTS_HEAD, _ARGUMENTS_TAIL
    else:
        return None
    if not _QUICK.issuperset(map(type, values)):
        return None
    parts: Buffers = [head]
    arrays: list[Any] = []
    kept: list[memoryview] = []
    for value in values:
        if type(value) in PLAIN:
            parts.append(_scalar(value))
            continue
        arrays.append(value)
        dtype = value.dtype
        kind = _kinds.get((dtype.num, value.shape))
        if kind is not None and kind[0] is dtype and value.flags.carray:
            parts += (kind[1], value.tobytes(), kind[2])
        elif not _add_array(value, parts, kept):
            return None
    if len(arrays) > 1 and len(set(map(id, arrays))) < len(arrays):  # one array twice stays one
        return None
    parts.append(tail)
    return _body(kept, b"".join(parts))


def _add_array(array: Any, parts: Buffers, kept: list[memoryview]) -> bool:
    """Add the pickle of an array to ``parts``, and its bytes to ``kept`` if they are many; False if it is not plain."""
    order = _order(array)
    if not order:
        return False
    raw = pickle.PickleBuffer(array).raw()
    size = raw.nbytes
    after = _described(array, order)
    if size >= OUT_OF_BAND:
        kept.append(raw)
        parts += (_ARRAY_HEAD, pickle.NEXT_BUFFER, pickle.READONLY_BUFFER if raw.readonly else b"", after)
        return True
    before = _ARRAY_HEAD + (pickle.BINBYTES8 if raw.readonly else pickle.BYTEARRAY8) + size.to_bytes(8, "little")
    parts += (before, raw, after)
    if array.flags.carray:
        if len(_kinds) >= _MOST_KINDS:
            _kinds.clear()
        _kinds[array.dtype.num, array.shape] = array.dtype, before, after
    return True


def dumps_flat(obj: Any) -> bytes:
    """Serialize into one ``bytes`` with the buffers inside, to be stored or sent inside another pickle."""
    if is_plain(obj):
        return pickle.dumps(obj, 5)
    out = io.BytesIO()
    try:
        _FastPickler(out, 5).dump(obj)
    except (_ByValue, pickle.PicklingError, AttributeError):
        return by_value(obj)
    return out.getvalue()


def _is_of_pickler(error: Exception) -> bool:
    """Whether the pickler itself rejects an object, rather than code of its class."""
    tb = error.__traceback__
    while tb is not None and tb.tb_next is not None:
        tb = tb.tb_next
    module = "" if tb is None else str(tb.tb_frame.f_globals.get("__name__", ""))
    return module.partition(".")[0] in _PICKLERS


#: Modules whose own exceptions mean that an object cannot be pickled.
_PICKLERS = ("monarch_kernel", "cloudpickle", "pickle", "copyreg")


def explain(error: Exception, what: str) -> None:
    """Name the object that could not be pickled; call this in an ``except`` clause around ``dumps``.

    An exception from user code (``__getstate__``, ``__reduce__``) gets a note; the caller re-raises it.

    Raises:
        TypeError: the pickler itself rejects the object.
    """
    if _is_of_pickler(error):
        raise TypeError(f"{what} cannot be pickled: {error}") from error
    note = f"{what} cannot be pickled"
    if note not in getattr(error, "__notes__", ()):
        error.add_note(note)


def padded(buffers: tuple[int, ...]) -> int:
    """How many bytes of a body precede the pickle, given the lengths of its buffers."""
    return sum(length + (-length % _ALIGN) for length in buffers)


class Unpickling:
    """How bodies are unpickled. The tensor engine replaces it: torch's functions that rebuild tensors issue operations,
    which are not to go to a mesh that is active."""

    function: ClassVar[Callable[..., Any]] = pickle.loads


def loads(body: Any, buffers: tuple[int, ...] = ()) -> Any:
    """The inverse of ``dumps``. Arrays refer to ``body``'s memory, which they keep alive, unless it is read-only."""
    if not buffers:
        return Unpickling.function(body.memory() if type(body) is Apart else body)
    if type(body) is Apart:
        view = body.memory()
        rest: Any = body.pickled
    else:
        view = memoryview(body)
        if view.readonly:  # what is unpickled can be written, as it could at its sender
            view = memoryview(bytearray(view))
        rest = None
    parts: list[memoryview] = []
    at = 0
    for length in buffers:
        parts.append(view[at : at + length])
        at += length + (-length % _ALIGN)
    return Unpickling.function(view[at:] if rest is None else rest, buffers=parts)
