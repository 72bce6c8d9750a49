"""Read and set the trace functions of running threads on Python 3.11.

(`sys.settrace` sets only that of the calling thread.) CPython exports the necessary functions, except for two offsets
in `PyThreadState`. These are searched for, not assumed.

A thread's state is freed when the thread ends. That can happen whenever this thread releases the GIL: between two calls
of Python code. The list of states is therefore traversed, read and written by iterators and functions that are
implemented in C and chained. A single call exhausts each chain, and the GIL is held during this call.
"""

from __future__ import annotations

import ctypes
import gc
import sys
import threading
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, chain, repeat, starmap, takewhile, tee
from operator import attrgetter
from typing import Any

Tracer = Callable[..., Any]

_WORDS = 36  # the part of a thread state that is searched; the whole state is larger
_WORD = ctypes.sizeof(ctypes.c_void_p)


@dataclass(frozen=True, slots=True)
class _Layout:
    """Offsets in a thread state (bytes), and the C function that calls Python trace functions."""

    thread: int
    tracer: int
    trampoline: int


@dataclass(frozen=True, slots=True)
class _Api:
    """Functions of the interpreter that keep the GIL. Addresses are integers, and NULL is None."""

    interpreter: Callable[[], int]
    head: Callable[[int], int]
    following: Callable[..., int]
    copy: Callable[[int, int], bytes]
    new_reference: Callable[[int], Tracer]
    set_trace: Callable[[int, int | None, int | None], int]


def thread_tracers() -> dict[int, Tracer | None]:
    """Return the trace function of each thread, by `threading.get_ident()`.

    If the interpreter is built differently, only that of the calling thread is returned. A thread that is just changing
    its trace function is left out.
    """
    layout = _find_layout()
    if layout is None:
        return {threading.get_ident(): sys.gettrace()}
    with _no_collection():
        fields = map(ctypes.c_void_p.from_address, map(layout.tracer.__add__, _states()))
        # They are referenced in the same call that finds them. From here on they stay alive, even if their threads end.
        tracers = list(map(_api().new_reference, filter(None, map(attrgetter("value"), fields))))
        held = {id(tracer): tracer for tracer in tracers}
        return {thread: held.get(tracer) for _, thread, tracer in _read(layout) if not tracer or tracer in held}


def set_tracers(tracers: Mapping[int, Tracer | None]) -> None:
    """Set trace functions as `sys.settrace` does, for each of these threads that still runs.

    Raises:
        RuntimeError: the interpreter refused (an audit hook).
    """
    layout = _find_layout()
    if layout is None:
        if threading.get_ident() in tracers:
            sys.settrace(tracers[threading.get_ident()])
        return
    present = (
        thread_tracers()
    )  # held until the end: code that runs when a trace function is freed must not run in the chain
    calls: dict[int, tuple[int, int | None, int | None]] = {}
    with _no_collection():
        for address, thread, _ in _read(layout):
            if thread in tracers:
                tracer = tracers[thread]
                calls[address] = (address, None, None) if tracer is None else (address, layout.trampoline, id(tracer))
        alive = filter(calls.__contains__, _states())
        failed = any(starmap(_api().set_trace, map(calls.__getitem__, alive)))
    del present
    if failed:
        raise RuntimeError("the trace function of a thread could not be set")


def _states() -> Iterator[int]:
    """Yield the addresses of all thread states. They are valid only during the one call that exhausts this iterator."""
    api = _api()
    # PyThreadState_Next is called with a second argument, which a C function ignores.
    return takewhile(bool, accumulate(chain(map(api.head, (api.interpreter(),)), repeat(None)), api.following))


def _read(layout: _Layout) -> list[tuple[int, int, int]]:
    """Return (address, thread, address of the trace function or 0) of each thread."""
    addresses, same = tee(_states())
    size = max(layout.thread, layout.tracer) + _WORD
    copies = list(zip(addresses, map(_api().copy, same, repeat(size))))

    def word(state: bytes, offset: int) -> int:
        return int.from_bytes(state[offset : offset + _WORD], sys.byteorder)

    return [(address, word(state, layout.thread), word(state, layout.tracer)) for address, state in copies]


@contextmanager
def _no_collection() -> Generator[None, None, None]:
    """Disable garbage collection, which could run finalizers (Python code) in the middle of a chain."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@lru_cache(maxsize=1)
def _api() -> _Api:
    library = ctypes.PyDLL(None)  # not `ctypes.pythonapi`, for whose functions other code may have declared other types
    pointer = ctypes.c_void_p

    def declared(name: str, result: Any, *arguments: Any) -> Any:
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
        return function

    return _Api(
        declared("PyInterpreterState_Get", pointer),
        declared("PyInterpreterState_ThreadHead", pointer, pointer),
        declared("PyThreadState_Next", pointer, pointer),
        declared("PyBytes_FromStringAndSize", ctypes.py_object, pointer, ctypes.c_ssize_t),
        declared("Py_NewRef", ctypes.py_object, pointer),
        declared("_PyEval_SetTrace", ctypes.c_int, pointer, pointer, pointer),
    )


@lru_cache(maxsize=1)
def _find_layout() -> _Layout | None:
    if sys.implementation.name != "cpython" or not hasattr(ctypes.pythonapi, "_PyEval_SetTrace"):
        return None
    current: Any = ctypes.pythonapi.PyThreadState_Get
    current.restype = ctypes.c_void_p
    words = (ctypes.c_size_t * _WORDS).from_address(current())

    def probe(*_event: Any) -> None: ...

    present = sys.gettrace()
    if present is None:
        sys.settrace(probe)
    traced = list(words)
    if present is None:
        sys.settrace(None)
    tracers = [i for i in range(2, _WORDS) if traced[i] == id(present or probe) and traced[i - 2]]
    threads = [i for i in range(_WORDS) if traced[i] == threading.get_ident()]
    if len(tracers) != 1 or len(threads) != 1:
        return None
    tracer = tracers[0]
    # c_profilefunc, c_tracefunc, c_profileobj, c_traceobj
    return _Layout(threads[0] * _WORD, tracer * _WORD, traced[tracer - 2])


__all__ = ["Tracer", "set_tracers", "thread_tracers"]
