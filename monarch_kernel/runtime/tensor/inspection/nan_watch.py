"""`watch_nan`: stop at the operation that made the first NaN or Inf on any rank."""

from __future__ import annotations

from typing import Any

from monarch_kernel.runtime.tensor.controller.engine import NanCheckSettings, TensorEngine
from monarch_kernel.runtime.tensor.inspection.engines import all_engines


class NanWatching:
    """A watch for NaN and Inf that is on until `stop`, or the end of its ``with`` block. Made by `watch_nan`."""

    def __init__(self, watching: NanCheckSettings) -> None:
        self._watching = watching
        TensorEngine.watching = watching
        for engine in all_engines():
            engine.watch(watching)

    def __enter__(self) -> NanWatching:
        return self

    def __exit__(self, kind: Any, *exc: object) -> None:
        try:
            if kind is None:
                for engine in all_engines():
                    engine.check_all()
        finally:
            self.stop()

    def stop(self) -> None:
        """Check no more. Nothing happens if another watch has replaced this one."""
        if TensorEngine.watching is not self._watching:
            return
        TensorEngine.watching = None
        for engine in all_engines():
            engine.watch(None)

    def __repr__(self) -> str:
        state = "on" if TensorEngine.watching is self._watching else "off"
        what = "NaN and Inf" if self._watching.inf else "NaN"
        return f"<watch for {what}, {state}>"


def watch_nan(*, inf: bool = True, at_once: bool = True) -> NanWatching:
    """Check on the ranks what every operation makes, on all meshes, and stop at the first that makes a NaN or Inf.

    It stops only at an operation whose inputs have none: what passes a NaN on is not to blame. Infinite literals, such
    as those of masks, are no mistakes either. Values are checked rank by rank, after each operation; without a watch,
    operations cost nothing more. Values stay as they are, so they can be examined after the stop.

    Args:
        inf: stop at an Inf, too.
        at_once: raise at the line that issued the operation, at the price of a round trip for each operation. Else
            the next fetch raises, or the end of the ``with`` block, and names that line.

    Returns:
        The watch: use it in ``with``, or end it with ``stop()``.

    Raises:
        NonFiniteError: from operations, fetches and the end of the block: with rank, operation, inputs and line.
    """
    return NanWatching(NanCheckSettings(inf, at_once))
