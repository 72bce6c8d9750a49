"""Subcommands of `%mesh` that record what meshes do: traces, metrics and history."""

from __future__ import annotations

from IPython.core.magic_arguments import argument, magic_arguments

from monarch_kernel.kernel.magics.arguments import Arguments
from monarch_kernel.kernel.magics.subcommands import Subcommands
from monarch_kernel.kernel.usage_errors import usage_error
from monarch_kernel.watch import current_trace, trace


class TelemetryMagics(Subcommands):
    """Traces, metrics and history."""

    @magic_arguments("mesh trace")
    @argument("what", nargs="?", choices=["on", "off", "flush"], help="on FILE, off, or flush: collect what there is")
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
