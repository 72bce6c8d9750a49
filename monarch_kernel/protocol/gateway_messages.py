"""Messages of a meeting point, which connects the machines of joinable jobs and their viewers (``engines.join``)."""

from monarch_kernel.protocol.refs import Message


class MeetAs(Message, tag=90):
    """The first message to a meeting point: the sender provides the ranks of a machine, or is a viewer."""

    version: str
    viewer: bool
    host: str  # the sender's


class MeetMachines(Message, tag=91):
    """To viewers, initially and after each change: the connected machines."""

    hosts: dict[int, str]  # by the machine's number, which is never reused


class MeetOpen(Message, tag=92):
    """A viewer starts a conversation with a machine under a number of its choice.

    The machine gets the meeting point's number.
    """

    stream: int
    machine: int


class MeetFrame(Message, tag=93):
    """Bytes of a conversation, for its other end. Body: TLS between both ends (``engines.join.gateway_seal``)."""

    stream: int


class MeetClosed(Message, tag=94):
    """A conversation is over: the sender, or its peer, has ended it, or is gone."""

    stream: int
