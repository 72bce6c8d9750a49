"""Stop at the operation that made the first NaN or Inf on any rank: `watch_nan`."""

from __future__ import annotations

from monarch_kernel.runtime.tensor.controller.engine import NanCheckSettings, TensorEngine
from monarch_kernel.runtime.tensor.inspection.running import all_engines


class NanWatching:
    """A watch for NaN and Inf that is on until `stop`, or the end of its ``with`` block. Created by `watch_nan`."""

    def __init__(self, watching: NanCheckSettings) -> None:
        self._watching = watching
        TensorEngine.watching = watching
        for engine in all_engines():
            engine.watch(watching)

    def __enter__(self) -> NanWatching:
        return self

    def __exit__(self, kind: object, *exc: object) -> None:
        try:
            if kind is None:
                for engine in all_engines():
                    engine.check_all()
        finally:
            self.stop()

    def stop(self) -> None:
        """Stop checking. If another watch has replaced this one, do nothing."""
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
    """Check the results of every operation on the ranks, on all meshes. Stop at the first that makes a NaN or Inf.

    It stops only at an operation without NaN or Inf in its inputs, because other operations merely pass them on. It
    ignores infinite literals, such as those of masks. Each rank checks its values after each operation. Without a
    watch, operations have no extra cost. The watch does not change values, so they can be examined after the stop.

    Args:
        inf: also stop at an Inf.
        at_once: raise at the line that issued the operation, which costs one round trip for each operation. Otherwise
            the next fetch or the end of the ``with`` block raises, and names that line.

    Returns:
        The watch: use it in ``with``, or end it with ``stop()``.

    Raises:
        NonFiniteError: raised by operations, fetches and the end of the block, with rank, operation, inputs and line.
    """
    return NanWatching(NanCheckSettings(inf, at_once))
