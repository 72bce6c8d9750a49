"""Bodies of messages: pickle protocol 5, with large buffers out of band and notebook code by value.

``dumps`` tries the C pickler first. Classes and functions of ``__main__`` (a script or a notebook) do not exist
in the other process, so their first occurrence switches the whole object to cloudpickle, which sends them by
value. Everything else is sent by reference.

A body consists of the out-of-band buffers, each padded to 64 bytes so that arrays stay aligned, and the pickle.
This file is long because one pickler decides what goes by value, by reference and out of band.
"""

from __future__ import annotations

import contextvars
import copyreg
import functools
import io
import pickle
import re
import sys
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from monarch_kernel._version import __version__
from monarch_kernel.protocol.main_module import MAIN

if TYPE_CHECKING:
    import torch

#: Buffers of at least this many bytes are kept out of the pickle and never copied before they are sent.
OUT_OF_BAND = 16 * 1024
#: Larger bodies without such buffers may also be sent separately from their message (bytes).
LARGE = 1 << 20
_ALIGN = 64
_PADDING = bytes(_ALIGN)

#: Types of small immutable scalars.
PLAIN = frozenset({int, float, str, bytes, bool, type(None)})

#: Errors of pickle for code of this package that does not exist here.
_OURS = re.compile(
    r"No module named '((?:monarch_kernel|workspace_sync)\.[\w.]+)'|"
    r"Can't get attribute '([\w.]+)' on <module '((?:monarch_kernel|workspace_sync)[\w.]*)'"
)

Buffers = list[Any]  # bytes-like pieces, in order
#: The part of a message after its header. To send: bytes-like, or ``Buffers``. Handlers get bytes-like data, an
#: ``Apart`` if its buffers are in shared memory, or a ``Death`` that has not left this process.
Body: TypeAlias = Any


class Apart:
    """A body whose large part was sent separately: ``memory()`` returns it, and may wait for it.

    The large part is its out-of-band buffers, and ``pickled`` the rest. Without such buffers, it is the whole pickle.
    """

    __slots__ = ("memory", "pickled")

    def __init__(self, memory: Callable[[], memoryview], pickled: bytes) -> None:
        self.memory = memory
        self.pickled = pickled


class _ByValue(Exception):
    """An object must be sent by value: use cloudpickle."""


def goes_by_value(obj: object) -> bool:
    module = getattr(obj, "__module__", None)
    if module == MAIN or module is None:
        return True
    qualname = getattr(obj, "__qualname__", "")
    if "<locals>" in qualname or "<lambda>" in qualname:
        return True
    if module in _registered() or module.partition(".")[0] in _registered():
        return True
    return module not in sys.modules


def _registered() -> object:
    if "cloudpickle" not in sys.modules:  # then no module can be registered
        return ()
    import cloudpickle

    return cloudpickle.list_registry_pickle_by_value()  # type: ignore[no-untyped-call]


#: The type of a function with ``functools.lru_cache``.
CACHED_FUNCTION = type(functools.lru_cache(lambda: None))
#: Types of values that pickle refuses, sends by name like classes, or whose identity it loses.
_BY_VALUE_ONLY = frozenset({CACHED_FUNCTION, contextvars.ContextVar, object})


class _FastPickler(pickle.Pickler):
    """The C pickler; raises as soon as it meets an object that only cloudpickle can send."""

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if kind is types.FunctionType or isinstance(obj, type):
            if obj is not _rebuild_array and obj is not _rebuild_tensor and goes_by_value(obj):
                raise _ByValue
            return NotImplemented
        reduce = OUT_OF_BAND_KINDS.get(kind.__name__)
        if reduce is not None:
            return reduce(obj, kind)
        if isinstance(obj, types.ModuleType) or kind in _BY_VALUE_ONLY:
            raise _ByValue
        return NotImplemented


def by_value_pickler() -> Any:
    """Load cloudpickle, and return the pickler class for objects of scripts and notebooks."""
    from monarch_kernel.protocol.by_value import ByValuePickler

    return ByValuePickler


def _reduce_array(array: Any, kind: type) -> object:
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
    """Determine the memory order of a plain array: "C" or "F".

    "" if it has gaps, or its elements are not numbers.
    """
    dtype, flags = array.dtype, array.flags
    if dtype.isbuiltin != 1 or dtype.kind not in "biufc" or dtype.metadata:
        return ""
    return "C" if flags.c_contiguous else "F" if flags.f_contiguous else ""


def _rebuild_array(buffer: Any, dtype: str, shape: tuple[int, ...], order: str) -> object:
    return _array_type()(shape, dtype, buffer, 0, None, order)


@functools.cache
def _array_type() -> Any:
    import numpy

    return numpy.ndarray


def _reduce_tensor(tensor: Any, kind: type) -> object:
    """Reduce a plain CPU tensor, or any tensor on a GPU, to a buffer.

    torch's own pickling would save its storage, as to a file, and fail in a process without such a GPU.
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


def _is_bare(tensor: torch.Tensor, nbytes: int) -> bool:
    """Return whether a small tensor has nothing but its elements. torch's own pickling keeps everything else.

    While the tensor engine is loaded, it alone decides the effect of operations on tensors.
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
    buffer: object, dtype: torch.dtype, shape: tuple[int, ...], requires_grad: bool, device: int | None = None
) -> object:
    """Rebuild a tensor from this memory, on the GPU with this number.

    If there are fewer GPUs, it is on the current GPU; without a GPU, on the CPU.
    """
    import torch

    tensor = torch.frombuffer(buffer, dtype=dtype).view(shape)
    if device is not None and torch.cuda.is_available():
        tensor = tensor.to(f"cuda:{device}" if device < torch.cuda.device_count() else "cuda")
    return tensor.requires_grad_() if requires_grad else tensor


