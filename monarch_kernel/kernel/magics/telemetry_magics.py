"""Subcommands of `%mesh` that record what meshes do: traces, metrics and history."""

from __future__ import annotations

from IPython.core.magic_arguments import argument, magic_arguments

from monarch_kernel.display.quantities import memory
from monarch_kernel.kernel.magics.arguments import Arguments, OptionsAt, text_argument
from monarch_kernel.kernel.magics.subcommands import Subcommands
from monarch_kernel.kernel.usage_errors import usage_error
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
