"""The records of a process for a trace, as sent to the process that collects them."""

import msgspec

#: Kinds of records.
CALL, ENDPOINT, CELL, TRANSFER, COLLECTIVE, SPAN = "call", "endpoint", "cell", "transfer", "collective", "span"


class TraceRecord(msgspec.Struct, array_like=True, frozen=True):
    """An activity of a process. Times are nanoseconds on the clock of that process.

    Attributes:
        number: unique in the process.
        kind: one of the kinds above.
        name: the display name.
        thread: the thread that did it, or began it.
        group: of records on one thread that belong together, as those of one coroutine; 0: those of the thread itself.
        start: when it began.
        id: of the call; the record of the caller and those of the called have the same one.
        size: bytes of a transfer, a collective or a message; of a call, how many ranks it called.
        end: when it ended; 0: it had not ended yet.
        mark: of a call, 1 if no answers were wanted, so that it ended when it was sent; of others, 1 if they raised.
    """

    number: int
    kind: str
    name: str
    thread: int
    group: int
    start: int
    id: str
    size: int
    end: int = 0
    mark: int = 0


class RecordedTrace(msgspec.Struct, array_like=True, frozen=True):
    """All that a process has recorded since it was last asked.

    Attributes:
        pid: of the process.
        dropped: how many older records were overwritten.
        threads: the names of its threads, by their identifiers.
        records: those that have ended, in the order of their ends.
        running: those that have not ended.
    """

    pid: int
    dropped: int
    threads: dict[int, str]
    records: list[TraceRecord]
    running: list[TraceRecord]


encode_recorded = msgspec.msgpack.Encoder().encode
decode_recorded = msgspec.msgpack.Decoder(RecordedTrace).decode
