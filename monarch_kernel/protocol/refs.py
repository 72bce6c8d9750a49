"""What messages say of processes and of memory."""

from __future__ import annotations

from typing import Annotated

import msgspec

#: A time that one process tells another. One that is negative, infinite or no number at all is refused where it is
#: decoded, as a timer that was set by it would end the process that runs it, or never run.
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e10)]


class ProcRef(msgspec.Struct, array_like=True, frozen=True):
    """Where a proc is: enough for any process to reach it, or to ask its agent why it cannot.

    Processes of one *site* connect to each other's Unix sockets and share memory. Others reach them through the
    site's *gateway*: the host agent of a worker, or the controller for its own host.
    """

    id: str
    address: str  # its Unix socket
    host: str
    agent: str
    agent_address: str
    site: str = ""
    gateway: str = ""
    gateway_address: str = ""  # a URL where others may connect; "" for a gateway that only connects to others

    def agent_ref(self) -> ProcRef:
        """Where its host agent is."""
        return ProcRef(
            self.agent,
            self.agent_address,
            self.host,
            self.agent,
            self.agent_address,
            self.site,
            self.gateway,
            self.gateway_address,
        )

    def beside(self, proc: str, address: str) -> ProcRef:
        """A reference to another proc of the same agent."""
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


class Death(msgspec.Struct, array_like=True, frozen=True):
    """Why a proc or an actor cannot answer any more."""

    cause: str
    what: str = "proc"  # "proc", "actor", "agent" or "stopped"
    proc: str = ""
    host: str = ""
    pid: int = 0
    detail: str = ""  # a traceback, the last lines of stderr


class SegmentRef(msgspec.Struct, array_like=True, frozen=True):
    """Where the out-of-band buffers of a message lie: shared memory of a process of this host."""

    owner: str
    pid: int
    fd: int
    number: int
    size: int
    private: bool  # several receivers: each maps it copy-on-write
