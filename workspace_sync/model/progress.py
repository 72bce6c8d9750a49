"""How far a sync is, for whoever shows it."""

from __future__ import annotations

import msgspec


class SyncProgress(msgspec.Struct, frozen=True):
    """A moment of a sync.

    Attributes:
        phase: "scan", "plan", "send", "stage" or "switch".
        done: bytes read, or received by all hosts together; 0 where bytes say nothing.
        total: all that will be; 0: not known.
        hosts_done: hosts that are through with this phase.
        hosts: all hosts.
        note: a sentence to be shown and kept, such as what a large first sync is about to send; mostly empty.
    """

    phase: str
    done: int = 0
    total: int = 0
    hosts_done: int = 0
    hosts: int = 0
    note: str = ""
