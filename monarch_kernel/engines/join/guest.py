"""The tools in a rank of a joined job. The first viewer that enters loads this module."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from monarch_kernel.engines.hosted import wire
from monarch_kernel.engines.hosted.guest import Guest
from monarch_kernel.engines.join.frame_loop import FrameLink
from monarch_kernel.engines.join.holding import Holding
from monarch_kernel.introspection import Running

if TYPE_CHECKING:
    from monarch_kernel.engines.join.door import Door

NAME = "join"


class JoinedProgram:
    """What runs in this process beside tools (``guest.ProgramActors``): a program without actors.

    Args:
        holding: what becomes of it when it fails.
    """

    def __init__(self, holding: Holding) -> None:
        self._holding = holding

    def endpoints_here(self) -> list[Running]:
        """Its main thread, which is where a rank stands; a program that has failed runs no more."""
        if self._holding.held:
            return []
        return [Running("", "the program", threading.main_thread().ident or 0)]

    def actors_here(self) -> dict[str, Any]:
        """None."""
        return {}

    def interrupt(self, endpoint: Running) -> None:
        """Nothing: the program is never interrupted."""


class JoinedGuest(Guest):
    """The tools of any number of viewers in this process, which is none of theirs.

    Args:
        door: where viewers enter; it keeps faults.
    """

    def __init__(self, door: Door) -> None:
        super().__init__(NAME, JoinedProgram(door.holding), of_program=True)
        self._door = door

    def admit(self, link: FrameLink, first: bytes) -> None:
        """Let a viewer in, whose first message this is; the messages that follow are for its tools."""
        message = wire.decode(first)
        assert isinstance(message, wire.EnterRank)
        controller = message.controller

        def ended(_link: FrameLink) -> None:
            visitor = self._visitors.get(controller)
            if visitor is None or visitor.uid == message.uid:  # it has not entered anew
                self.lose(controller)

        link.on_frame = self._on_frame
        link.on_closed = ended
        self._door.holding.install()  # errors that end the program can be stopped at
        self.enter(message, message.rank, link.send)

    def _interrupt(self, cells: str) -> list[str]:
        """Interrupt cells, and nothing of the program."""
        stopped: list[str] = []
        for actor in list(self.actors.values()):
            running, of_cells = actor.running, actor.running_for.startswith(cells)
            if of_cells and not type(actor.object).__background__ and actor.interrupt():
                stopped.append(f"{actor.name}.{running}")
        return stopped

    def _on_frame(self, _link: FrameLink, frame: bytes) -> None:
        self.receive(frame)

    def lose(self, controller: str) -> None:
        """See ``Guest.lose``. The last viewer that goes has looked at a program that is held."""
        super().lose(controller)
        if not self._visitors:
            self._door.holding.release()
            self._door.holding.remove()

    def interrupt_main_thread(self) -> None:
        """Interrupt the cell that runs in this rank; the program's own main thread goes on."""
        for actor in list(self.actors.values()):
            if not type(actor.object).__background__:
                actor.interrupt()
