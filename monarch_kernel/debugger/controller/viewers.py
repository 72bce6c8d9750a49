"""Manage the viewers of stopped ranks, and decide which of them controls the debugger.

Any number of viewers may watch. One has control: the first that requests it, until it closes or detaches, or another
viewer takes control by force. A viewer can be lost, for example when a browser is reloaded or a terminal is closed. The
code that serves it then closes it. Stopped ranks stay stopped, and any viewer may take control.
"""

from __future__ import annotations

import threading


class DriverError(RuntimeError):
    """Another viewer controls the debugger."""


class Viewer:
    """A viewer of a debugger. `MeshDebugger.viewer` creates it. As a context manager, it closes at the end."""

    def __init__(self, viewers: Viewers, name: str) -> None:
        self._viewers = viewers
        self.name = name

    @property
    def is_driver(self) -> bool:
        """Whether this viewer has control."""
        return self._viewers.driver is self

    def drive(self, force: bool = False) -> None:
        """Take control.

        Raises:
            DriverError: another viewer has it, and ``force`` is not set.
        """
        self._viewers.take(self, force)

    def close(self) -> None:
        """Stop watching, and release control. Stopped ranks stay stopped."""
        self._viewers.close(self)

    def __enter__(self) -> Viewer:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()


class Viewers:
    """All viewers of a debugger."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: list[Viewer] = []
        self.driver: Viewer | None = None

    def open(self, name: str) -> Viewer:
        """Create a viewer."""
        viewer = Viewer(self, name)
        with self._lock:
            self._open.append(viewer)
        return viewer

    def names(self) -> list[str]:
        """Return the names of all viewers."""
        with self._lock:
            return [viewer.name for viewer in self._open]

    def take(self, viewer: Viewer, force: bool) -> None:
        """See `Viewer.drive`."""
        with self._lock:
            driver = self.driver
            if driver is not None and driver is not viewer and not force:
                raise DriverError(
                    f"{driver.name} controls the debugger: watch, ask it to detach, or take over with force"
                )
            self.driver = viewer

    def check(self, viewer: Viewer | None) -> None:
        """Give control to a viewer that is about to use it, if it is free.

        None is the program itself, which is always allowed.

        Raises:
            DriverError: another viewer has it.
        """
        if viewer is not None:
            self.take(viewer, force=False)

    def close(self, viewer: Viewer) -> None:
        """See `Viewer.close`."""
        with self._lock:
            if viewer in self._open:
                self._open.remove(viewer)
            if self.driver is viewer:
                self.driver = None