#: Types whose memory is kept out of the pickle, by name, so that nothing is imported for this.
OUT_OF_BAND_KINDS: dict[str, Callable[[object, type], object]] = {"ndarray": _reduce_array, "Tensor": _reduce_tensor}


def is_plain(obj: Any) -> bool:
    """Return whether an ``(args, kwargs)`` pair or a result holds only small immutable scalars."""
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


def dumps(obj: object) -> tuple[Any, tuple[int, ...]]:
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


def dumps_any(obj: object) -> tuple[Any, tuple[int, ...]]:
    """Do the same as ``dumps`` for an object that is neither plain nor made of arrays."""
    kept: list[pickle.PickleBuffer] = []
    out = io.BytesIO()
    try:
        _FastPickler(out, 5, buffer_callback=keep_in(kept)).dump(obj)
        pickled = out.getvalue()
    except (_ByValue, pickle.PicklingError, AttributeError):
        # AttributeError and PicklingError: an object cannot be found by name; cloudpickle can send it in other ways
        from monarch_kernel.protocol.by_value import by_value

        kept.clear()
        pickled = by_value(obj, kept)
    return _body([buffer.raw() for buffer in kept], pickled)


def keep_in(kept: list[pickle.PickleBuffer]) -> Callable[[pickle.PickleBuffer], bool]:
    """Create a function that keeps large buffers out of a pickle, and adds them to ``kept``."""

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


def _body(kept: list[memoryview], pickled: bytes) -> tuple[object, tuple[int, ...]]:
    """Assemble the result of ``dumps`` from the buffers kept out of the pickle, and the pickle."""
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


def _scalar(value: object) -> bytes:
    """Encode one immutable value, without references to other parts of the pickle."""
    return pickle.dumps(value, 5)[2:-1]


def _described(array: Any, order: str) -> bytes:
    """Encode the description of an array that follows its bytes."""
    return b"".join([*map(_scalar, (array.dtype.str, array.shape, order)), pickle.TUPLE, pickle.REDUCE])


def dumps_arrays(obj: Any) -> tuple[Any, tuple[int, ...]] | None:
    """Do the same as ``dumps`` for an array, or for scalar and distinct array arguments. Return None for all else."""
    if type(obj) is not tuple:
        values, head, tail = (obj,), _HEAD, pickle.STOP
    elif len(obj) == 2 and type(obj[0]) is tuple and type(obj[1]) is dict and not obj[1]:
        values, head, tail = obj[0], _ARGUMENTS_HEAD, _ARGUMENTS_TAIL
    else:
        return None
    if not _QUICK.issuperset(map(type, values)):
        return None
    parts: Buffers = [head]
    arrays: list[object] = []
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
    """Add the pickle of an array to ``parts``, and its bytes to ``kept`` if it is large.

    Return False if it is not plain.
    """
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


def dumps_flat(obj: object) -> bytes:
    """Serialize into one ``bytes`` with the buffers inside, to be stored or sent inside another pickle."""
    if is_plain(obj):
        return pickle.dumps(obj, 5)
    out = io.BytesIO()
    try:
        _FastPickler(out, 5).dump(obj)
    except (_ByValue, pickle.PicklingError, AttributeError):
        from monarch_kernel.protocol.by_value import by_value

        return by_value(obj)
    return out.getvalue()


def is_of_pickler(error: Exception) -> bool:
    """Return whether the pickler itself rejects an object, rather than code of its class."""
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
    if is_of_pickler(error):
        raise TypeError(f"{what} cannot be pickled: {error}") from error
    note = f"{what} cannot be pickled"
    if note not in getattr(error, "__notes__", ()):
        error.add_note(note)


def padded(buffers: tuple[int, ...]) -> int:
    """Compute how many bytes of a body precede the pickle, from the lengths of its buffers."""
    return sum(length + (-length % _ALIGN) for length in buffers)


class Unpickling:
    """Unpickles bodies.

    The tensor engine replaces it: torch's functions that rebuild tensors issue operations, which must not be sent to an
    active mesh.
    """

    function: ClassVar[Callable[..., Any]] = pickle.loads


def loads(body: Any, buffers: tuple[int, ...] = ()) -> Any:
    """Unpickle a body, which reverses ``dumps``.

    Arrays refer to ``body``'s memory, which they keep alive, unless it is read-only.

    Raises:
        ModuleNotFoundError, AttributeError: it refers to code that does not exist here. If that is code of this
            package, the sender has another version, and the message says so.
    """
    try:
        if not buffers:
            return Unpickling.function(body.memory() if type(body) is Apart else body)
        if type(body) is Apart:
            view = body.memory()
            rest = body.pickled
        else:
            view = memoryview(body)
            if view.readonly:  # the unpickled value must be writable, as at its sender
                view = memoryview(bytearray(view))
            rest = None
        parts: list[memoryview] = []
        at = 0
        for length in buffers:
            parts.append(view[at : at + length])
            at += length + (-length % _ALIGN)
        return Unpickling.function(view[at:] if rest is None else rest, buffers=parts)
    except (ModuleNotFoundError, AttributeError) as error:
        if (found := _OURS.search(str(error))) is None:
            raise
        raise type(error)(
            f"monarch_kernel {__version__} has no {found[1] or '.'.join((found[3], found[2]))}, to which the sender "
            "refers because it has another version: install the same version on all hosts"
        ) from None
