"""Python 3.11: trace functions of threads that run already (`sys.settrace` sets only that of the calling thread).

CPython exports what this needs, except for two offsets in `PyThreadState`, which are searched for, not assumed.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

Tracer = Callable[..., Any]

_WORDS = 36  # the part of a thread state that is searched; the whole is larger
_WORD = ctypes.sizeof(ctypes.c_void_p)


@dataclass(frozen=True, slots=True)
class _Layout:
    """Offsets in a thread state (bytes), and the C function that calls Python trace functions."""

    thread: int
    tracer: int
    trampoline: int


class OwnThread:
    """The calling thread, if other threads cannot be reached."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()

    @property
    def tracer(self) -> Tracer | None:
        """Its trace function."""
        return sys.gettrace()

    def trace(self, tracer: Tracer | None) -> None:
        """Set its trace function."""
        sys.settrace(tracer)


class ThreadState:
    """The state of one thread; valid as long as this thread keeps the interpreter lock."""

    def __init__(self, address: int, layout: _Layout) -> None:
        self._address = address
        self._layout = layout

    @property
    def thread(self) -> int:
        """Its `threading.get_ident()`."""
        return self._word(self._layout.thread)

    @property
    def tracer(self) -> Tracer | None:
        """Its trace function."""
        tracer = self._word(self._layout.tracer)
        return ctypes.cast(tracer, ctypes.py_object).value if tracer else None

    def trace(self, tracer: Tracer | None) -> None:
        """Like `sys.settrace`, for that thread."""
        if tracer is None:
            _set_trace(self._address, None, None)
        else:
            _set_trace(self._address, self._layout.trampoline, ctypes.py_object(tracer))

    def _word(self, offset: int) -> int:
        return ctypes.c_void_p.from_address(self._address + offset).value or 0


def _set_trace(state: int, function: int | None, tracer: Any) -> None:
    set_trace: Any = ctypes.pythonapi._PyEval_SetTrace
    set_trace.restype = ctypes.c_int
    set_trace.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.py_object if tracer is not None else ctypes.c_void_p]
    if set_trace(state, function, tracer) != 0:
        raise RuntimeError("the trace function of a thread could not be set")


def thread_states() -> list[ThreadState] | list[OwnThread]:
    """All threads of this interpreter; only the calling one where the interpreter is built differently."""
    layout = _find_layout()
    if layout is None:
        return [OwnThread()]
    api = ctypes.pythonapi
    head, following, interpreter = api.PyInterpreterState_ThreadHead, api.PyThreadState_Next, api.PyInterpreterState_Get
    for function in (head, following, interpreter):
        function.restype = ctypes.c_void_p
    head.argtypes = following.argtypes = [ctypes.c_void_p]
    address = head(interpreter())
    states: list[ThreadState] = []
    while address:
        states.append(ThreadState(address, layout))
        address = following(address)
    return states


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


__all__ = ["OwnThread", "ThreadState", "Tracer", "thread_states"]
