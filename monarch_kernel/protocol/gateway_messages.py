"""Messages of a meeting point, where the machines of joinable jobs and their viewers meet (``engines.join``)."""

import msgspec


class MeetAs(msgspec.Struct, array_like=True, tag=90):
    """The first message to a meeting point: the sender brings the ranks of a machine, or views those of all."""

    version: str
    viewer: bool
    host: str  # the sender's


class MeetMachines(msgspec.Struct, array_like=True, tag=91):
    """To viewers, at first and at each change: the machines that are there now."""

    hosts: dict[int, str]  # by the machine's number, which no later one gets


class MeetOpen(msgspec.Struct, array_like=True, tag=92):
    """A viewer wants to talk to a machine, and chooses a number for that; the machine gets one of the meeting point."""

    stream: int
    machine: int


class MeetFrame(msgspec.Struct, array_like=True, tag=93):
    """Bytes of such a conversation, for its other end. Body: TLS of both ends (``engines.join.gateway_seal``)."""

    stream: int


class MeetClosed(msgspec.Struct, array_like=True, tag=94):
    """A conversation is over: the sender, or who is behind it, has ended it, or is gone."""

    stream: int
