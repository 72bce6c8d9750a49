"""The runtime under the tools (kernel, magics, debugger): this package's own or another one (docs/engines.md).

``tool_runtime()`` returns the runtime of this process; tools access all runtime functions through it
(``interface.ToolRuntime``). A controller uses the runtime in ``MONARCH_KERNEL_ENGINE``, or the one chosen by ``use``
before the tools were first used. A process of another runtime uses that runtime once tools enter it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from monarch_kernel import environment

if TYPE_CHECKING:
    from monarch_kernel.engines.interface import ToolRuntime

__all__ = ["tool_runtime", "use"]

_engine: ToolRuntime | None = None


def tool_runtime() -> ToolRuntime:
    """Return the engine of this process."""
    return _engine or use(environment.ENGINE.get())


def use(chosen: str | ToolRuntime) -> ToolRuntime:
    """Choose the engine of this process.

    Args:
        chosen: ``"monarch_kernel"``, ``"torchmonarch"``, or an engine.

    Raises:
        ValueError: no engine has that name.
        RuntimeError: another engine is already in use.
        ImportError: a package that the engine needs is not installed; the message names it.
    """
    global _engine
    from monarch_kernel.engines.interface import ToolRuntime

    if not isinstance(chosen, str):
        found = chosen
    elif chosen == ToolRuntime.NAME:
        found = ToolRuntime()
    elif chosen == "torchmonarch":
        found = import_module("monarch_kernel.engines.torchmonarch").make_runtime()
    else:
        raise ValueError(f"there is no engine {chosen!r}; there are {ToolRuntime.NAME!r} and 'torchmonarch'")
    if _engine is not None and _engine.NAME != found.NAME:
        raise RuntimeError(
            f"the tools of this process use the engine {_engine.NAME!r} already: choose {found.NAME!r} first thing, or "
            f"start the kernel with {environment.ENGINE.name}={found.NAME}"
        )
    _engine = found = _engine or found
    return found
