"""Check that pickles contain only data, for pickles from a process that must not execute code here.

Unpickling calls whatever the pickle names. A checked pickle names only data classes of this project (dataclasses, named
tuples, structs, enumerations), plain containers, and, where errors are expected, exceptions of Python and of this
project. Building these executes no code of the sender.
"""

from __future__ import annotations

import enum
import io
import pickle

import msgspec

from monarch_kernel.protocol.faults import Fault

#: Names of Python that are allowed besides exceptions.
_PLAIN = {
    **dict.fromkeys(("set", "frozenset", "bytearray", "complex", "range", "slice"), "builtins"),
    **dict.fromkeys(("OrderedDict", "deque", "Counter"), "collections"),
    **dict.fromkeys(("datetime", "date", "time", "timedelta", "timezone"), "datetime"),
}
_OURS = ("monarch_kernel", "workspace_sync")


class NotDataError(pickle.UnpicklingError):
    """A pickle names something that is not data. The message has the name."""


class _DataUnpickler(pickle.Unpickler):
    def __init__(self, pickled: bytes, exceptions: bool) -> None:
        super().__init__(io.BytesIO(pickled))
        self._exceptions = exceptions

    def find_class(self, module: str, name: str) -> object:
        """Find the object of a name. Refuse it if it is not data."""
        if _PLAIN.get(name) == module:
            return super().find_class(module, name)
        if module.partition(".")[0] in _OURS or (self._exceptions and module == "builtins"):
            found = super().find_class(module, name)
            if isinstance(found, type) and found.__module__ == module:
                if issubclass(found, BaseException):
                    fits = self._exceptions
                else:
                    fits = module != "builtins" and _holds_data(found)
                if fits:
                    return found
        raise NotDataError(f"{module}.{name} is no data")


def _holds_data(kind: type) -> bool:
    """Return whether building an instance runs only code of Python or msgspec for its kind of class."""
    state = getattr(kind, "__setstate__", None)  # dataclasses with slots that are frozen have one
    if getattr(kind, "__post_init__", None) is not None or (state is not None and state.__module__ != "dataclasses"):
        return False
    if issubclass(kind, enum.Enum | msgspec.Struct):
        return True
    if issubclass(kind, tuple):
        return hasattr(kind, "_fields")
    return "__dataclass_fields__" in vars(kind)


def check_data(pickled: bytes, *, exceptions: bool = False) -> None:
    """Check that a pickle is data.

    Args:
        exceptions: whether to allow exceptions of Python and of this project.

    Raises:
        NotDataError: it names something else.
        Exception: it is incomplete, or cannot be unpickled.
    """
    _DataUnpickler(pickled, exceptions).load()


def without_foreign_exceptions(fault: Fault) -> Fault:
    """Copy a fault so that only exceptions of Python or of this project that are data can be rebuilt from it."""
    pickled = fault.pickled
    if pickled is not None:
        try:
            check_data(pickled, exceptions=True)
        except Exception:  # whatever is wrong with it
            pickled = None
    return msgspec.structs.replace(
        fault,
        pickled=pickled,
        cause=fault.cause and without_foreign_exceptions(fault.cause),
        context=fault.context and without_foreign_exceptions(fault.context),
        members=[without_foreign_exceptions(each) for each in fault.members],
    )
