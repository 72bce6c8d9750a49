"""The receipt of a sync and its progress, as tables and lines. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from monarch_kernel.display.quantities import duration, text_size
from monarch_kernel.display.tables import TableView

if TYPE_CHECKING:
    from workspace_sync.model.report import HostReport, Phases, StaleModule, SyncReport

#: How many digits of a digest are shown.
DIGITS = 8
#: How many names are listed before the rest is counted.
MOST_NAMES = 8
#: Phases shorter than this are not worth a word (seconds).
_SHORT = 0.05


def receipt_table(report: SyncReport) -> TableView:
    """One row for each host."""
    rows = [
        [
            host.host,
            host.digest[:DIGITS],
            _state(host, report.dry_run),
            f"{host.files:,}",
            text_size(host.received),
            text_size(host.reused),
            duration(host.seconds),
        ]
        for host in report.hosts
    ]
    headings = ["host", "tree", "", "files", "received", "reused", "time"]
    moved = list(dict.fromkeys(path for host in report.hosts for path in host.moved))
    notes = [f"moved along, as ranks had made them: {names(moved)}"] if moved else []
    notes += [stale_line(report.stale)] if report.stale else []
    return TableView(headings, rows, receipt_line(report), right=(3, 4, 5, 6), note="\n".join(notes))


def _state(host: HostReport, dry_run: bool) -> str:
    if host.error:
        return f"failed: {host.error}"
    if dry_run:
        return "would change" if host.files or host.received else "up to date"
    return "new" if host.switched else "up to date"


def receipt_line(report: SyncReport) -> str:
    """The receipt in one line."""
    failed = len(report.failed)
    of = f"{len(report.hosts) - failed} of {len(report.hosts)}" if failed else f"{len(report.hosts)}"
    hosts = f"{of} host{'s' * (len(report.hosts) != 1)}"
    read = f", {text_size(report.hashed)} read" if report.hashed else ""
    did = "nothing was changed" if report.dry_run else f"{text_size(report.sent)} sent to {hosts}"
    return (
        f"tree {report.digest[:DIGITS]}: {report.files:,} files, {text_size(report.bytes)}{read}; {did} in "
        f"{duration(report.seconds)}{_phases(report.phases)}"
    )


def _phases(phases: Phases) -> str:
    seconds = {name: getattr(phases, name) for name in phases.__struct_fields__}
    long = [f"{name} {duration(value)}" for name, value in seconds.items() if value >= _SHORT]
    return f" ({', '.join(long)})" if long else ""


def stale_line(stale: Sequence[StaleModule]) -> str:
    """Which modules ranks have in an older version, and the ways out."""
    old = [module for module in stale if module.state == "stale"]
    parts: list[str] = []
    if old:
        ranks = ", ".join(dict.fromkeys(module.ranks for module in old if module.ranks))
        have = f"ranks {ranks} have" if ranks else "ranks have"
        parts.append(
            f"{have} imported an older {names([module.name for module in old])}: %mesh sync --reload changes them in "
            "place, --respawn creates the actors again, --restart restarts the ranks"
        )
    done = [module.name for module in stale if module.state == "reloaded"]
    if done:
        parts.append(f"reloaded: {names(done)}")
    parts += [f"{m.name} was left alone: {m.state}" for m in stale if m.state not in ("stale", "reloaded")]
    return "\n".join(parts)


def names(found: Sequence[str]) -> str:
    """Some names, and how many more there are."""
    more = len(found) - MOST_NAMES
    return ", ".join(found[:MOST_NAMES]) + (f" and {more:,} more" if more > 0 else "")


def bar(share: float, width: int = 24) -> str:
    """A progress bar as text, in half steps."""
    halves = round(max(0.0, min(1.0, share)) * 2 * width)
    full, half = divmod(halves, 2)
    return "━" * full + "╸" * half + "─" * (width - full - half)
