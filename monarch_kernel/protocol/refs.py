"""References to processes and memory, and deaths, as sent in messages."""

import enum
from typing import Annotated

import msgspec

#: A time sent from one process to another. Decoding rejects a negative or infinite one and NaN: a timer set to it
#: would crash the process that runs it, or never fire.
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e10)]


class Message(msgspec.Struct, array_like=True):
    """The header of a message. Each kind has a tag of its own, which its class states."""


class ProcRef(msgspec.Struct, array_like=True, frozen=True):
    """The address of a proc: sufficient for any process to reach it, or to ask its agent why it cannot.

    Processes of one *site* connect to each other's Unix sockets and share memory. Others reach them through the site's
    *gateway*: the host agent of a worker, or the controller for its own host.
    """

    id: str
    address: str  # its Unix socket
    host: str
    agent: str
    agent_address: str
    site: str = ""
    gateway: str = ""
    gateway_address: str = ""  # a URL where others may connect; "" for a gateway that only connects to others

    def agent_ref(self) -> "ProcRef":
        """Return the reference of its host agent."""
        return self.beside(self.agent, self.agent_address)

    @property
    def is_controller(self) -> bool:
        """Whether this is a controller: it has no host agent, is its own gateway, and cannot be dialled."""
        return self.agent == self.id and self.gateway == self.id and not self.gateway_address

    def beside(self, proc: str, address: str) -> "ProcRef":
        """Return a reference to another proc of the same agent."""
        return ProcRef(
            proc,
            address,
            self.host,
            self.agent,
            self.agent_address,
            self.site,
            self.gateway,
            self.gateway_address,
        )


class DeathKind(enum.IntEnum):
    """The kind of a death. Code decides by this, never by the text of the cause."""

    UNKNOWN = 0  # from a peer whose version has no kinds; ``Death`` replaces it
    STOPPED = 1  # a proc or actor that was asked to end: not a failure
    EXITED = 2  # a proc, by itself or by a signal; its host agent knows the exit status
    NOT_STARTED = 3  # a proc that could not be started
    PRELOAD_FAILED = 4  # a proc that could not be started, because a module of its mesh's preload could not be loaded
    UNREACHABLE = 5  # a proc that may be alive, but there is no connection to it
    HOST_LOST = 6  # a proc whose host agent, or connection to its host, is gone
    AGENT_CLOSED = 7  # a host agent; only the end of its connection is known
    AGENT_EXITED = 8  # a host agent whose exit status is known
    AGENT_UNREACHABLE = 9  # a host agent (or another site's controller) that may be alive; the cause says what is wrong
    CONTROLLER_CLOSED = 10  # a controller; only the end of its connection is known
    ACTOR_FAILED = 11  # an actor, by an error that it raised
    NO_ACTOR = 12  # an actor that never existed, or could not be created
    HOST_ENDING = 13  # a proc whose host agent stops all procs, as its host is about to end
    LEFT = 14  # a proc that this process no longer controls, and that may continue: not a failure

    @classmethod
    def _missing_(cls, value: object) -> "DeathKind":
        return cls.UNKNOWN  # from a later version

    @property
    def what(self) -> str:
        """What has died, for ``Death.what``."""
        return _WHAT.get(self, "proc")

    @property
    def intended(self) -> bool:
        """Whether it is not a failure."""
        return self in (DeathKind.STOPPED, DeathKind.LEFT)


_WHAT = {
    DeathKind.STOPPED: "stopped",
    DeathKind.LEFT: "stopped",
    DeathKind.AGENT_CLOSED: "agent",
    DeathKind.AGENT_EXITED: "agent",
    DeathKind.AGENT_UNREACHABLE: "agent",
    DeathKind.CONTROLLER_CLOSED: "agent",
    DeathKind.ACTOR_FAILED: "actor",
    DeathKind.NO_ACTOR: "actor",
}
#: The kind assumed if only ``what`` is given.
_KINDS = {
    "stopped": DeathKind.STOPPED,
    "agent": DeathKind.AGENT_UNREACHABLE,
    "actor": DeathKind.ACTOR_FAILED,
}


class Death(msgspec.Struct, array_like=True, frozen=True):
    """Why a proc or an actor can no longer answer. Create one with ``Death.of``."""

    cause: str
    what: str = "proc"  # "proc", "actor", "agent" or "stopped": the kind, for peers of earlier versions
    proc: str = ""
    host: str = ""
    pid: int = 0
    detail: str = ""  # a traceback, the last lines of stderr
    kind: DeathKind = DeathKind.UNKNOWN
    signal: int = 0  # that ended the process, if one did and its host agent has seen it

    def __post_init__(self) -> None:
        if self.kind is DeathKind.UNKNOWN:
            msgspec.structs.force_setattr(self, "kind", _KINDS.get(self.what, DeathKind.EXITED))

    @property
    def of_actor(self) -> bool:
        """Whether only an actor has died, and its process is alive."""
        return self.kind in (DeathKind.ACTOR_FAILED, DeathKind.NO_ACTOR)

    @classmethod
    def of(
        cls,
        kind: DeathKind,
        cause: str,
        proc: str = "",
        host: str = "",
        pid: int = 0,
        detail: str = "",
        signal: int = 0,
    ) -> "Death":
        """Create a death of this kind."""
        return cls(cause, kind.what, proc, host, pid, detail, kind, signal)


def lost_with(gone: Death | None, proc: str, host: str, pid: int = 0) -> Death:
    """Return the death of a proc that was reached through a dead host agent (or another site's controller).

    Args:
        gone: the death of that agent, if known.
    """
    cause = "its host agent died" if gone is None or gone.kind is DeathKind.AGENT_CLOSED else gone.cause
    return Death.of(DeathKind.HOST_LOST, cause, proc, host, pid)


class SegmentRef(msgspec.Struct, array_like=True, frozen=True):
    """The location of a message's buffers, if they do not come with it: memory of the sender.

    On the sender's host that is a segment, which the receiver maps. Elsewhere it is memory that the receiver fetches
    through the data plane: ``handle`` is set. If the message has no out-of-band buffers, it is the whole pickle.
    """

    owner: str
    pid: int
    fd: int
    number: int
    size: int
    private: bool  # several receivers: each maps it copy-on-write
    handle: bytes = b""  # for the data plane
