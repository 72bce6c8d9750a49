"""A machine whose ranks are reached through a relay, which a remote command runs, or which is at a meeting point."""

from __future__ import annotations

import itertools
import json
import os
import socket
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

from monarch_kernel import programs
from monarch_kernel._version import __version__
from monarch_kernel.engines.join.announcements import JoinError, RankAnnouncement, announcement_of
from monarch_kernel.engines.join.frame_loop import FrameLoop
from monarch_kernel.engines.join.rank_machines import HELLO, JoinableRank, OutsideRead, ThisMachine, joinable_rank
from monarch_kernel.engines.join.relay import CHANNEL, announcement_key

#: The module that is the relay.
RELAY = "monarch_kernel.engines.join.relay"
#: The time limit for a relay to start, and to answer (seconds).
START, ANSWER = 30.0, 10.0
#: How much of a relay's standard error is shown (bytes).
_TAIL = 2000


class RemoteMachine:
    """The ranks of this user on another machine, with the methods of ``ThisMachine``. Subclasses connect to its relay.

    Args:
        name: the name of the machine, for users.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._calls = itertools.count(1)
        self._answers: dict[int, Any] = {}
        self._changed = threading.Condition()
        self._ranks: dict[int, tuple[Callable[[bytes], None], Callable[[], None]]] = {}
        self._began: dict[str, Any] | None = None
        #: Whether the connection is over.
        self.ended = False

    def send_frame(self, *parts: bytes) -> None:
        """Send a frame with these parts to the relay, without waiting."""
        raise NotImplementedError

    def why(self) -> str:
        """Return why the connection to the relay has ended."""
        raise NotImplementedError

    def close(self) -> None:
        """End the connection."""
        raise NotImplementedError

    def begin(self, timeout: float = START) -> None:
        """Wait until the relay has started.

        Raises:
            JoinError: it has ended, or has not started in time; the message has its output.
        """
        with self._changed:
            begun = self._changed.wait_for(lambda: self._began is not None or self.ended, timeout)
        if self._began is None:
            why = f"nothing came for {timeout:g} s" if not begun else self.why()
            self.close()
            raise JoinError(f"{self.name} cannot be reached: {why}")
        if self._began.get("version") != __version__:
            version = self._began.get("version")
            self.close()
            raise JoinError(f"{self.name} has monarch_kernel {version}, and this process {__version__}: install one")

    # -- as of ``ThisMachine`` ---------------------------------------------------------------------------

    def find(self, name: str = "") -> list[RankAnnouncement]:
        """See ``ThisMachine``. A machine that is gone has no ranks."""
        answer = self._ask({"do": "find"}, ANSWER)
        found = [announcement_of(each) for each in answer.get("found", ())]
        return [each for each in found if name in ("", each.name)]

    def connect(
        self,
        wanted: Iterable[RankAnnouncement],
        on_frame: Callable[[RankAnnouncement, bytes], None],
        on_closed: Callable[[RankAnnouncement], None],
    ) -> list[JoinableRank]:
        """See ``ThisMachine``."""
        ranks = [announcement_key(each) for each in wanted]

        def begin(answer: dict[str, Any]) -> None:  # on the thread of the loop, before the first frame of a rank
            for each in answer.get("connected", ()):
                found = joinable_rank(each["rank"], near=False)
                announced, channel = found.announced, int(each["channel"])
                found.link = _RelayedLink(self, channel)
                self._ranks[channel] = (
                    lambda frame, of=announced: on_frame(of, frame),
                    lambda of=announced: on_closed(of),
                )
                connected.append(found)

        connected: list[JoinableRank] = []
        self._ask({"do": "connect", "ranks": ranks}, HELLO + ANSWER, begin)
        return connected

    def read_stacks(
        self, ranks: Sequence[RankAnnouncement], native: bool, timeout: float
    ) -> dict[RankAnnouncement, OutsideRead]:
        """See ``ThisMachine``."""
        if not ranks:
            return {}
        by_pid = {each.pid: each for each in ranks}
        asked = {"do": "stacks", "pids": list(by_pid), "native": native, "timeout": timeout}
        answer = self._ask(asked, timeout + ANSWER)
        return {by_pid[int(pid)]: OutsideRead(*read) for pid, read in answer.get("stacks", {}).items()}

    def _ask(
        self, message: dict[str, Any], timeout: float, then: Callable[[dict[str, object]], None] | None = None
    ) -> dict[str, Any]:
        number = next(self._calls)
        with self._changed:
            self._answers[number] = then
        self.send(0, json.dumps({**message, "call": number}).encode())
        with self._changed:
            self._changed.wait_for(lambda: isinstance(self._answers[number], dict) or self.ended, timeout)
            answer = self._answers.pop(number)
        return answer if isinstance(answer, dict) else {}

    def send(self, channel: int, *parts: bytes) -> None:
        """Send a frame to a rank, or to the relay."""
        self.send_frame(CHANNEL.pack(channel), *parts)

    def close_rank(self, channel: int) -> None:
        """Close the connection to a rank."""
        self.send(0, json.dumps({"do": "close", "channel": channel}).encode())

    # -- on the thread of the loop ---------------------------------------------------------------------

    def on_frame(self, frame: bytes) -> None:
        """Handle a frame of the relay."""
        (channel,) = CHANNEL.unpack_from(frame)
        if channel:
            known = self._ranks.get(channel)
            if known is not None:
                known[0](frame[CHANNEL.size :])
            return
        message = json.loads(frame[CHANNEL.size :])
        if "closed" in message:
            known = self._ranks.pop(int(message["closed"]), None)
            if known is not None:
                known[1]()
            return
        with self._changed:
            number = message.get("call")
            if number is None:
                self._began = message
            elif number in self._answers:
                then = self._answers[number]
                if then is not None:
                    then(message)
                self._answers[number] = message
            self._changed.notify_all()

    def on_end(self) -> None:
        """Handle the end of the connection."""
        ranks, self._ranks = self._ranks, {}
        with self._changed:
            self.ended = True
            self._changed.notify_all()
        for _, on_closed in ranks.values():
            on_closed()


class _RelayedLink:
    """A connection to a rank through a relay (``rank_machines.RankLink``)."""

    def __init__(self, machine: RemoteMachine, channel: int) -> None:
        self._machine = machine
        self._channel = channel

    def send(self, *parts: bytes) -> None:
        """See ``rank_machines.RankLink``."""
        self._machine.send(self._channel, *parts)

    def close(self) -> None:
        """See ``rank_machines.RankLink``."""
        self._machine.close_rank(self._channel)


class CommandMachine(RemoteMachine):
    """A machine whose relay a command runs.

    Args:
        name: the name of the machine, for users.
        command: runs the relay there: ``ssh HOST python -m monarch_kernel.engines.join.relay``.
        loop: carries messages to and from it.

    Raises:
        JoinError: the command cannot be run.
    """

    def __init__(self, name: str, command: Sequence[str], loop: FrameLoop) -> None:
        super().__init__(name)
        ours, theirs = socket.socketpair()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # as long as the command runs
        try:
            # In a session of its own: Ctrl-C at a terminal is for the program, not for its connections.
            self._process = programs.start(
                command, stdin=theirs.fileno(), stdout=theirs.fileno(), stderr=self._errors, start_new_session=True
            )
        except OSError as error:
            ours.close()
            self._errors.close()
            raise JoinError(f"{name}: {command[0]} cannot be run: {error.strerror}") from None
        finally:
            theirs.close()
        self._link = loop.add(ours, lambda _link, frame: self.on_frame(frame))
        self._link.on_closed = lambda _link: self.on_end()

    def send_frame(self, *parts: bytes) -> None:
        """See ``RemoteMachine``."""
        self._link.send(*parts)

    def why(self) -> str:
        """See ``RemoteMachine``. Returns the last output of the command."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, self._errors.tell() - _TAIL))
        said = self._errors.read().decode(errors="replace").strip()
        return f"{said or 'no message'} (exit status {self._process.poll()})"

    def close(self) -> None:
        """See ``RemoteMachine``. Also ends the command."""
        self._link.close()
        try:
            self._process.wait(2.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if not self._errors.closed:
            self._errors.close()


#: A machine on which ranks can be found.
RankMachine = ThisMachine | RemoteMachine
