"""`address_of`: by what a debugger on a rank finds the value of a handle."""

from __future__ import annotations

from typing import NamedTuple

from torch.utils._python_dispatch import (
    _disable_current_modes,  # pyright: ignore[reportPrivateUsage]  # torch has no public name for it
)

from monarch_kernel.runtime.tensor.controller.handle import Tensor


class ValueAddress(NamedTuple):
    """A value on ranks, as `tensor_value` finds it there.

    Attributes:
        engine: the key of its engine.
        number: of the value.
    """

    engine: str
    number: int


def address_of(handle: Tensor, timeout: float) -> ValueAddress:
    """Where the value of a handle is on its ranks. Waits until they have run the operations issued so far.

    Args:
        timeout: how long to wait for that (seconds); ranks that are late then may not have the value.

    Raises:
        DeviceMeshError: a rank has died.
    """
    mesh = handle._spec.mesh
    engine = mesh.engine
    with engine.lock, _disable_current_modes():
        mesh.check_alive()
        engine.turn_to(mesh)
        engine.flush()
        call = mesh.workers.done.call()
    try:
        engine.answer(mesh, call, timeout)
    except TimeoutError:
        pass
    return ValueAddress(engine._key, handle._owner.id)
