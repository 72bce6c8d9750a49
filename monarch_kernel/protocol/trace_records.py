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
        thread: the thread that performed it, or began it.
        group: the group of records on one thread that belong together, such as those of one coroutine; 0: the thread's
            own records.
        start: the start time.
        id: the id of the call, which is the same in the records of the caller and of the called ranks.
        size: the bytes of a transfer, a collective or a message; for a call, the number of called ranks.
        end: the end time; 0: it has not ended yet.
        mark: for a call, 1 if no answers were requested and it ended when it was sent; for others, 1 if they raised.
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
    """All records of a process since the last query.

    Attributes:
        pid: the process id.
        dropped: the number of older records that were overwritten.
        threads: the names of its threads, by their identifiers.
        records: the finished records, in the order of their ends.
        running: the unfinished records.
    """

    pid: int
    dropped: int
    threads: dict[int, str]
    records: list[TraceRecord]
    running: list[TraceRecord]


encode_recorded = msgspec.msgpack.Encoder().encode
decode_recorded = msgspec.msgpack.Decoder(RecordedTrace).decode
