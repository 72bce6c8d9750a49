"""A report on the activity of all ranks of a job at one moment, with the same views as live ones."""

from __future__ import annotations

import http.client
import os
import re
import stat
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from html import escape
from typing import IO, Any, NamedTuple

import msgspec

from monarch_kernel import environment
from monarch_kernel._version import __version__
from monarch_kernel.actor import Extent
from monarch_kernel.debugger.controller.hang.verdict import Verdict
from monarch_kernel.debugger.controller.stacks.stacks_report import Stacks
from monarch_kernel.debugger.controller.stragglers import StragglerReport
from monarch_kernel.debugger.model.evidence import CollectiveTimes
from monarch_kernel.debugger.model.stops import Stack, StackSnapshot
from monarch_kernel.debugger.outside.outside_report import MOST, STATES
from monarch_kernel.display import tables
from monarch_kernel.display.quantities import few, memory
from monarch_kernel.display.tables import AsReport, TableView, table_html, table_text
from monarch_kernel.meshes import format_ranks
from monarch_kernel.private_files import read_own_file, write_own_file

# The file format of reports, as plain data. Nothing in it is executed or unpickled when it is read.
#
# Verdicts, locations, stacks and records of collectives already are plain values. Each distinct stack is stored once,
# since most ranks of a large job have the same stacks.

#: The maximum number of frames in a report: 10,000 ranks with 40 threads of 75 frames each.
_FRAMES = 30_000_000


class RankFacts(msgspec.Struct, frozen=True):
    """A process of a job, as its machine reports it.

    Attributes:
        rank: its rank in the job.
        host: its machine.
        pid: its pid there.
        answers: whether it has answered.
        since: when it was prepared (seconds since 1970); 0 if unknown.
        restarts: how often its launcher has restarted the ranks.
        state: the state letter of the operating system: R, S, D, T, t or Z; "" if not visible from the reporting
            machine.
        wchan: the kernel function in which its main thread sleeps.
        threads: the number of its threads.
        rss: memory (bytes).
    """

    rank: int
    host: str
    pid: int
    answers: bool
    since: float = 0.0
    restarts: int = 0
    state: str = ""
    wchan: str = ""
    threads: int = 0
    rss: int = 0


class JobFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about a job and about a report on it.

    Attributes:
        name: the name under which its ranks were prepared.
        launch: the id of the launch; see `engines.join.identity.RankIdentity`.
        program: the command line of its first rank, shortened.
        world: the number of its ranks.
        since: when the first of its known ranks was prepared (seconds since 1970).
        made: when the report was made (seconds since 1970).
        host: the machine on which it was made.
        reason: the reason for it, as a sentence.
        ranks: its known processes, by rank.
        versions: by name and version of a program, the ranks that have reported it.
    """

    name: str
    launch: str
    program: str
    world: int
    since: float
    made: float
    host: str
    reason: str
    ranks: tuple[RankFacts, ...]
    versions: dict[str, dict[str, tuple[int, ...]]] = {}


class PlainSnapshot(NamedTuple):
    """The activity of one rank, with its stacks by their number."""

    pid: int
    stacks: tuple[int, ...]
    hidden: int = 0
    outside: bool = False
    note: str = ""


class PlainStacks(msgspec.Struct, frozen=True):
    """A `Stacks`; the attributes are its arguments, and `distinct` has each stack once."""

    mesh: str
    dimensions: dict[str, int]
    ranks: tuple[int, ...]
    distinct: tuple[Stack, ...]
    snapshots: dict[int, PlainSnapshot]
    late: dict[int, str]
    dead: dict[int, str]
    unread: dict[int, str]
    hosts: dict[int, str]
    seconds: float
    noun: str
    idle_note: str


class PlainStragglers(msgspec.Struct, frozen=True):
    """A `StragglerReport`; the attributes are its arguments."""

    name: str
    records: tuple[CollectiveTimes, ...]
    last: int
    notes: tuple[str, ...]


def plain_stacks(stacks: Stacks) -> PlainStacks:
    """Convert stacks to their file format, without values of variables and without process-local data."""
    numbers: dict[Stack, int] = {}
    snapshots = {
        rank: PlainSnapshot(
            each.pid,
            tuple(
                numbers.setdefault(stack._replace(thread=0, values=(), issued=None), len(numbers))
                for stack in each.stacks
            ),
            each.hidden,
            each.outside,
            each.note,
        )
        for rank, each in stacks.snapshots.items()
    }
    return PlainStacks(
        stacks.mesh,
        dict(stacks.extent),
        stacks.ranks,
        tuple(numbers),
        snapshots,
        stacks.late,
        stacks.dead,
        stacks.unread,
        stacks.hosts,
        stacks.seconds,
        stacks.noun,
        stacks.idle_note,
    )


def stacks_of(plain: PlainStacks) -> Stacks:
    """Convert stacks from their file format.

    Raises:
        ValueError, LookupError: the data is damaged.
    """
    extent = Extent(tuple(plain.dimensions), tuple(plain.dimensions.values()))
    mentioned = (*plain.ranks, *plain.snapshots, *plain.late, *plain.dead, *plain.unread)
    if mentioned and not 0 <= min(mentioned) <= max(mentioned) < extent.nelements:
        raise ValueError(f"ranks {min(mentioned)} to {max(mentioned)} of {extent.nelements}")
    # Each stack is stored once, and may be referenced often.
    frames = sum(len(plain.distinct[at].frames) for each in plain.snapshots.values() for at in each.stacks)
    if frames > _FRAMES:
        raise ValueError(f"{frames} frames, more than {_FRAMES}")
    snapshots = {
        rank: StackSnapshot(
            each.pid, tuple(plain.distinct[at] for at in each.stacks), each.hidden, each.outside, each.note
        )
        for rank, each in plain.snapshots.items()
    }
    return Stacks(
        plain.mesh,
        extent,
        plain.ranks,
        snapshots,
        late=plain.late,
        dead=plain.dead,
        unread=plain.unread,
        hosts=plain.hosts,
        seconds=plain.seconds,
        noun=plain.noun,
        idle_note=plain.idle_note,
    )


def plain_stragglers(report: StragglerReport) -> PlainStragglers:
    """Convert a report on collectives to its file format."""
    return PlainStragglers(report.name, report.records, report.last, report.notes)


def stragglers_of(plain: PlainStragglers) -> StragglerReport:
    """Convert a report on collectives from its file format.

    Raises:
        ValueError, LookupError: the data is damaged.
    """
    report = StragglerReport(plain.name, plain.records, plain.last)
    report.notes = plain.notes  # the report has already found some of them again
    return report


class PlainReport(msgspec.Struct, frozen=True, kw_only=True):
    """A `JobReport` in its file format; `form` and `version` identify the format for other versions."""

    form: str
    version: str
    job: JobFacts
    verdict: Verdict
    stacks: PlainStacks
    threads: PlainStacks
    stragglers: PlainStragglers | None = None
    notes: tuple[str, ...] = ()


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
        facts = "".join(f'<div style="{tables.DIM}">{escape(line)}</div>' for line in (*self.facts, *self.notes))
        head = f'<div style="{tables.VIEW}"><div style="{tables.VIEW_TITLE}">{escape(self.headline)}</div>{facts}</div>'
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
        found: dict[str, object] = msgspec.to_builtins(self.plain(), str_keys=True)
        return found


def _utc(moment: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(moment))


def _folded(title: str, inside: str) -> str:
    return f'<details><summary style="{tables.OPENS}">{title}</summary>{inside}</details>'


# Write and read the files of a report: text, HTML and JSON, which only this user can read.

_FORM = re.compile(rf"{FORM_NAME}-(\d{{1,6}})")


class ReportError(ValueError):
    """A report cannot be written or read. The message contains its name and the reason."""


class _Head(msgspec.Struct):
    """The fields that identify a report of any version."""

    form: str
    version: str = ""


def default_folder(job: str) -> str:
    """Return the default folder of reports on a job: beside the output of the job."""
    return f"{job}-reports"


def save(report: JobReport, folder: str) -> list[str]:
    """Write a report. The folder is created if it is missing.

    Returns:
        The paths of the text, the HTML and the JSON.

    Raises:
        ReportError: other users could write to the folder.
        OSError: the files cannot be written.
    """
    os.makedirs(folder, 0o700, exist_ok=True)
    about = os.stat(folder)
    if about.st_uid != os.geteuid() or stat.S_IMODE(about.st_mode) & 0o022:
        raise ReportError(
            f"other users may write to {folder}, so no report is written there: name a folder of your own"
        )
    made = time.strftime("%Y%m%d-%H%M%S", time.gmtime(report.job.made))
    stem = first = os.path.join(os.path.abspath(folder), f"{report.job.name}-{made}")
    again = 1
    while os.path.lexists(f"{stem}.json"):
        again += 1
        stem = f"{first}-{again}"
    paths = [f"{stem}.{kind}" for kind in ("txt", "html", "json")]
    write(report, paths)
    return paths


def write(report: JobReport, paths: Sequence[str]) -> None:
    """Write the text, the HTML and the JSON. Existing files are replaced.

    Raises:
        OSError: the files cannot be written.
    """
    contents = (f"{report.text()}\n".encode(), report.page().encode(), encoded(report))
    for path, data in zip(paths, contents, strict=True):
        write_own_file(path, data)


def encoded(report: JobReport) -> bytes:
    """Encode a report as JSON."""
    return msgspec.json.encode(report.plain())


def load(report: str | os.PathLike[str]) -> JobReport:
    """Open a report that was written by `monarch-kernel report`, or by a job that hung. The job is not needed.

    The file is read as plain data, so it may come from an untrusted source.

    Args:
        report: the path of its JSON.

    Raises:
        ReportError: the file is not a report, is damaged, or was written by a later version.
        OSError: it cannot be read.
    """
    path = os.fspath(report)
    with open(path, "rb") as file:
        data = file.read()
    try:
        head = msgspec.json.decode(data, type=_Head)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ReportError(f"{path} is no report, or is damaged: {error}") from None
    form = _FORM.fullmatch(head.form)
    if form is None:
        raise ReportError(f"{path} is no report: it says that it is {head.form[:80]!r}")
    if int(form[1]) > FORM:
        raise ReportError(
            f"{path} was written by a later version, monarch_kernel {head.version[:40]}, which can open it; "
            f"this one reads reports up to form {FORM}"
        )
    try:
        return JobReport.of_plain(msgspec.json.decode(data, type=PlainReport))
    except (msgspec.DecodeError, ValueError, LookupError, RecursionError) as error:
        raise ReportError(f"{path} is damaged: {error}") from None


# Post reports to the webhook that a user has configured. Its URL is like a password: it is never displayed.

#: The time limit for the receiver (seconds), and the largest report that is posted completely (bytes).
TIMEOUT, LARGEST = 10.0, 1 << 20
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_NAME = environment.JOIN_WEBHOOK.name


class WebhookError(RuntimeError):
    """A report cannot be posted; the message gives the reason, without the URL."""


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Prevents redirects: a report is sent only to the configured URL."""

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: http.client.HTTPMessage,
        newurl: str,
    ) -> None:
        """See ``HTTPRedirectHandler``."""


