"""Subcommands of `%mesh` for the state, output, stacks and hangs of ranks, and for recorded metrics and traces."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

from IPython.core.magic_arguments import argument, magic_arguments

from monarch_kernel.actor import ProcMesh, SupervisionError
from monarch_kernel.debugger.controller.hang import hang
from monarch_kernel.display.quantities import memory, text_size
from monarch_kernel.display.tables import table_html
from monarch_kernel.engines import tool_runtime
from monarch_kernel.introspection import awaited_here
from monarch_kernel.kernel.magics.arguments import (
    Arguments,
    OptionsAt,
    Subcommands,
    mesh_argument,
    ranks_option,
    text_argument,
)
from monarch_kernel.kernel.mesh_lifecycle import kept_by_others
from monarch_kernel.kernel.notebook import Notebook
from monarch_kernel.kernel.output.formatters import (
    MeshList,
    MeshStatus,
    MeshSummary,
    RankSummary,
    kept_elsewhere,
    kept_here,
)
from monarch_kernel.kernel.output.publisher import publisher_for
from monarch_kernel.kernel.sync_run import host_trees, older_modules
from monarch_kernel.kernel.usage_errors import usage_error
from monarch_kernel.meshes import KeptError, held, kept_host_of, name_ranks
from monarch_kernel.watch import (
    HistoryQueryError,
    MetricsEndpoint,
    MetricsTable,
    QueryResult,
    current_trace,
    history,
    metrics,
    trace,
)
from monarch_kernel.watch.status_table import live_tables, show_live, tables_text
from monarch_kernel.widgets.connection import was_viewed

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from monarch_kernel.actor import Future
    from monarch_kernel.debugger.controller.hang.verdict import Verdict
    from monarch_kernel.debugger.controller.stacks import Stacks
    from monarch_kernel.debugger.controller.stragglers import StragglerReport
    from monarch_kernel.debugger.outside.outside_report import Look

T = TypeVar("T")

#: The time for ranks to answer before they are left out (seconds).
ASK_TIMEOUT = 2.0
#: How long `%mesh hang` waits for ranks that do not answer (seconds).
_HANG_TIMEOUT = 5.0
#: The default number of lines per rank of `%mesh logs`, and the limit on the output of all ranks together (characters):
#: notebook servers drop output that exceeds a megabyte per second.
LOG_LINES, LOG_SIZE = 200, 500_000


class StatusMagics(Subcommands):
    """The state of meshes, and what their ranks do."""

    @magic_arguments("mesh ls")
    def ls(self, _found: Arguments) -> MeshList | None:
        """List the meshes; * marks the one in use. Kept meshes that are not attached to this notebook follow."""
        meshes = self._session.proc_meshes()
        try:
            others = kept_by_others()
        except KeptError as error:
            others = []
            self.say(f"{error}\n")
        for name, place in self._session.provider_hosts.items():
            if place.waiting:
                self.say(f"mesh {name} waits for its hosts: {place.describe()}")
        if not meshes and not others:
            self.say("No mesh is up; %mesh up --procs 4 starts one.")
            return None
        current = self._session.current
        hosts = {mesh.name: host for host in held() for mesh in host.proc_meshes}
        listed: list[MeshSummary] = []
        for name, mesh in meshes.items():
            states = _ask(mesh.status())
            alive = None if states is None else sum(status.state == "alive" for status in states.values())
            kept = kept_here(hosts.get(name))
            listed.append(MeshSummary(name, dict(mesh.extent), len(mesh), alive, name == current, kept))
        now = time.time()
        for info in others:
            listed += kept_elsewhere(info, now)
        return MeshList(listed)

    @magic_arguments("mesh status")
    @mesh_argument()
    @ranks_option()
    @argument("-w", "--watch", action="store_true", help="show it live, the worst first, until you interrupt it")
    @argument("--for", dest="seconds", type=float, metavar="SECONDS", help="end --watch after that time")
    def status(self, found: Arguments) -> MeshStatus | None:
        """Show each rank of a mesh: its state, process and memory, and what it is doing; and what hosts have synced."""
        if found.seconds is not None and (not found.watch or found.seconds < 0):
            raise usage_error(found.magic, "--for takes a number of seconds, and goes with --watch")
        mesh, ranks = self.addressed(found)
        if found.watch:
            chosen = () if len(ranks) == len(mesh) else tuple(ranks)
            show_status(self._notebook.shell, mesh, chosen, found.seconds)
            return None
        states = mesh.status().get(ASK_TIMEOUT)
        places = rank_locations(self._notebook, mesh)
        trees = host_trees(self._notebook, mesh, ASK_TIMEOUT)
        older = older_modules(mesh, ASK_TIMEOUT) if trees else {}
        listed: list[RankSummary] = []
        for rank in ranks:
            status = states.get(rank)
            listed.append(
                RankSummary(
                    rank,
                    dict(mesh.extent.point(rank)),
                    status.state,
                    status.pid,
                    status.host,
                    status.cause or places.get(rank, "idle"),
                    status.rss_bytes,
                    status.cpu_percent,
                    status.uptime_s,
                    older.get(rank, ()),
                    status.devices,
                    status.gpus,
                )
            )
        warnings = self._notebook.walltimes.of_mesh(mesh)
        self._say_without_view()
        return MeshStatus(mesh.name, listed, kept_here(kept_host_of(mesh)), trees, warnings)

    def _say_without_view(self) -> None:
        """Print once where live views come from, if a kernel has never had one."""
        no_panel = self._notebook.has_no_panel or not publisher_for(self._notebook.shell).live
        if self._notebook.missed_view or was_viewed() or no_panel:
            return
        self._notebook.missed_view = True
        self.say(
            "No panel or live view has connected to this kernel so far. "
            "If you expect one, run where the Jupyter server runs: monarch-kernel doctor server"
        )

    @magic_arguments("mesh logs")
    @mesh_argument()
    @ranks_option()
    @argument("-n", "--lines", type=int, metavar="N", help=f"the last N lines of each rank (by default {LOG_LINES})")
    @argument("--all", action="store_true", help="everything that its host has kept, as far as a notebook can show it")
    @argument("--to", metavar="FILE", help="write it to this file; everything, unless -n says how much")
    def logs(self, found: Arguments) -> None:
        """Print the last output of ranks, from every cell, rank by rank."""
        if found.lines is not None and found.lines < 1:
            raise usage_error(found.magic, f"-n takes a number of lines of at least 1, not {found.lines}")
        if found.lines is not None and found.all:
            raise usage_error(found.magic, "give either -n or --all, not both")
        mesh, ranks = self.addressed(found)
        tail = None if found.all or (found.to and found.lines is None) else found.lines or LOG_LINES
        try:
            # One extra line shows whether there are more.
            texts = tool_runtime().logs(mesh, ranks=ranks, tail=None if tail is None else tail + 1)
        except SupervisionError as error:
            raise usage_error(
                found.magic, f"the logs of mesh {mesh.name} were lost with its host agent: {error.cause}"
            ) from None
        found_lines = {rank: texts.get(rank).rstrip("\n").split("\n") for rank in ranks}
        if found.to:
            self.say(_write_logs(found, mesh.name, {rank: each[-(tail or 0) :] for rank, each in found_lines.items()}))
            return
        for rank, lines in found_lines.items():
            shown = _that_fit(lines[-(tail or 0) :], LOG_SIZE // len(found_lines))
            if found.lines is None and (len(shown) < len(lines) or shown[0] != lines[-len(shown)]):
                more = "" if found.all else "--all shows more, "
                self.say(
                    f"[{rank}] … earlier output is not shown: {more}%mesh logs -r {rank} --to FILE writes all of it"
                )
            self.say("\n".join(f"[{rank}] {each}" for each in shown if each or len(shown) > 1))

    @magic_arguments("mesh hang")
    @mesh_argument()
    @ranks_option()
    @argument("--timeout", type=float, metavar="SECONDS", help="how long to wait for ranks that do not answer (5)")
    def hang(self, found: Arguments) -> Verdict:
        """Explain a hang: which ranks wait in which collective, which ranks are missing, and where those are."""
        timeout = _HANG_TIMEOUT if found.timeout is None else found.timeout
        if not timeout > 0:
            raise usage_error(found.magic, f"--timeout takes a number of seconds above 0, not {timeout:g}")
        mesh, ranks = self.addressed(found)
        return hang(mesh, ranks=None if found.ranks is None else ranks, timeout=timeout)

    @magic_arguments("mesh stacks")
    @mesh_argument()
    @ranks_option()
    @argument("--native", action="store_true", help="with the frames of native code (py-spy holds each rank for 0.1 s)")
    @argument("--all-threads", action="store_true", help="also threads without user code")
    @argument("--values", action="store_true", help="with the local variables of user code")
    @argument("--over", type=float, metavar="SECONDS", help="watch for so long, and show what moves and what does not")
    @argument("--timeout", type=float, metavar="SECONDS", help="read ranks from outside that take longer (1)")
    def stacks(self, found: Arguments) -> Stacks:
        """Show the stacks of all ranks as one tree, with equal ones merged."""
        timeout = 1.0 if found.timeout is None else found.timeout
        if not timeout > 0:
            raise usage_error(found.magic, f"--timeout takes a number of seconds above 0, not {timeout:g}")
        over = 0.0 if found.over is None else found.over
        if not over >= 0:
            raise usage_error(found.magic, f"--over takes a number of seconds of at least 0, not {over:g}")
        mesh, ranks = self.addressed(found)
        from monarch_kernel.debugger.controller.stacks import stacks

        return stacks(
            mesh,
            ranks=ranks,
            native=found.native,
            all_threads=found.all_threads,
            timeout=timeout,
            over=over,
            values=found.values,
            label=self._notebook.file_label,
        )

    @magic_arguments("mesh look")
    @argument("--pids", metavar="123,456", help="processes of this machine")
    @argument(
        "--torchrun", nargs="?", type=int, const=0, metavar="PID", help="the workers of torchrun (its only job here)"
    )
    @argument("--slurm", metavar="JOB", help="the ranks of a Slurm job, on all its nodes")
    @argument("--native", action="store_true", help="with the frames of native code (py-spy holds each rank for 0.1 s)")
    @argument("--all-threads", action="store_true", help="also threads without user code")
    @argument("--apart", type=float, default=1.0, metavar="SECONDS", help="the time between the two readings (1)")
    def look(self, found: Arguments) -> Look:
        """Read processes from outside that others have started: their stacks, and for whom they seem to wait."""
        from monarch_kernel.debugger.outside.outside_report import LookRequest, look
        from monarch_kernel.debugger.outside.processes import OutsideError

        request = LookRequest(
            found.pids, found.torchrun, found.slurm, found.native, found.all_threads, apart=found.apart
        )
        try:
            return look(request, self._notebook.file_label)
        except OutsideError as error:
            raise usage_error(found.magic, str(error.args[0])) from None

    @magic_arguments("mesh stragglers")
    @argument(
        "files", nargs="*", metavar="FILE", help="records in files (of --save, or of torch.profiler) and not of a mesh"
    )
    @argument("--of", metavar="NAME", help="the mesh (default: the one in use)")
    @argument("--last", type=int, default=100, metavar="N", help="the latest N collectives of each line (100)")
    @argument("--each", action="store_true", help="also list the arrivals at the latest collectives")
    @argument("--save", metavar="FILE", help="write the records to a file, for monarch-kernel stragglers")
    def stragglers(self, found: Arguments) -> StragglerReport:
        """Show which ranks come late to collectives, how long others wait for them, and at which lines."""
        from monarch_kernel.debugger.controller.stragglers import RecordsError, report_of, save, stragglers

        if found.last < 1:
            raise usage_error(found.magic, f"--last takes a number of at least 1, not {found.last}")
        if found.files and found.of:
            raise usage_error(found.magic, "give either files or --of, not both")
        label = self._notebook.file_label
        try:
            if found.files:
                report = report_of(found.files, found.last, label=label, each=found.each)
            else:
                mesh = self._session.find(found.of, found.magic)
                report = stragglers(mesh, last=found.last, label=label, each=found.each)
            if found.save:
                save(report, found.save)
        except (RecordsError, OSError) as error:
            raise usage_error(found.magic, str(error)) from None
        return report


def _that_fit(lines: Sequence[str], room: int) -> list[str]:
    """Return the last lines that fit into this many characters; for one line that is too long, its end."""
    fit: list[str] = []
    for line in reversed(lines):
        room -= len(line) + 1
        if room < 0:
            if not fit:
                fit.append(f"…{line[-(room + len(line) + 1) :]}")
            break
        fit.append(line)
    return fit[::-1]


def _write_logs(found: Arguments, mesh: str, lines: Mapping[int, Sequence[str]]) -> str:
    """Write the output of ranks to the requested file. Return a line for the user."""
    path = os.path.expanduser(found.to)
    label = len(lines) > 1
    size = 0
    try:
        with open(path, "w", encoding="utf-8", errors="backslashreplace") as file:
            for rank, each in lines.items():
                for line in each:
                    size += file.write(f"[{rank}] {line}\n" if label else f"{line}\n")
    except OSError as error:
        raise usage_error(found.magic, f"{path} cannot be written: {error.strerror or error}") from None
    return f"mesh {mesh}: the output of {name_ranks(list(lines), limit=6)} ({text_size(size)}) is in {path}"


def rank_locations(notebook: Notebook, mesh: ProcMesh, actors: bool = True) -> dict[int, str]:
    """Return the locations of the ranks of a mesh that run a cell or an endpoint."""
    joined = tool_runtime().is_joined(mesh)  # only its own program runs there; the tools report the location
    managed = notebook.session.get(mesh.name, "%mesh status") if joined else notebook.session.managed(mesh.name)
    if managed is None:
        return _called(mesh) if actors else {}
    told: dict[int, str] = {}
    for slot in managed.monitor.where.stream():
        try:
            place = slot.get(ASK_TIMEOUT / 2)
        except TimeoutError:
            break  # futures come in completion order, so no other rank has answered either
        except Exception:  # a dead rank
            continue
        if place is not None and (actors or not place.endpoint):
            what = f"{place.endpoint}, " if place.endpoint and not joined else ""
            told[place.rank] = what + notebook.place(place.file, place.line, place.function)
    return told


def _called(mesh: ProcMesh) -> dict[int, str]:
    """Return the ranks of a mesh that this process waits for, and the call of each."""
    waiting = {proc: f"called: {call.what}" for call in awaited_here() for proc in call.procs}
    procs = mesh._target().procs
    return {rank: waiting[ref.id] for rank, ref in enumerate(procs) if ref.id in waiting}


def _ask(future: Future[T]) -> T | None:
    try:
        return future.get(ASK_TIMEOUT)
    except (TimeoutError, SupervisionError):
        return None


def show_status(shell: InteractiveShell, mesh: ProcMesh, ranks: Collection[int], seconds: float | None) -> None:
    """Show the table of a mesh in the running cell until an interrupt, the end of the mesh, or a time limit.

    Args:
        ranks: ranks of the whole mesh; none: all ranks.
        seconds: the time limit; None: no limit.
    """
    publisher = publisher_for(shell)
    if not publisher.live:  # a terminal
        show_live(mesh, ranks=ranks, seconds=seconds)
        return
    shown: dict[str, str] | None = None
    try:
        for tables in live_tables(mesh, ranks=ranks, seconds=seconds):
            html = "".join(table_html(table.view) for table in tables) or "The mesh was stopped."
            data = {"text/plain": tables_text(tables), "text/html": html}
            if data != shown:
                publisher.show(0, data, {}, update=shown is not None)
                shown = data
    except KeyboardInterrupt:  # the last table stays
        return


# Subcommands of `%mesh` that record what meshes do: traces, metrics and history.


class TelemetryMagics(Subcommands):
    """Traces, metrics and history."""

    # -- metrics ---------------------------------------------------------------------------------

    @magic_arguments("mesh metrics")
    @argument("--on", action="store_true", help="count from now on, so that failures, heals and latencies are known")
    @argument("--off", action="store_true", help="count and serve no more")
    @argument(
        "--serve", nargs="?", type=int, const=0, metavar="PORT", help="... and serve them to Prometheus, on loopback"
    )
    def metrics(self, found: Arguments) -> MetricsTable | None:
        """Show metrics of all meshes: ranks by state, calls, latencies, bytes, mailboxes, failures, heals."""
        if found.off and (found.on or found.serve is not None):
            raise usage_error(found.magic, "give either --off, or --on and --serve")
        if found.off:
            metrics().stop()
            if TelemetryMagics._endpoint is not None:
                TelemetryMagics._endpoint.close()
                TelemetryMagics._endpoint = None
            return None
        if found.on or found.serve is not None:
            metrics().start()
        if found.serve is not None:
            self._serve(found)
            return None
        return metrics().once()

    _endpoint: MetricsEndpoint | None = None  # of this process

    def _serve(self, found: Arguments) -> None:
        if TelemetryMagics._endpoint is not None:
            TelemetryMagics._endpoint.close()
            TelemetryMagics._endpoint = None
        try:
            served = TelemetryMagics._endpoint = MetricsEndpoint(metrics().text, found.serve)
        except (OSError, OverflowError) as error:
            raise usage_error(found.magic, f"metrics cannot be served: {error}") from None
        self.say(f"Metrics are at {served.url}, for this user alone. Prometheus needs:\n\n{served.scrape_config}")

    # -- history ---------------------------------------------------------------------------------

    @magic_arguments("mesh history")
    @text_argument(
        "sql", OptionsAt.BEGINNING, nargs="*", metavar="SQL", help="on, off, clear, or a query, quoted or not"
    )
    def history(self, found: Arguments) -> QueryResult | None:
        """Record what happens to meshes (on, off, clear), and ask about it: %mesh history SELECT * FROM meshes."""
        kept = history()
        sql = found.sql.strip()
        if sql in ("on", "off", "clear"):
            {"on": kept.start, "off": kept.stop, "clear": kept.clear}[sql]()
            return None
        if not sql:
            state = "on" if kept.is_on else "off (%mesh history on begins it)"
            self.say(f"The history is {state}, and takes {memory(kept.nbytes)}.")
            return None
        if len(sql) > 1 and sql[0] == sql[-1] == '"':
            sql = sql[1:-1]
        try:
            return kept.query(sql)
        except HistoryQueryError as error:
            raise usage_error(found.magic, str(error)) from None

    # -- traces ----------------------------------------------------------------------------------

    @magic_arguments("mesh trace")
    @argument("what", nargs="?", choices=["on", "off", "flush"], help="on FILE, off, or flush: collect now")
    @argument("file", nargs="?", metavar="FILE", help="where the trace is written (of on); .gz compresses it")
    @argument("--records", type=int, metavar="N", help="how many records each process keeps between two collections")
    def trace(self, found: Arguments) -> None:
        """Record calls, cells, transfers and collectives of all ranks, for https://ui.perfetto.dev."""
        running = current_trace()
        if found.what != "on" and (found.file or found.records):
            raise usage_error(found.magic, "a file and --records belong to on: %mesh trace on run.json")
        if found.what == "on":
            self._begin(found)
            return
        if running is None:
            if found.what is None:
                self.say("No trace is on; %mesh trace on FILE begins one.")
                return
            raise usage_error(found.magic, "no trace is on; %mesh trace on FILE begins one")
        if found.what is None:
            self.say(f"A trace to {running.file} is on; %mesh trace off ends it.")
            return
        if found.what == "flush":
            running.flush()
            return
        try:
            self.say(str(running.stop()))
        except OSError as error:
            raise usage_error(found.magic, f"the trace could not be written to {running.file}: {error}") from None

    def _begin(self, found: Arguments) -> None:
        if not found.file:
            raise usage_error(found.magic, "name the file for the trace: %mesh trace on run.json")
        if found.records is not None and found.records < 1:
            raise usage_error(found.magic, f"--records takes a number of at least 1, not {found.records}")
        begun = trace(found.file) if found.records is None else trace(found.file, records=found.records)
        try:
            begun.start()
        except (RuntimeError, OSError) as error:
            raise usage_error(found.magic, str(error)) from None
        self.say(f"Recording; %mesh trace off writes {begun.file}.")
