"""Writes the timeline of a simulation as a Chrome trace, which ui.perfetto.dev opens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from monarch_kernel.protocol.private_files import written_whole
from monarch_kernel.runtime.mesh.rankset import name_ranks
from monarch_kernel.runtime.tensor.simulation.ledger import Ledger, RankClass


def write_trace(path: str, ledger: Ledger, group_workers: bool) -> None:
    """Write the operations and the memory of each rank to a file.

    Args:
        group_workers: ranks that do the same are shown once, together.
    """
    with written_whole(path, None) as file:
        file.write(b'{"displayTimeUnit": "ns", "traceEvents": [')
        separator = "\n"
        for event in _events(ledger, group_workers):
            file.write(f"{separator}{json.dumps(event)}".encode())
            separator = ",\n"
        file.write(b"\n]}\n")


def _events(ledger: Ledger, group_workers: bool) -> Iterator[dict[str, Any]]:
    shown: list[tuple[int, str, RankClass]] = []
    for each in ledger.classes:
        if group_workers:
            shown.append((min(each.ranks), name_ranks(sorted(each.ranks)), each))
        else:
            shown += [(rank, f"rank {rank}", each) for rank in each.ranks]
    for rank, name, each in sorted(shown, key=lambda item: item[0]):
        pid = rank + 1
        yield {"ph": "M", "pid": pid, "tid": 0, "name": "process_name", "args": {"name": name}}
        yield {"ph": "M", "pid": pid, "tid": 0, "name": "process_sort_index", "args": {"sort_index": pid}}
        threads: dict[str, int] = {}
        for event in each.events:
            tid = threads.get(event.stream)
            if tid is None:
                tid = threads[event.stream] = len(threads) + 1
                name = f"stream {event.stream}"
                yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": name}}
            yield {
                "ph": "X",
                "pid": pid,
                "tid": tid,
                "name": event.name,
                "cat": "communication" if event.communicates else "compute",
                "ts": event.start * 1e6,
                "dur": event.duration * 1e6,
                "args": {"line": "{}:{} in {}".format(*event.line), "bytes": event.size},
            }
        for level in each.levels:
            yield {"ph": "C", "pid": pid, "name": "memory", "ts": level.time * 1e6, "args": {"bytes": level.size}}
