"""A report on the activity of all ranks of a job at one moment, with the same views as live ones."""

from __future__ import annotations

import time
from collections.abc import Sequence
from html import escape
from typing import Any

import msgspec

from monarch_kernel._version import __version__
from monarch_kernel.debugger.controller.hang.verdict import Verdict
from monarch_kernel.debugger.controller.stacks.stacks_report import Stacks
from monarch_kernel.debugger.controller.stragglers.stragglers_report import StragglerReport
from monarch_kernel.debugger.outside.outside_report import MOST, STATES
from monarch_kernel.debugger.reports.plain import (
    JobFacts,
    PlainReport,
    plain_stacks,
    plain_stragglers,
    stacks_of,
    stragglers_of,
)
from monarch_kernel.display import styles
from monarch_kernel.display.quantities import few, memory
from monarch_kernel.display.reports import AsReport
from monarch_kernel.display.tables import TableView, table_html, table_text
from monarch_kernel.meshes import format_ranks

#: The format name and version in a file. The version increases when older versions can no longer read the file.
FORM_NAME, FORM = "monarch-report", 1
#: A time (seconds since 1970) in the year 10000.
_NO_CALENDAR = 253402300800


class JobReport(AsReport):
    """The activity of all ranks of a job at one moment, and why it made no progress.

    Displays itself as text and as HTML.

    Attributes:
        job: facts about the job and the report.
        verdict: why its ranks waited at that moment.
        stacks: the user code that they ran, merged.
        threads: the same for all their threads.
        stragglers: the ranks that arrived late at collectives; None without records.
        notes: further information, each a sentence.
    """

    def __init__(
        self,
        job: JobFacts,
        verdict: Verdict,
        stacks: Stacks,
        threads: Stacks,
        stragglers: StragglerReport | None,
        notes: Sequence[str] = (),
    ) -> None:
        self.job = job
        self.verdict = verdict
        self.stacks = stacks
        self.threads = threads
        self.stragglers = stragglers
        self.notes = tuple(notes)

    @property
    def headline(self) -> str:
        """The job, the reason and the time, in a sentence."""
        return f"Job {self.job.name}, {_utc(self.job.made)}: {self.job.reason}"

    @property
    def facts(self) -> tuple[str, ...]:
        """Facts about the job, one per line."""
        job = self.job
        known = len(job.ranks)
        count = f"{known} of {job.world}" if known != job.world else str(known)
        hosts = few(list(dict.fromkeys(each.host for each in job.ranks))) or "no known machine"
        versions = ", ".join(
            f"{name} {version}" + (f" (ranks {format_ranks(ranks, limit=4)})" if len(found) > 1 else "")
            for name, found in job.versions.items()
            for version, ranks in found.items()
        )
        lines = (
            f"{count} rank{'s' * (count != '1')} on {hosts}, since {_utc(job.since)}"
            + (f", {job.launch}" if job.launch else ""),
            job.program,
            versions,
        )
        return tuple(line for line in lines if line)

    def table(self) -> TableView:
        """Tabulate the processes, one per row."""
        hosts = {each.host for each in self.job.ranks}
        restarted = any(each.restarts for each in self.job.ranks)
        rows = [
            (
                str(each.rank),
                each.host if len(hosts) > 1 else "",
                str(each.pid),
                "" if each.answers else "no",
                STATES.get(each.state, each.state),
                each.wchan,
                str(each.threads or ""),
                memory(each.rss) if each.rss else "",
                str(each.restarts) if restarted else "",
            )
            for each in self.job.ranks[:MOST]
        ]
        left = len(self.job.ranks) - len(rows)
        headings = ("rank", "host", "pid", "answers", "state", "sleeps in", "threads", "memory", "restarts")
        note = f"and {left} more; the JSON has them all" if left > 0 else ""
        return TableView(headings, rows, right=(0, 2, 6, 7, 8), note=note).without_empty_columns()

    def text(self, *, colours: bool = False) -> str:
        """Render the whole report as text."""
        parts = [self.headline, *self.facts, *self.notes, "", str(self.verdict), "", table_text(self.table())]
        parts += ["", self.stacks.text(colours=colours)]
        if self.stragglers is not None:
            parts += ["", "Collectives over time:", self.stragglers.text()]
        return "\n".join([*parts, "", "All threads:", self.threads.text(colours=colours)])

    def html(self) -> str:
        """Render the whole report as HTML, without scripts or style sheets."""
        facts = "".join(f'<div style="{styles.DIM}">{escape(line)}</div>' for line in (*self.facts, *self.notes))
        head = f'<div style="{styles.VIEW}"><div style="{styles.VIEW_TITLE}">{escape(self.headline)}</div>{facts}</div>'
        late = self.stragglers
        parts = [
            head,
            self.verdict._repr_html_(),
            table_html(self.table()),
            self.stacks.html(),
            "" if late is None else _folded("Collectives over time", late.html()),
            _folded("All threads", self.threads.html()),
        ]
        return "".join(parts)

    def page(self) -> str:
        """Render the same as a complete HTML document."""
        title = escape(self.headline)
        return (
            f'<!doctype html><html><head><meta charset="utf-8"><title>{title}</title>'
            f"<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
            f"</head><body>{self.html()}</body></html>\n"
        )

    # -- as plain data -------------------------------------------------------------------------------

    def plain(self) -> PlainReport:
        """Convert the report to its file format."""
        return PlainReport(
            form=f"{FORM_NAME}-{FORM}",
            version=__version__,
            job=self.job,
            verdict=self.verdict,
            stacks=plain_stacks(self.stacks),
            threads=plain_stacks(self.threads),
            stragglers=None if self.stragglers is None else plain_stragglers(self.stragglers),
            notes=self.notes,
        )

    @classmethod
    def of_plain(cls, plain: PlainReport) -> JobReport:
        """Convert a report from its file format.

        Raises:
            ValueError, LookupError: the data is damaged.
        """
        late = plain.stragglers
        for moment in (plain.job.since, plain.job.made):
            if not 0 <= moment < _NO_CALENDAR:
                raise ValueError(f"the time {moment:g}")
        return cls(
            plain.job,
            plain.verdict,
            stacks_of(plain.stacks),
            stacks_of(plain.threads),
            None if late is None else stragglers_of(late),
            plain.notes,
        )

    def asdict(self) -> dict[str, Any]:
        """Return the whole report as JSON-compatible dictionaries, lists, strings and numbers."""
        found: dict[str, Any] = msgspec.to_builtins(self.plain(), str_keys=True)
        return found


def _utc(moment: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(moment))


def _folded(title: str, inside: str) -> str:
    return f'<details><summary style="{styles.OPENS}">{title}</summary>{inside}</details>'
