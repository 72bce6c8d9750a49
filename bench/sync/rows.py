"""The measured metrics, and their bars."""

from __future__ import annotations

from dataclasses import dataclass

from bench.metrics import mark

OURS, RSYNC, MONARCH = "ours", "rsync", "torchmonarch"


@dataclass(frozen=True)
class SyncRow:
    """One line of the table.

    Attributes:
        metric: its key in the results.
        label: as shown.
        most: ours must be at most this.
        of_rsync: ours must be at most this fraction of rsync's.
    """

    metric: str
    label: str
    most: float | None = None
    of_rsync: float | None = None

    def verdict(self, ours: float | None, rsync: float | None) -> str:
        """Render the bars, and whether they are met: "<= 0.5 ok", "<= 0.5 x rsync MISS"; "?": not measured."""
        said: list[str] = []
        if self.most is not None:
            said.append(f"<= {self.most:g} {mark(ours, self.most)}")
        if self.of_rsync is not None:
            limit = None if rsync is None else self.of_rsync * rsync
            said.append(f"<= {self.of_rsync:g} x rsync {mark(ours, limit)}")
        return ", ".join(said)


ROWS = [
    SyncRow("none_s", "{files:,} files, {gb:.1f} GB on 2 hosts, nothing changed (s)", most=0.5, of_rsync=0.5),
    SyncRow("edit2_s", "  one file edited, until ranks on 2 hosts import it (s)", most=1.0),
    SyncRow("small2_s", "  1,000 small files changed (s)", most=3.0),
    SyncRow("whole2_s", "  first sync of it (s)"),
    SyncRow("client_mb", "  peak memory of the client (MB)", most=300),
    SyncRow("host_mb", "  peak memory of a host's largest process (MB)", most=300),
    SyncRow("some_none_s", "{some:,} files, {some_gb:.2f} GB on 2 hosts, nothing changed (s)"),
    SyncRow("some_edit2_s", "  one file edited, until ranks on 2 hosts import it (s)"),
    SyncRow("some_small2_s", "  1,000 small files changed (s)"),
    SyncRow("some_whole2_s", "  first sync of it (s)"),
    SyncRow("some_client_mb", "  peak memory of the client (MB)"),
    SyncRow("some_host_mb", "  peak memory of a host's largest process (MB)"),
    SyncRow("edit8_s", "{some:,} files, one edited, until ranks on {several} hosts import it (s)"),
    SyncRow("edit64_s", "{few:,} files, the same on {many} hosts, workers of this machine (s)", most=2),
    SyncRow("inside_s", "4 KB changed in a file of {big:,.0f} MB (s)"),
    SyncRow("inside_bytes", "  bytes sent"),
    SyncRow("inside_chunks", "  that is, whole chunks", most=2),
    SyncRow("first1_s", "first sync of {some:,} files, 1 host, cables as fast as this machine (s)", of_rsync=1.0),
    SyncRow("first4_s", "  4 hosts (s)", of_rsync=0.5),
    SyncRow("first4_egress", "  bytes that the client sends / bytes of the tree", most=1.2),
    SyncRow("cable1_s", "  1 host, each cable 1 Gbit/s (s)", of_rsync=1.0),
    SyncRow("cable4_s", "  4 hosts, each cable 1 Gbit/s (s)", of_rsync=0.5),
    SyncRow("env_s", "environment, second host after the first (s)"),
    SyncRow("env_of_copy", "  of the speed of `cp -a` on its disk"),
    SyncRow("env_of_disk", "  of the disk's speed in a row"),
    SyncRow("kills_mixed", "{kills} random kill -9: neither old nor new tree", most=0),
    SyncRow("kills_other", "  syncs afterwards that failed, or left something", most=0),
]
