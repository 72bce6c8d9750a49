"""The tools in a rank of a joined job. The first viewer that enters loads this module."""

from __future__ import annotations

import logging
import sys
import threading
import time
from typing import TYPE_CHECKING

from monarch_kernel.engines.hosted import wire
from monarch_kernel.engines.hosted.attached_process import AttachedProcess, Visitor
from monarch_kernel.engines.hosted.tool_actor import ToolActor
from monarch_kernel.engines.interface import ControlFollower
from monarch_kernel.engines.join.frame_loop import FrameLink
from monarch_kernel.engines.join.holding import Holding
from monarch_kernel.introspection import Running
from monarch_kernel.protocol.faults import capture, encode_fault
from monarch_kernel.protocol.messages import ERROR, Call, Interrupt, OutputChunk
from monarch_kernel.protocol.serialize import Body

if TYPE_CHECKING:
    from monarch_kernel.engines.join.listener import JoinListener

NAME = "join"
#: Output of cells is dropped while more than this waits to be sent to a viewer (bytes).
MOST_OUTPUT = 16 << 20


class JoinedProgram:
    """The code in this process besides tools (``attached_process.ProgramActors``): a program without actors.

    Args:
        holding: handles its failure.
    """

    def __init__(self, holding: Holding) -> None:
        self._holding = holding

    def endpoints_here(self) -> list[Running]:
        """Return the main thread, which shows where the rank is; nothing once the program has failed."""
        if self._holding.held:
            return []
        return [Running("", "the program", threading.main_thread().ident or 0)]

    def actors_here(self) -> dict[str, object]:
        """Return no actors."""
        return {}

    def interrupt(self, endpoint: Running) -> None:
        """Do nothing: the program is never interrupted."""


