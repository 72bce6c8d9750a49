"""Who looks at stopped ranks, and which one of them drives.

Any number of viewers may look on. One steers: the first that wants to, until it closes, lets go, or another takes over
by force. A viewer that is lost (a browser that was reloaded, a terminal that was closed) is closed by whoever serves
it, and leaves stopped what is stopped.
"""

from __future__ import annotations

import threading


class DriverError(RuntimeError):
    """Somebody else drives."""


class Viewer:
    """One who looks on; made by `MeshDebugger.viewer`. Usable as a context manager, which closes it."""

    def __init__(self, viewers: Viewers, name: str) -> None:
        self._viewers = viewers
        self.name = name

    @property
    def is_driver(self) -> bool:
        """Whether this one steers."""
        return self._viewers.driver is self

    def drive(self, force: bool = False) -> None:
        """Steer from now on.

        Raises:
            DriverError: another viewer does, and ``force`` is not given.
        """
        self._viewers.take(self, force)

    def close(self) -> None:
        """Look on no more; what is stopped stays so."""
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
        """A new viewer."""
        viewer = Viewer(self, name)
        with self._lock:
            self._open.append(viewer)
        return viewer

    def names(self) -> list[str]:
        """Who looks on."""
        with self._lock:
            return [viewer.name for viewer in self._open]

    def take(self, viewer: Viewer, force: bool) -> None:
        """See `Viewer.drive`."""
        with self._lock:
            driver = self.driver
            if driver is not None and driver is not viewer and not force:
                raise DriverError(
                    f"{driver.name} drives the debugger: look on, have it let go (detach), or take over with force"
                )
            self.driver = viewer

    def check(self, viewer: Viewer | None) -> None:
        """Before anything is steered: the viewer takes the wheel if nobody has it. None is the program itself."""
        if viewer is not None:
            self.take(viewer, force=False)

    def close(self, viewer: Viewer) -> None:
        """See `Viewer.close`."""
        with self._lock:
            if viewer in self._open:
                self._open.remove(viewer)
            if self.driver is viewer:
                self.driver = None
