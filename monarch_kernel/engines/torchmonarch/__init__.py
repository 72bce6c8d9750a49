"""PyTorch's own Monarch as the engine of the tools: its Rust runtime carries their messages, and starts the ranks.

Monarch's public API is all that is used here. ``ranks.py`` is what runs in its processes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from monarch_kernel.engines.torchmonarch.runtime import MonarchRuntime

__all__ = ["make_runtime"]


def make_runtime() -> MonarchRuntime:
    """The engine of this controller.

    Raises:
        ImportError: torchmonarch is not installed; the message says what to do.
    """
    from monarch_kernel.aliases import enabled
    from monarch_kernel.engines.torchmonarch.runtime import MonarchRuntime

    if enabled():
        raise ImportError(
            "`import monarch` gives monarch_kernel in this process, so torchmonarch cannot be its engine: set "
            "MONARCH_KERNEL_ENGINE=torchmonarch before the kernel starts"
        )
    return MonarchRuntime()