class JoinedProcess(AttachedProcess):
    """The tools of any number of viewers in this process, which belongs to another program.

    One viewer has control: it stops threads and runs cells. It must send heartbeats. When it is silent for too long, or
    its connection ends, what it has stopped continues, its breakpoints are removed and its cells are interrupted. The
    other viewers can only read.

    Args:
        door: the listener through which viewers enter; it stores faults.
    """

    def __init__(self, door: JoinListener) -> None:
        self._door = door
        self._links: dict[str, FrameLink] = {}
        self._driver: Visitor | None = None
        self._since = 0.0  # when it took control
        self._changing = threading.RLock()  # protects the driver; held longer than the lock of the debugger
        self._faults: logging.Handler | None = None
        self._debugger: ControlFollower | None = None  # set once a viewer has used it
        super().__init__(NAME, JoinedProgram(door.holding), of_program=True)

    def admit(self, link: FrameLink, first: bytes) -> None:
        """Admit a viewer, given its first message. Its tools receive the messages that follow."""
        message, _ = wire.unpack(first)
        assert isinstance(message, wire.EnterRank)
        controller = message.controller
        if controller in self._visitors:  # the end of its former connection has not been noticed yet
            self.lose(controller)
        if self._faults is None:
            self._faults = _FaultLog(self._door)
            log = logging.getLogger("monarch_kernel")
            log.addHandler(self._faults)
            log.propagate = False  # keep messages out of the program's log

        def ended(_link: FrameLink) -> None:
            if self._links.get(controller) is link:
                self._on_end(controller)

        self._links[controller] = link
        link.on_frame = lambda _link, frame: self.receive(controller, frame)
        link.on_closed = ended
        self._door.holding.install()  # the debugger can stop at errors that end the program
        self.enter(message, message.rank, link.send)

    def _interrupt(self, cells: str) -> list[str]:
        """Interrupt cells, but not the program."""
        stopped: list[str] = []
        for actor in list(self.actors.values()):
            running, of_cells = actor.running, actor.running_for.startswith(cells)
            if of_cells and not type(actor.object).__background__ and actor.interrupt():
                stopped.append(f"{actor.name}.{running}")
        return stopped

    # -- who has control -----------------------------------------------------------------------------

    def drives(self, uid: str) -> bool:
        """See ``ToolRuntime``."""
        driver = self._driver
        return driver is not None and uid in ("", driver.uid)

    def follow_control(self, follower: ControlFollower) -> None:
        """See ``ToolRuntime``."""
        self._debugger = follower

    def _on_visitor(self, visitor: Visitor) -> None:
        with self._changing:
            if self._may_drive(visitor, visitor.takes_control):
                self._drive(visitor)
            else:
                self._tell_driver(visitor)

    def _may_drive(self, visitor: Visitor, force: bool) -> bool:
        if visitor.looks_on:
            return False
        return force or self._driver is None or not self._is_there(self._driver)

    def _drive(self, visitor: Visitor | None) -> None:
        """Give control, and the stops of the previous viewer, to a viewer; None: to no viewer."""
        with self._changing:
            former, self._driver = self._driver, visitor
            if visitor is not None and visitor is not former:
                self._since = time.time()
                if self._debugger is not None:
                    self._debugger.hand_over(visitor.uid)
                visitor.heard = time.monotonic()
                self._watch(visitor)
                if former is not None:
                    self._interrupt_cells(former)
                    if former.peer in self._visitors and not self._is_there(former):
                        self.lose(former.peer)  # it was only kept to hold its stops
            for each in list(self._visitors.values()):
                self._tell_driver(each)

    def _tell_driver(self, visitor: Visitor) -> None:
        driver = self._driver
        told = ("", "", 0, 0.0) if driver is None else (driver.peer, driver.host, driver.pid, self._since)
        visitor.tell(wire.RankDriver(*told))

    def _is_there(self, visitor: Visitor) -> bool:
        link = self._links.get(visitor.peer)
        return link is not None and not link.closed and visitor.peer not in self.node.deaths

    def handle(self, visitor: Visitor, message: wire.ToolMessage, body: Body) -> None:
        """See ``AttachedProcess.handle``. Viewers without control cannot run code here."""
        match message:
            case wire.DriveRank():
                with self._changing:
                    if self._may_drive(visitor, message.force):
                        self._drive(visitor)
                    else:
                        self._tell_driver(visitor)
            case Call() | Interrupt() if visitor is not self._driver and self._is_of_driver(message):
                from monarch_kernel.debugger.controller.viewers import DriverError

                fault = encode_fault(capture(DriverError("another viewer has control of this job")))
                self.answer_to(visitor, message)(ERROR, fault)
            case _:
                super().handle(visitor, message, body)

    def _is_of_driver(self, message: Call | Interrupt) -> bool:
        """Return whether only the viewer in control may send this message."""
        if isinstance(message, Interrupt):
            return True
        actor = self.actors.get(message.actor)
        return actor is not None and message.endpoint in actor.of_driver

    # -- viewers that die, or sleep -------------------------------------------------------------------

    def _expects(self, visitor: Visitor, called: set[str]) -> bool:
        if visitor is self._driver:
            return True
        return super()._expects(visitor, called)

    def _on_silence(self, visitor: Visitor) -> None:
        silent = time.monotonic() - visitor.heard
        with self._changing:
            link = self._links.get(visitor.peer)
            if link is None or link.closed:  # held for the requested time
                self.lose(visitor.peer)
                return
            if visitor is self._driver:
                stops = self._let_go(visitor)
                visitor.tell(wire.RankReleased(stops, silent))
        super()._on_silence(visitor)

    def _on_back(self, visitor: Visitor) -> None:
        with self._changing:
            if self._may_drive(visitor, force=False):
                self._drive(visitor)
            else:
                self._tell_driver(visitor)

    def _on_end(self, controller: str) -> None:
        """Handle the end of the connection to a viewer."""
        visitor = self._visitors.get(controller)
        with self._changing:
            if visitor is not None and visitor is self._driver and visitor.silence > visitor.leash:
                visitor.heard = time.monotonic()  # its stops are held for the requested time from now on
                self._interrupt_cells(visitor)
                return
        self.lose(controller)

    def lose(self, controller: str) -> None:
        """See ``AttachedProcess.lose``."""
        with self._changing:
            visitor = self._visitors.get(controller)
            if visitor is not None and visitor is self._driver:
                self._let_go(visitor)
            self._links.pop(controller, None)
            self._interrupt_cells(visitor)
            super().lose(controller)
            if self._debugger is not None and visitor is not None:
                self._debugger.forget(visitor.uid)
            if not self._visitors:
                self._tidy(looked=visitor is None or not visitor.looks_on)

    def _leave(self, controller: str) -> None:
        visitor = self._visitors.get(controller)
        if visitor is not None and visitor is self._driver:
            visitor.silence = visitor.leash  # it asked for no hold
        super()._leave(controller)

    def _let_go(self, visitor: Visitor) -> int:
        """Release the stops of the controlling viewer, and take control from it. Return the number of stops."""
        stops = self._debugger.release() if self._debugger is not None else 0
        self._interrupt_cells(visitor)
        self._drive(None)
        return stops

    def _interrupt_cells(self, visitor: Visitor | None) -> None:
        for name, owner in list(self._owners.items()):
            actor = self.actors.get(name)
            if visitor is not None and owner == visitor.peer and actor is not None:
                _interrupt_cell(actor)

    def _tidy(self, looked: bool) -> None:
        """Restore the program's original state after the last viewer has left.

        Args:
            looked: whether a user has inspected the program; a held program waits for that.
        """
        if looked:
            self._door.holding.release()
        self._door.holding.remove()
        if self._output is not None:
            self._output.close()
            self._output = None
        if self._faults is not None:
            log = logging.getLogger("monarch_kernel")
            log.removeHandler(self._faults)
            log.propagate = True
            self._faults = None

    def stands(self) -> bool:
        """Return whether a viewer has stopped the program."""
        return self._debugger is not None and self._debugger.stands()

    def forget(self) -> None:
        """Forget all viewers in a forked child."""
        self._driver = None
        self._visitors.clear()
        self._links.clear()
        if sys.breakpointhook is not sys.__breakpointhook__ and self._hook is not None:
            sys.breakpointhook = self._hook
        if self._output is not None:
            self._output.forget()

    # -- output, faults and interrupts ------------------------------------------------------------------

    def _on_output(self, stream: int, data: bytes) -> None:
        driver = self._driver
        link = self._links.get(driver.peer) if driver is not None else None
        if driver is not None and link is not None and link.waiting < MOST_OUTPUT:
            driver.tell(OutputChunk("", stream), data)

    def tell_fault(self, count: int, text: str) -> None:
        """Report a fault of the tools to viewers."""
        for visitor in list(self._visitors.values()):
            visitor.tell(wire.RankFault(count, text))

    def interrupt_main_thread(self) -> None:
        """Interrupt the cell that runs in this rank. The program's own main thread continues."""
        for actor in list(self.actors.values()):
            _interrupt_cell(actor)


class _FaultLog(logging.Handler):
    """Collects log messages of tools in a rank. They are faults, and do not belong in the program's log.

    Args:
        door: stores them.
    """

    def __init__(self, door: JoinListener) -> None:
        super().__init__(logging.WARNING)
        self._door = door

    def emit(self, record: logging.LogRecord) -> None:
        """See ``logging.Handler``."""
        error = record.exc_info[1] if record.exc_info else None
        self._door.note(error if error is not None else RuntimeError(record.getMessage()))


def _interrupt_cell(actor: ToolActor) -> None:
    if actor.object is not None and not type(actor.object).__background__:
        actor.interrupt()
