"""The measured metrics, and their bars."""

from __future__ import annotations

from dataclasses import dataclass

from bench.metrics import mark

OURS, LIMIT, DASK, RAY = "ours", "limit", "dask-jobqueue", "ray"


@dataclass(frozen=True)
class LaunchRow:
    """One line of the table.

    Attributes:
        metric: its key in the results.
        label: as shown.
        most: ours must be at most this.
        least: ours must be at least this.
        beyond: ours may be this much more than the limit.
        as_limit: whether ours must be no less than the limit.
    """

    metric: str
    label: str
    most: float | None = None
    least: float | None = None
    beyond: float | None = None
    as_limit: bool = False

    def verdict(self, ours: float | None, limit: float | None) -> str:
        """Render the bars, and whether they are met: "<= 5 ok", "<= limit + 1.5 MISS"; "?": not measured."""
        said: list[str] = []
        if self.most is not None:
            said.append(f"<= {self.most:g} {mark(ours, self.most)}")
        if self.least is not None:
            said.append(f">= {self.least:g} {mark(self.least, ours)}")
        if self.beyond is not None:
            said.append(f"<= limit + {self.beyond:g} {mark(ours, None if limit is None else limit + self.beyond)}")
        if self.as_limit:
            said.append(f">= limit {mark(limit, ours)}")
        return ", ".join(said)


ROWS = [
    LaunchRow("slurm_s", "2 nodes of Slurm, until a rank on each has answered (s)", beyond=1.5),
    LaunchRow("slurm_attached_s", "  until workers are attached (s)"),
    LaunchRow("sbatch_s", "  a batch script that writes the time on each (s)"),
    LaunchRow("replace_s", "a lost node of Slurm, until its replacement has answered (s)", most=5),
    LaunchRow("replace_told_s", "  until a call has failed (s)"),
    LaunchRow("ssh8_s", "8 hosts by ssh, until all are attached (s)", most=2),
    LaunchRow("ssh8_answer_s", "  until a rank on each has answered (s)"),
    LaunchRow("ssh8_classical_s", "  attached, with the key exchange curve25519-sha256 (s)", most=2),
    LaunchRow("ssh64_s", "64 hosts by ssh, until all are attached (s)", most=6),
    LaunchRow("ssh64_answer_s", "  until a rank on each has answered (s)"),
    LaunchRow("ssh64_classical_s", "  attached, with the key exchange curve25519-sha256 (s)", most=6),
    LaunchRow("ssh64_classical_answer_s", "  until a rank on each has answered (s)"),
    LaunchRow("message_GBps", "a message of 64 MB between two hosts (GB/s)", least=1, as_limit=True),
    LaunchRow("import_ms", "import monarch_kernel.actor, with byte code (ms)", most=50),
    LaunchRow("answer_ms", "  from there until 8 ranks of this host have answered (ms)", most=80),
]
