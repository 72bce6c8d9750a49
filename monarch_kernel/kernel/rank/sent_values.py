"""Pickle the value of a cell for the notebook. Of a large value, only a short text is sent."""

from __future__ import annotations

import io
from typing import Any

from monarch_kernel.introspection import by_value_pickler
from monarch_kernel.kernel.rank.value_size import shortened, size_at_least

#: The maximum size of a value's pickle (bytes).
VALUE_LIMIT = 16_000_000


def pickled(value: Any) -> tuple[bytes | None, str]:
    """Return the pickle of a value, or None and the reason why it is not sent."""
    size = size_at_least(value, VALUE_LIMIT)
    if size > VALUE_LIMIT:
        return None, _too_large(size)
    written = _Limited()
    try:
        _ValuePickler(written, protocol=5).dump(value)
    except _Full:
        return None, _too_large(VALUE_LIMIT)
    except _Stays as error:
        return None, str(error)
    except Exception as error:  # pickling runs user code
        return None, f"it cannot be pickled ({type(error).__name__}: {error})"
    return written.getvalue(), ""


def check_not_bound(value: object) -> None:
    """Raise TypeError if a value depends on the process groups of its rank: a DTensor, or a device mesh."""
    kind = type(value)
    if kind.__name__ == "DTensor" and kind.__module__.startswith("torch."):
        raise _Stays("a DTensor stays on its rank; %mesh pull NAME --as-handle makes a handle of it")
    if kind.__name__ == "DeviceMesh" and kind.__module__.startswith("torch."):
        raise _Stays("a DeviceMesh is of its rank")


class _Stays(TypeError):
    """Raised for a value that cannot leave its rank."""


class _ValuePickler(by_value_pickler()):  # type: ignore[misc]  # a class that cloudpickle's import makes
    with_names = False  # the notebook already has them

    def reducer_override(self, obj: Any) -> Any:
        check_not_bound(obj)
        kind = type(obj)
        if kind.__name__ == "Tensor" and kind.__module__ == "torch" and obj.is_cuda:
            # The notebook may have no GPU. If it has one, a displayed value must not create a CUDA context there.
            return obj.detach().cpu().requires_grad_(obj.requires_grad).__reduce_ex__(5)
        return super().reducer_override(obj)


class _Full(Exception):
    """Raised when a pickle is too large to send."""


class _Limited(io.BytesIO):
    """A file that accepts a pickle up to the limit, so that the rest is never produced."""

    def write(self, data: Any, /) -> int:
        if self.tell() + len(data) > VALUE_LIMIT:
            raise _Full
        return super().write(data)


def _too_large(size: int) -> str:
    return f"it is larger than a cell sends by itself (at least {size / 1e6:.0f} MB); use %mesh pull"


#: The pickle of None, the value of a cell that ends in a call for its effect.
NONE = pickled(None)[0]


def short(value: Any) -> str:
    """Return a short text for a value that the notebook may show without unpickling it."""
    return shortened(value, 200)
