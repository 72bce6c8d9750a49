"""The records in a rank's pipes: any cut, any garbage, any interleaving."""

from __future__ import annotations

import random

import pytest

from monarch_kernel.protocol import output_records
from monarch_kernel.protocol.output_records import MARKER, MAX_RECORD, OutputDecoder, OutputEvent


def decode(data: bytes, stream: output_records.Stream = "stdout") -> list[OutputEvent]:
    decoder = OutputDecoder(stream)
    return decoder.feed(data) + decoder.close()


def text_of(events: list[OutputEvent], cell: str | None = None) -> str:
    return "".join(e.data for e in events if e.kind == "text" and cell in (None, e.cell))


DISPLAY = {"data": {"text/html": "<b>ü</b>" * 3000}, "metadata": {}}


def sample() -> bytes:
    return b"".join(
        [
            b"before \xc3\xa9\n",
            output_records.encode_begin("c1", "stdout"),
            b"C says h\xc3\xa9\n",
            *output_records.encode_text("stdout", "c1", "Python sagt grüß\n".encode()),
            *output_records.encode_text("stderr", "c1", b"warning\n"),
            *output_records.encode_message("display", "c1", 7, DISPLAY),
            b"tail of C",
            output_records.encode_end("c1", "stdout"),
            *output_records.encode_text("stdout", "c1", b"late thread\n"),
            output_records.encode_flush("f1", "stdout"),
            b"after",
        ]
    )


EXPECTED = [
    ("", "text", "stdout", "before é\n"),
    ("c1", "begin", "stdout", None),
    ("c1", "text", "stdout", "C says hé\nPython sagt grüß\n"),
    ("c1", "text", "stderr", "warning\n"),
    ("c1", "display", "stdout", DISPLAY),
    ("c1", "text", "stdout", "tail of C"),
    ("c1", "end", "stdout", None),
    ("c1", "text", "stdout", "late thread\n"),
    ("", "flush", "stdout", "f1"),
    ("", "text", "stdout", "after"),
]


def joined(events: list[OutputEvent]) -> list[tuple[str, str, str, object]]:
    rows: list[tuple[str, str, str, object]] = []
    for e in events:
        if rows and e.kind == "text" and rows[-1][:3] == (e.cell, "text", e.stream):
            rows[-1] = (*rows[-1][:3], rows[-1][3] + e.data)  # type: ignore[operator]
        else:
            rows.append((e.cell, e.kind, e.stream, e.data))
    return rows


def test_everything_in_one_piece() -> None:
    assert joined(decode(sample())) == EXPECTED


@pytest.mark.parametrize("size", [1, 2, 3, 7, 11, 12, 100, 4095, 4096])
def test_cut_anywhere(size: int) -> None:
    decoder = OutputDecoder()
    data = sample()
    events = [e for i in range(0, len(data), size) for e in decoder.feed(data[i : i + size])]
    assert joined(events + decoder.close()) == EXPECTED


def test_every_record_is_one_atomic_write() -> None:
    cell = "x" * 255
    records = [
        *output_records.encode_text("stdout", cell, b"a" * 20_000),
        *output_records.encode_message("display", cell, 1, {"data": {"image/png": "A" * 50_000}}),
    ]
    assert all(len(r) <= MAX_RECORD for r in records)
    assert text_of(decode(b"".join(records))) == "a" * 20_000


def test_a_long_text_is_cut_between_characters() -> None:
    text = "aé€😀" * 3000
    records = output_records.encode_text("stdout", "c", text.encode())
    assert len(records) > 5
    pieces = [text_of(decode(r)) for r in records]
    assert "".join(pieces) == text


def test_two_messages_may_be_interleaved() -> None:
    a = output_records.encode_message("display", "c", 1, {"data": {"text/plain": "a" * 10_000}})
    b = output_records.encode_message("display", "c", 2, {"data": {"text/plain": "b" * 10_000}})
    mixed = [r for pair in zip(a, b) for r in pair]
    events = decode(b"".join(mixed))
    assert [e.data["data"]["text/plain"][0] for e in events] == ["a", "b"]


def test_a_character_of_c_code_may_be_cut_by_a_record() -> None:
    data = b"\xc3" + b"".join(output_records.encode_text("stdout", "", b"x")) + b"\xa9"
    assert text_of(decode(data)) == "xé"


def test_plain_bytes_belong_to_the_cell_begun_last_that_still_runs() -> None:
    data = b"".join(
        [
            output_records.encode_begin("a", "stdout"),
            output_records.encode_begin("b", "stdout"),
            b"1",
            output_records.encode_end("b", "stdout"),
            b"2",
            output_records.encode_end("a", "stdout"),
            b"3",
        ]
    )
    events = [e for e in decode(data) if e.kind == "text"]
    assert [(e.cell, e.data) for e in events] == [("b", "1"), ("a", "2"), ("", "3")]


def test_the_pipe_of_stderr_gives_stderr() -> None:
    assert decode(b"oops", "stderr") == [OutputEvent("", "text", "oops", "stderr")]


def test_text_that_quotes_a_marker_stays_text() -> None:
    inner = output_records.encode_begin("evil", "stdout")
    events = decode(b"".join(output_records.encode_text("stdout", "c", b"<" + inner + b">")))
    assert [e.kind for e in events] == ["text"]


def test_a_false_marker_is_text() -> None:
    events = decode(b"a" + MARKER + b"\x01\x01\x00\x05\x00\x00\x00hello")
    assert [e.kind for e in events] == ["text"]
    assert "hello" in text_of(events)


def test_the_end_of_a_message_without_its_beginning_is_dropped() -> None:
    records = output_records.encode_message("display", "c", 1, {"data": {"text/plain": "x" * 10_000}})
    assert decode(b"".join(records[1:])) == []


def test_random_garbage_never_raises_and_does_not_hide_what_follows() -> None:
    rng = random.Random(5)
    good = b"".join(output_records.encode_text("stdout", "c", b"good\n"))
    for _ in range(300):
        garbage = bytes(rng.choice((0, 0xC0, 77, 75, rng.randrange(256))) for _ in range(rng.randrange(60)))
        events = decode(garbage + good)
        assert text_of(events, "c") == "good\n"


def test_a_torn_record_does_not_swallow_the_rest_for_ever() -> None:
    torn = output_records.encode_text("stdout", "c", b"y" * 100)[0][:40]
    events = decode(torn + b"".join(output_records.encode_text("stdout", "c", b"z" * 5000)))
    assert "z" * 500 in text_of(events)


def test_display_id_update_and_clear() -> None:
    update = {"data": {}, "metadata": {}, "display_id": "d", "update": True}
    data = b"".join(
        [
            *output_records.encode_message("display", "c", 1, update),
            *output_records.encode_message("clear", "c", 2, {"wait": True}),
        ]
    )
    events = decode(data)
    assert [e.kind for e in events] == ["display", "clear"]
    assert events[0].data["display_id"] == "d"
    assert events[0].data["update"] is True
    assert events[1].data == {"wait": True}


def test_plain_text_is_what_a_person_would_have_seen() -> None:
    chunks = [
        (1, b"".join(output_records.encode_text("stdout", "c", b"one\n"))),
        (2, b"two\n"),
        (1, b"".join(output_records.encode_message("result", "c", 1, {"data": {"text/plain": "42"}}))),
    ]
    assert output_records.plain_text(chunks) == "one\ntwo\n42\n"


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="255 bytes"):
        output_records.encode_text("stdout", "x" * 256, b"t")
    with pytest.raises(ValueError, match="display"):
        output_records.encode_message("text", "c", 1, {})
