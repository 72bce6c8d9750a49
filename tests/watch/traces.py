"""What a Chrome trace must be, by its format, for tests of traces."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

#: The fields that an event of a phase has, and may have.
FIELDS = {
    "M": ({"name", "args"}, set[str]()),
    "X": ({"name", "cat", "ts", "dur"}, {"args"}),
    "s": ({"name", "cat", "ts", "id"}, set[str]()),
    "f": ({"name", "cat", "ts", "id", "bp"}, set[str]()),
}
METADATA = {
    "process_name": "name",
    "process_sort_index": "sort_index",
    "thread_name": "name",
    "thread_sort_index": "sort_index",
}
#: Times are decimal fractions of microseconds; they differ from nanoseconds by rounding.
ROUNDING = 1e-3


class ReadTrace:
    """A trace file, checked against the format.

    Attributes:
        events: all of them.
        slices: the complete events.
        about: its ``otherData``.
    """

    def __init__(self, text: str) -> None:
        read = json.loads(text)
        assert set(read) == {"traceEvents", "displayTimeUnit", "otherData"} and read["displayTimeUnit"] in ("ms", "ns")
        self.events: list[dict[str, Any]] = read["traceEvents"]
        self.about: dict[str, Any] = read["otherData"]
        for event in self.events:
            self._check(event)
        self.slices = [event for event in self.events if event["ph"] == "X"]
        self._check_nesting()
        self._check_arrows()
        self.processes = {each["pid"]: each["args"]["name"] for each in self._metadata("process_name")}
        self.threads = {(each["pid"], each["tid"]): each["args"]["name"] for each in self._metadata("thread_name")}
        assert {(each["pid"], each["tid"]) for each in self.slices} <= self.threads.keys()

    def named(self, name: str, category: str = "") -> list[dict[str, Any]]:
        """The slices of this name."""
        return [each for each in self.slices if each["name"] == name and category in ("", each["cat"])]

    def process_of(self, event: dict[str, Any]) -> str:
        """The name of the process of an event."""
        return self.processes[event["pid"]]

    def around(self, event: dict[str, Any]) -> list[dict[str, Any]]:
        """The slices around an event, the outermost first."""
        return sorted(
            (each for each in self._on(event) if each is not event and _contains(each, event)),
            key=lambda each: -each["dur"],
        )

    def arrows(self) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """The innermost slices at the two ends of each arrow."""
        ends = {event["id"]: event for event in self.events if event["ph"] == "f"}
        return [
            (self.around(event)[-1], self.around(ends[event["id"]])[-1]) for event in self.events if event["ph"] == "s"
        ]

    def _on(self, event: dict[str, Any]) -> list[dict[str, Any]]:
        return [each for each in self.slices if (each["pid"], each["tid"]) == (event["pid"], event["tid"])]

    def _metadata(self, name: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["ph"] == "M" and event["name"] == name]

    @staticmethod
    def _check(event: dict[str, Any]) -> None:
        needed, allowed = FIELDS[event["ph"]]
        assert needed <= event.keys() <= needed | allowed | {"ph", "pid", "tid"}, event
        assert type(event["pid"]) is int and type(event["tid"]) is int and type(event["name"]) is str, event
        if event["ph"] == "M":
            assert list(event["args"]) == [METADATA[event["name"]]], event
            return
        assert type(event["ts"]) is float and event["ts"] >= 0 and event["cat"], event
        if event["ph"] == "X":
            assert type(event["dur"]) is float and event["dur"] >= 0, event
        else:
            assert type(event["id"]) is int, event

    def _check_nesting(self) -> None:
        """Slices of a thread are nested or apart, and what is around others comes before them."""
        threads: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
        for each in self.slices:
            threads[each["pid"], each["tid"]].append(each)
        for slices in threads.values():
            around: list[float] = []
            for each in sorted(slices, key=lambda each: (each["ts"], -each["dur"])):
                end = each["ts"] + each["dur"]
                while around and around[-1] <= each["ts"] + ROUNDING:
                    around.pop()
                assert not around or end <= around[-1] + ROUNDING, each
                around.append(end)

    def _check_arrows(self) -> None:
        begun = {event["id"]: event for event in self.events if event["ph"] == "s"}
        ended = {event["id"]: event for event in self.events if event["ph"] == "f"}
        assert begun.keys() == ended.keys() and len(begun) + len(ended) == sum(e["ph"] in "sf" for e in self.events)
        for number, begin in begun.items():
            end = ended[number]
            assert (begin["name"], begin["cat"], end["bp"]) == (end["name"], end["cat"], "e")
            assert begin["ts"] <= end["ts"] + ROUNDING and self.around(begin) and self.around(end), (begin, end)


def _contains(outer: dict[str, Any], inner: dict[str, Any]) -> bool:
    end = outer["ts"] + outer["dur"] + ROUNDING
    return outer["ts"] - ROUNDING <= inner["ts"] and inner["ts"] + inner.get("dur", 0) <= end


def read_trace(path: Path) -> ReadTrace:
    """A trace file, checked."""
    data = path.read_bytes()
    return ReadTrace((gzip.decompress(data) if path.suffix == ".gz" else data).decode())