def webhook() -> str:
    """Return the URL that the user has configured; "" if none.

    Raises:
        WebhookError: the URL is invalid, or its file cannot be read.
    """
    named = environment.JOIN_WEBHOOK.get()
    if named and "://" not in named:
        try:
            named = read_own_file(named).decode().strip()
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise WebhookError(f"the file that {_NAME} names cannot be read: {why}") from None
    if not named:
        return ""
    try:
        parts = urllib.parse.urlsplit(named)
        host = parts.hostname
    except ValueError:
        host, parts = None, urllib.parse.urlsplit("")
    if not host or not (parts.scheme == "https" or (parts.scheme == "http" and host in _LOOPBACK)):
        raise WebhookError(f"{_NAME} must name an https URL, or an http one of this machine")
    return named


def post(url: str, report: JobReport, paths: Sequence[str]) -> None:
    """Post a report as JSON: ``text`` in words, for chat programs, and ``report`` as in the file.

    Args:
        url: the URL of the receiver, as `webhook` has checked it.
        report: the report to post.
        paths: the paths of its files.

    Raises:
        WebhookError: the receiver has not accepted it.
    """
    said = [report.headline, report.verdict.sentence, f"on {report.job.host}: {paths[0]}" if paths else ""]
    whole = encoded(report)
    if len(whole) > LARGEST:
        said.append(f"The report itself ({len(whole)} bytes) is too large to be posted.")
        whole = b"null"
    body = msgspec.json.encode({"text": "\n".join(filter(None, said)), "report": msgspec.Raw(whole)})
    near = urllib.parse.urlsplit(url).scheme == "http"  # no proxy is used to reach this machine
    opener = urllib.request.build_opener(_NoRedirects, *([urllib.request.ProxyHandler({})] if near else []))
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"}, method="POST")
    try:
        with opener.open(request, timeout=TIMEOUT) as answer:
            answer.read(1)
    except urllib.error.HTTPError as error:
        error.close()
        raise WebhookError(f"the webhook has answered with status {error.code}") from None
    except (OSError, http.client.HTTPException, ValueError) as error:  # URLError is an OSError
        reason = getattr(error, "reason", None)
        raise WebhookError(
            f"the webhook cannot be reached: {getattr(reason, 'strerror', None) or type(error).__name__}"
        ) from None


def posted(report: JobReport, paths: Sequence[str]) -> str:
    """Post a report to the webhook that the user has configured, if any.

    Returns:
        A sentence about the error; "" if there was none.
    """
    try:
        url = webhook()
        if url:
            post(url, report, paths)
    except WebhookError as error:
        return f"It was not posted: {error}."
    return ""
