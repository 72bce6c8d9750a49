"""PyTorch's own Monarch as the engine of the tools: its Rust runtime carries their messages, and starts the ranks.

This package uses only Monarch's public API. ``ranks.py`` runs in Monarch's processes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from monarch_kernel.engines.torchmonarch.runtime import MonarchRuntime

__all__ = ["make_runtime"]


def make_runtime() -> MonarchRuntime:
    """Return the engine of this controller.

    Raises:
        ImportError: torchmonarch is not installed; the message has a remedy.
    """
    from monarch_kernel.aliases import enabled
    from monarch_kernel.engines.torchmonarch.runtime import MonarchRuntime

    if enabled():
        raise ImportError(
            "`import monarch` gives monarch_kernel in this process, so torchmonarch cannot be its engine: set "
            "MONARCH_KERNEL_ENGINE=torchmonarch before the kernel starts"
        )
    return MonarchRuntime()
