"""``profile``: trace a block of a program, with Monarch's names; ``tracing`` has the code."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from monarch_kernel.watch.tracing import Trace


class profile:  # noqa: N801  # Monarch's name
    """Traces this controller and all its ranks over a block: ``with profile(url) as profiled: ...``.

    Args:
        telemetry_url: accepted for compatibility with Monarch; this process and its ranks are always traced.
        on_trace_ready: called with this object at the end of the block.

    Attributes:
        path: the last file written; None if there is none.
    """

    def __init__(self, telemetry_url: str, *, on_trace_ready: Callable[[profile], object] | None = None) -> None:
        del telemetry_url
        self.path: Path | None = None
        self._on_trace_ready = on_trace_ready
        self._trace: Trace | None = None

    def __enter__(self) -> Self:
        folder = tempfile.TemporaryDirectory(prefix="monarch-profile-", ignore_cleanup_errors=True)
        weakref.finalize(self, folder.cleanup)
        self._trace = Trace(os.path.join(folder.name, "trace.json")).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._trace is not None
        self._trace.stop()
        if self._on_trace_ready is not None and error is None:
            self._on_trace_ready(self)

    def export_perfetto_trace(self, output: os.PathLike[str] | str | None = None) -> Path:
        """Write the trace of the block as a file for ui.perfetto.dev. Return its path.

        Args:
            output: the file, or a folder; by default a new file in the temporary folder of this user.

        Raises:
            RuntimeError: the block has not ended.
        """
        if self._trace is None or self._trace.summary is None:
            raise RuntimeError("there is no trace before the end of the block: with job.profile() as profiled: ...")
        self.path = trace_path(output)
        shutil.copyfile(self._trace.summary.file, self.path)
        return self.path


def trace_path(output: os.PathLike[str] | str | None, suffix: str = ".json") -> Path:
    """Return the path of a trace file. Its folder is created if it is missing."""
    name = time.strftime("monarch-profile-%Y%m%d-%H%M%S") + suffix
    if output is None:
        return Path(tempfile.mkdtemp(prefix="monarch_profiles-")) / name
    path = Path(output).absolute()
    path = path / name if path.is_dir() else path
    path.parent.mkdir(parents=True, exist_ok=True)
    return path
