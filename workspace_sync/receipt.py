"""Render receipts and progress of syncs as tables and lines. Pure."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from monarch_kernel.display.quantities import duration, text_size
from monarch_kernel.display.tables import TableView

if TYPE_CHECKING:
    from workspace_sync.model.sync_report import Forgotten, HostReport, Phases, StaleModule, SyncProgress, SyncReport
    from workspace_sync.store.records import Generation
    from workspace_sync.transfer.messages import HostState

#: The number of digits of a digest that are shown.
DIGITS = 8
#: The number of names that are listed before the rest is counted.
MOST_NAMES = 8
#: The width of a progress bar.
_WIDTH = 24
#: Shorter phases are not shown (seconds).
_SHORT = 0.05


def receipt_table(report: SyncReport) -> TableView:
    """Render a receipt as a table, one row for each host."""
    rows = [
        [
            host.host,
            host.digest[:DIGITS],
            _state(host, report),
            f"{host.files:,}",
            text_size(host.received),
            text_size(host.reused),
            duration(host.seconds),
        ]
        for host in report.hosts
    ]
    headings = ["host", "tree", "", "files", "received", "reused", "time"]
    errors = [f"{host.host}: {host.error}" for host in report.failed]
    errors += [
        f"{module.name} has an error, and ranks {module.ranks} keep what they have: {module.state}"
        for module in report.stale
        if module.failed
    ]
    notes = [f"{what}: {names(paths)}" for what, paths in _paths(report).items() if paths]
    notes += [f"{host.host}: {note}" for host in report.hosts for note in host.notes]
    notes += report.notes
    notes += filter(None, [stale_line(report.stale, report)])
    return TableView(
        headings, rows, receipt_line(report), right=(3, 4, 5, 6), note="\n".join(notes), error="\n".join(errors)
    )


def _paths(report: SyncReport) -> dict[str, list[str]]:
    """Collect the paths to report, each once, although several hosts may name it."""
    deleted = "would delete" if report.dry_run else "deleted"
    told = {
        "damaged": "problems",
        deleted: "deleted",
        "made by ranks, moved along": "moved",
        "made by ranks, kept": "kept",
    }
    return {
        what: list(dict.fromkeys(path for host in report.hosts for path in getattr(host, name)))
        for what, name in told.items()
    }


def _state(host: HostReport, report: SyncReport) -> str:
    if host.error:
        return "failed"  # the note has the reason, in a separate line
    if report.dry_run:
        return "would change" if host.files or host.received else "up to date"
    if not host.digest and not host.environment:
        return "no tree"
    verified = not report.digest and not report.back
    state = (
        "new"
        if host.switched
        else "damaged"
        if verified and host.problems
        else "in order"
        if verified
        else "up to date"
    )
    return f"{state}, in the store of {host.shares}" if host.shares else state


def receipt_line(report: SyncReport) -> str:
    """Render the receipt in one line."""
    failed = len(report.failed)
    of = f"{len(report.hosts) - failed} of {len(report.hosts)}" if failed else f"{len(report.hosts)}"
    hosts = f"{of} host{'s' * (len(report.hosts) != 1)}"
    took = f"in {duration(report.seconds)}{_phases(report.phases)}"
    if report.back:
        switched = any(host.switched for host in report.hosts)
        went = "went back to" if switched else "has" if len(report.hosts) == 1 else "have"
        return f"{hosts} {went} tree {report.back[:DIGITS]} {took}"
    if not report.digest:  # the hosts verified their own trees
        return f"{hosts} looked at {took}"
    with_env = f" with environment {report.environment[:DIGITS]}" if report.environment else ""
    files = f"{report.files:,} file{'s' * (report.files != 1)}"
    tree = f"tree {report.digest[:DIGITS]}{with_env}: {files}, {text_size(report.bytes)}"
    read = f", {text_size(report.hashed)} read" if report.hashed else ""
    if report.dry_run:
        lacks = sum(host.lacks for host in report.hosts)
        return f"{tree}{read}; {hosts} would get {text_size(lacks)}; nothing was changed {took}"
    return f"{tree}{read}; {text_size(report.sent)} sent to {hosts} {took}"


def _phases(phases: Phases) -> str:
    seconds = {name: getattr(phases, name) for name in phases.__struct_fields__}
    long = [f"{name} {duration(value)}" for name, value in seconds.items() if value >= _SHORT]
    return f" ({', '.join(long)})" if long else ""


def forgotten_table(found: Sequence[Forgotten], command: str) -> TableView:
    """Render the content of a workspace on hosts, one row for each; the note lists remaining files.

    Args:
        command: the command that also removes the files of ranks, for the note.
    """
    rows = [
        [
            host.host,
            _fate(host),
            f"{host.files:,}",
            text_size(host.bytes),
            str(host.generations),
            kept_text(host.kept_files, host.kept_bytes) if not host.shares else "",
        ]
        for host in found
    ]
    places = dict.fromkeys(f"{host.path}/kept" for host in found if host.kept_files)
    notes = [
        f"files that ranks have made stay in {', '.join(places)} of these hosts, and are nowhere else: {command} "
        "removes them for good"
    ] * bool(places)
    if any(host.removed and host.bytes for host in found):
        notes.append("the content of the trees stays with the store's old content, for a sync that comes soon")
    headings = ["host", "", "files", "size", "trees", "kept"]
    return TableView(headings, rows, right=(2, 3, 4), note="\n".join(notes)).without_empty_columns()


def _fate(host: Forgotten) -> str:
    if not host.removed and not host.files and not host.generations and not host.kept_files:
        return "nothing is there"
    fate = "removed" if host.removed else "would be removed"
    return f"{fate}, in the store of {host.shares}" if host.shares else fate


def kept_text(files: int, size: int) -> str:
    """Render the number and size of kept files of ranks; empty if there are none."""
    return f"{files:,} file{'s' * (files != 1)} of ranks, {text_size(size)}" if files else ""


def sync_line(report: SyncReport) -> str:
    """Render the command that makes ranks follow these trees; after a rollback, a plain sync would undo it."""
    return f"%mesh sync --rollback --to {report.back[:DIGITS]}" if report.back else "%mesh sync"


def stale_line(stale: Sequence[StaleModule], report: SyncReport) -> str:
    """Render which modules ranks have in an older version, and the remedies."""
    old = [module for module in stale if module.state == "stale"]
    parts: list[str] = []
    if old:
        ranks = ", ".join(dict.fromkeys(module.ranks for module in old if module.ranks))
        have = f"ranks {ranks} have" if ranks else "ranks have"
        modules = names([module.name for module in old])
        parts.append(
            f"{have} imported another version of {modules}: {sync_line(report)} --reload changes them in place, "
            "--respawn creates the actors again, --restart restarts the ranks"
        )
    done = [module.name for module in stale if module.state == "reloaded"]
    if done:
        parts.append(f"reloaded: {names(done)}")
    silent = ("stale", "reloaded", "current")
    left = [module for module in stale if module.state not in silent]
    parts += [f"{module.name} was not reloaded: {module.state}" for module in left if not module.failed]
    if left and report.back:
        ranks = ", ".join(dict.fromkeys(module.ranks for module in left if module.ranks))
        parts.append(f"ranks {ranks} still run the later tree: {sync_line(report)} --restart restarts them in this one")
    return "\n".join(parts)


def trees_table(states: Sequence[HostState], now: float) -> TableView:
    """Render the trees that hosts have and can go back to, newest first; equal trees share a row.

    Trees that ranks could not import are only counted, except the current one.

    Args:
        states: the content of the workspace on each host.
        now: seconds since 1970.
    """
    found: dict[str, list[tuple[HostState, Generation]]] = {}
    for state in states:
        for generation in state.generations:
            if digest := generation.digests.get("tree", b"").hex():
                found.setdefault(digest, []).append((state, generation))
    rows: list[list[str]] = []
    left_out = 0
    for digest, those in sorted(found.items(), key=lambda each: -max(generation.time for _, generation in each[1])):
        newest = max((generation for _, generation in those), key=lambda generation: generation.time)
        has_it = {state.host for state, _ in those}
        current = {state.host for state, generation in those if generation.number == state.generation}
        lack = [state.host for state in states if state.host not in has_it]
        fate = f"not on {names(lack)}" if lack else ""
        if current:
            fate = "current" if len(current) == len(states) else f"current on {names(sorted(current))}"
        broken = next((generation.broken for _, generation in those if generation.broken), "")
        if broken and not current:
            left_out += 1
            continue
        more = f" and {newest.changes - 1:,} more" if newest.changes > 1 else ""
        rows.append(
            [
                digest[:DIGITS],
                time.strftime("%X", time.localtime(newest.time)),
                f"{duration(max(0.0, now - newest.time))} ago",
                f"{newest.changed}{more}" if newest.changed else "",
                fate,
                f"cannot be imported: {broken}" if broken else "",
            ]
        )
    headings = ["tree", "from", "", "changed", "", ""]
    notes = ["%mesh sync --rollback --to TREE goes back to one"] if len(rows) > 1 else []
    if left_out:
        notes.append(f"left out: {left_out} tree{'s' * (left_out != 1)} that ranks could not import")
    return TableView(headings, rows, note="\n".join(notes)).without_empty_columns()


def names(found: Sequence[str]) -> str:
    """List some names, and the number of the rest."""
    more = len(found) - MOST_NAMES
    return ", ".join(found[:MOST_NAMES]) + (f" and {more:,} more" if more > 0 else "")


def bar(share: float) -> str:
    """Render a progress bar as text, in half steps."""
    halves = round(max(0.0, min(1.0, share)) * 2 * _WIDTH)
    full, half = divmod(halves, 2)
    return "━" * full + "╸" * half + "─" * (_WIDTH - full - half)


_DOING = {
    "scan": "reading",
    "plan": "asking the hosts what they lack",
    "send": "sending",
    "stage": "making the trees",
    "switch": "switching",
}


def progress_line(progress: SyncProgress) -> str:
    """Render progress in one line, with a bar if the total is known."""
    parts = [_DOING.get(progress.phase, progress.phase)]
    if progress.total:
        done = min(progress.done, progress.total)
        parts[0] += f" {bar(done / progress.total)} {text_size(done)} of {text_size(progress.total)}"
    if progress.hosts > 1:
        parts.append(f"{progress.hosts_done} of {progress.hosts} hosts done")
    return f"sync: {' · '.join(parts)}"
