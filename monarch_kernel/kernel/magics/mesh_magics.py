"""The magics `%mesh`, which dispatches to its subcommands, and `%%mesh`, which runs a cell on ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast
from uuid import uuid4

from IPython.core.error import UsageError
from IPython.core.magic import Magics, cell_magic, line_magic, magics_class
from IPython.core.magic_arguments import argument, magic_arguments

from monarch_kernel.debugger import get_debugger
from monarch_kernel.debugger.rank.common_point import OF_CELL
from monarch_kernel.engines import tool_runtime
from monarch_kernel.introspection import hosts_of
from monarch_kernel.kernel.cell import Cell, CellLocation
from monarch_kernel.kernel.cell_run import CellRun, run_here, run_in_background, wait_in_background
from monarch_kernel.kernel.debug.stop_notices import live
from monarch_kernel.kernel.magics.arguments import (
    Arguments,
    check_name,
    mesh_argument,
    mesh_option,
    parse,
    peek,
    ranks_option,
    select,
    summary,
)
from monarch_kernel.kernel.magics.dispatch import FUNCTIONS, TOPICS, MeshCommands
from monarch_kernel.kernel.managed_mesh import ManagedMesh
from monarch_kernel.kernel.notebook import Notebook
from monarch_kernel.kernel.output.publisher import Source
from monarch_kernel.kernel.usage_errors import usage_error
from monarch_kernel.launchers.host_request import nearest
from monarch_kernel.meshes import format_ranks


@magics_class
class MeshMagics(Magics):
    """The magics, bound to one shell."""

    def __init__(self, notebook: Notebook) -> None:
        super().__init__(shell=notebook.shell)
        self._notebook = notebook
        self._session = notebook.session
        self._commands = MeshCommands(notebook)

    # -- %mesh ---------------------------------------------------------------------------------

    @line_magic
    def mesh(self, line: str) -> Any:
        """Start, list and stop meshes of processes, and copy variables between them and the notebook.

        %mesh --help lists the subcommands by topic, %mesh SUB --help tells about one.
        """
        words = line.split()
        if not words or words[0] in ("-h", "--help", "help"):
            print(self._overview(words[1:]))
            return None
        return self._commands.run(line)

    def _overview(self, topics: Sequence[str]) -> str:
        """Return the subcommands of these topics; by default those of the first topic, and the other topics' names."""
        unknown = next((topic for topic in topics if topic not in TOPICS), None)
        if unknown is not None:
            near = nearest(unknown, TOPICS)
            raise UsageError(f"%mesh help: there is no topic {unknown!r}{near}; there are {', '.join(TOPICS)}")
        lines = ["usage: %mesh SUBCOMMAND ..., or %%mesh in the first line of a cell"]
        for topic in topics or list(TOPICS)[:1]:
            lines += ["", f"{topic}:", *(f"  {word:<10} {summary(FUNCTIONS[word])}" for word in TOPICS[topic])]
        if not topics:
            lines += [f"  {'%%mesh':<10} {summary(cast('Any', self).mesh_cell)}", "", "other topics:"]
            lines += [f"  {topic:<10} {', '.join(words)}" for topic, words in list(TOPICS.items())[1:]]
        return "\n".join([*lines, "", "%mesh help TOPIC lists a topic, %mesh SUBCOMMAND --help explains one."])

    # -- %%mesh --------------------------------------------------------------------------------

    @cell_magic("mesh")
    @magic_arguments("%mesh")
    @mesh_argument()
    @mesh_option()
    @ranks_option()
    @argument("--where", action="append", default=[], metavar="DIM=SLICE", help="as -r, a dimension at a time")
    @argument("-o", "--out", metavar="VAR", help="store the values of the last expression in this variable")
    @argument("-a", "--no-wait", action="store_true", help="do not wait; the output still appears here")
    @argument("--setup", action="store_true", help="%%mesh heal --replay runs such cells, and no others, on new ranks")
    @argument("--in", dest="module", default="", metavar="MODULE", help="run in the namespace of this module")
    @argument("--frame", type=int, metavar="N", help="in a joined job: in this frame of a stop, 0 being the innermost")
    @argument("--at-step", action="store_true", help="in a joined job: after the same optimizer step on all ranks")
    @argument("--at-collective", action="store_true", help="in a joined job: before the same collective on all ranks")
    @argument("--raw", action="store_true", help="print each line as it arrives, with its rank, without folding")
    def mesh_cell(self, line: str, cell: str) -> None:
        """Run the cell on the ranks of a mesh.

        Each rank has its own variables, which persist from cell to cell; rank, world_size and point are defined from
        the start. The value of the cell is a ValueMesh of the values of its last expression.
        """
        found = parse(MeshMagics.mesh_cell, line)
        if found is None:
            return
        if found.name and found.on:
            raise usage_error(found.magic, f"give the mesh once, not as {found.name!r} and as --on {found.on}")
        found.on = found.on or found.name
        if found.out is not None:
            check_name(found.magic, found.out, "variable")
        if not cell.strip():
            raise usage_error(found.magic, "the cell is empty; write the code for the ranks below the first line")
        managed = self._session.get(found.on, found.magic)
        made = replace(self._notebook.make_cell(cell), place=self._place(managed, found), setup=found.setup)
        ranks = select(found.magic, found.ranks, found.where, managed.extent, managed.name)
        if made.place is not None and made.place.step and not found.no_wait:
            self._check_runs(found, managed, ranks)
        audit = self._notebook.audit
        hosts = hosts_of(managed.procs) if audit.is_on else []
        named = sorted({hosts[rank] for rank in ranks}) if hosts else []
        with audit.during("mesh cell", cell.rstrip("\n"), mesh=managed.name, ranks=format_ranks(ranks), hosts=named):
            self._run(managed, ranks, made, found)

    def _place(self, managed: ManagedMesh, found: Arguments) -> CellLocation | None:
        """Return where the cell runs in a rank; None: in the usual namespace and thread."""
        together = found.at_step or found.at_collective
        if found.frame is None and not together:
            return CellLocation(found.module) if found.module else None
        options = {
            "--at-step": found.at_step,
            "--at-collective": found.at_collective,
            "--frame": found.frame is not None,
        }
        given = [option for option, is_given in options.items() if is_given]
        if not tool_runtime().is_joined(managed.procs):
            raise usage_error(
                found.magic,
                f"{given[0]} is for joined jobs; cells of mesh {managed.name} have the main thread of its ranks "
                "(%mesh debug looks into stops)",
            )
        if len(given) > 1:
            raise usage_error(found.magic, f"give {' or '.join(given)}, not both")
        if found.frame is not None and found.frame < 0:
            raise usage_error(
                found.magic, f"frames are counted from 0, the innermost one, so there is no {found.frame}"
            )
        point = f"{OF_CELL}{uuid4().hex}" if together else ""
        return CellLocation(found.module, -1 if found.frame is None else found.frame, point, found.at_collective)

    def _check_runs(self, found: Arguments, managed: ManagedMesh, ranks: Sequence[int]) -> None:
        """Check that no rank is stopped: a stopped rank reaches no step, and the notebook would wait for it."""
        stops = live(get_debugger().stops())
        stopped = sorted({at.rank for at in stops if at.mesh == managed.name and at.rank in ranks})
        if stopped:
            option = "--at-step" if found.at_step else "--at-collective"
            who = f"ranks {format_ranks(stopped, limit=6)} are" if len(stopped) > 1 else f"rank {stopped[0]} is"
            raise usage_error(
                found.magic,
                f"{option} waits for the program, and {who} stopped: %mesh debug continue lets it run, --no-wait "
                "has the cell wait for that, and %%mesh --frame 0 runs it where the program is stopped",
            )

    def addressed_by(self, line: str) -> tuple[ManagedMesh, tuple[int, ...]] | None:
        """Return the mesh and the ranks that the first line of a cell addresses, while the cell is being typed.

        Returns:
            None if no cell has run on that mesh yet, or the line is not valid so far.
        """
        found = peek(MeshMagics.mesh_cell, line)
        if found is None:
            return None
        managed = self._session.managed(found.on or found.name or self._session.current or "")
        if managed is None:
            return None
        try:
            return managed, select(found.magic, found.ranks, found.where, managed.extent, managed.name)
        except UsageError:
            return None

    def _run(self, managed: ManagedMesh, ranks: tuple[int, ...], cell: Cell, found: Arguments) -> None:
        notebook = self._notebook
        expected = [Source(managed.name, rank) for rank in ranks]
        output = notebook.router.open(cell.id, notebook.output(raw=found.raw, expected=expected))
        run = CellRun(managed, ranks, cell, output, notebook.router, notebook.file_label, notebook.watched.cell_ended)
        if found.no_wait:
            handle = run_in_background(run)
            if found.out:
                notebook.shell.user_ns[found.out] = handle
            return
        run_here(notebook, run)
        if run.detached:  # by the debugger's prompt, while ranks are stopped
            handle = wait_in_background(run)
            if found.out:
                notebook.shell.user_ns[found.out] = handle
            return
        error = run.error()
        if error is not None:
            error.colours = notebook.colours
            raise error
        value = run.value()
        if found.out:
            notebook.shell.user_ns[found.out] = value
            return
        notebook.keep(value)
