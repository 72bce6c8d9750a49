"""`%mesh` and `%%mesh`: what users type."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, cast

import cloudpickle
from IPython.core.error import UsageError
from IPython.core.magic import Magics, cell_magic, line_magic, magics_class
from IPython.core.magic_arguments import argument, magic_arguments

from monarch_kernel.actor import ProcMesh, SupervisionError, ValueMesh
from monarch_kernel.errors import ActorError
from monarch_kernel.kernel.cell_run import CellRun, MeshCell
from monarch_kernel.kernel.interrupts import get_relay
from monarch_kernel.kernel.magics import arguments as args_of
from monarch_kernel.kernel.magics import dap_magics, hang_magics, stack_magics, stop_magics, value_magics
from monarch_kernel.kernel.magics.arguments import parse, usage_error
from monarch_kernel.kernel.notebook import Notebook
from monarch_kernel.kernel.output.render import Table, kept_rows, kept_state, megabytes, seconds
from monarch_kernel.kernel.output.transcript import Source
from monarch_kernel.kernel.session import ManagedMesh, UpOptions, deaths_of, parts_of
from monarch_kernel.meshes import KeptError, format_ranks, held, kept_host_of
from monarch_kernel.tools import awaited_here

#: How long a question to all ranks may take before those that did not answer are left out (seconds).
ASK_TIMEOUT = 2.0

SUBCOMMANDS = (
    *("up", "ls", "status", "use", "down", "interrupt", "heal", "restart", "attach", "detach"),
    *("push", "pull", "logs"),
    *stack_magics.SUBCOMMANDS,
    *value_magics.SUBCOMMANDS,
    *hang_magics.SUBCOMMANDS,
    *stop_magics.SUBCOMMANDS,
    *dap_magics.SUBCOMMANDS,
)


def _cannot_answer(
    command: str, mesh: str, ranks: Sequence[int], error: SupervisionError, more: str = ""
) -> UsageError:
    """What to say when some of the ranks addressed are dead."""
    dead = [ranks[rank] for rank in error.ranks]
    who = f"rank {_listed(dead)} of mesh {mesh}"
    return usage_error(
        command, f"{who} cannot answer: {error.cause}{more}; choose others with -r, or use %mesh heal {mesh}"
    )


def _ranks_option(function: Any) -> Any:
    text = "ranks, such as 0-3,7 or 0:8:2, or dimensions, such as hosts=1,gpus=0-3 (default: all)"
    return argument("-r", "--ranks", metavar="RANKS", help=text)(function)


def _mesh_option(function: Any) -> Any:
    return argument("--on", metavar="NAME", help="the mesh (default: the one in use)")(function)


@magics_class
class MeshMagics(
    stack_magics.StackMagics,
    value_magics.ValueMagics,
    hang_magics.HangMagics,
    stop_magics.StopMagics,
    dap_magics.DapMagics,
    Magics,
):
    """The magics, bound to one shell."""

    def __init__(self, notebook: Notebook) -> None:
        super().__init__(shell=notebook.shell)
        self._notebook = notebook
        self._session = notebook.session

    # -- %mesh ---------------------------------------------------------------------------------

    @line_magic
    def mesh(self, line: str) -> Any:
        """Start, list and stop meshes of processes, and move variables between them and the notebook.

        %mesh --help lists the subcommands, %mesh SUB --help tells about one.
        """
        word, _, rest = line.strip().partition(" ")
        if word in ("", "-h", "--help", "help"):
            print(self._overview())
            return None
        if word not in SUBCOMMANDS:
            near = args_of.nearest(word, SUBCOMMANDS)
            known = ", ".join(SUBCOMMANDS)
            raise UsageError(f"%mesh: there is no subcommand {word!r}{near}; there are {known}")
        function: Callable[[str], Any] = getattr(self, word)
        return function(rest)

    def _overview(self) -> str:
        lines = ["usage: %mesh SUBCOMMAND ..., or %%mesh in the first line of a cell", ""]
        for word in SUBCOMMANDS:
            lines.append(f"  {word:<8} {args_of.summary(getattr(self, word))}")
        cell = args_of.summary(cast("Any", self).mesh_cell)
        return "\n".join([*lines, "", f"  %%mesh   {cell}", "", "%mesh SUBCOMMAND --help tells more."])

    @magic_arguments("mesh up")
    @argument("words", nargs="*", metavar="NAME | DIM=SIZE", help="a name (default: m), and dimensions: gpus=4")
    @argument("--procs", type=int, metavar="N", help="that many processes in one dimension, gpus")
    @argument("--env", action="append", default=[], metavar="K=V", help="an environment variable; repeatable")
    @argument("--dist", choices=["gloo", "nccl"], help="join all ranks in a torch.distributed process group")
    @argument("--preload", action="append", default=[], metavar="MODULE", help="import it once, for all ranks")
    @argument("--reuse", action="store_true", help="use the mesh of that name if there is one like this")
    @argument("--replace", action="store_true", help="end the mesh of that name first, if there is one")
    @argument("--keep", action="store_true", help="it stays when this kernel ends; %%mesh attach finds it again")
    @argument("--idle", type=float, metavar="HOURS", help="with --keep: it ends after so long without a kernel (12)")
    def up(self, line: str) -> None:
        """Start a mesh of processes on this host, and use it for the cells that follow."""
        found = parse(MeshMagics.up, line)
        if found is None:
            return
        name, dims = args_of.up_arguments("%mesh up", found.words, found.procs)
        env = args_of.env_arguments("%mesh up", found.env)
        preload = tuple(word for item in found.preload for word in item.split(",") if word)
        idle = args_of.idle_argument("%mesh up", found.idle, found.keep)
        if found.reuse and found.replace:
            raise usage_error("%mesh up", "give either --reuse or --replace, not both")
        options = UpOptions(name, dims, env, found.dist or "", preload, found.keep, idle)
        if found.replace and (ended := self._session.make_room(options)):
            print(ended)
        print((found.reuse and self._session.reuse(options)) or self._session.up(options))

    @magic_arguments("mesh ls")
    def ls(self, line: str) -> Table | None:
        """List the meshes; * marks the one in use. Kept meshes that no notebook or another one holds follow."""
        if parse(MeshMagics.ls, line) is None:
            return None
        meshes = self._session.proc_meshes()
        try:
            others = self._session.kept_elsewhere()
        except KeptError as error:
            others = []
            print(f"{error}\n")
        if not meshes and not others:
            print("No mesh is up; %mesh up --procs 4 starts one.")
            return None
        current = self._session.current
        rows: list[list[str]] = []
        for name, mesh in meshes.items():
            states = _ask(mesh.status())
            alive = "?" if states is None else str(sum(status.state == "alive" for status in states.values()))
            sizes = ", ".join(f"{label}={size}" for label, size in mesh.extent.items())
            rows.append(["*" if name == current else "", name, sizes, str(len(mesh)), alive])
        headings = ["", "mesh", "dimensions", "ranks", "alive"]
        mine = {mesh.name: host for host in held() for mesh in host.proc_meshes}
        if mine or others:
            headings.append("kept")
            rows = [[*row, kept_state(mine.get(row[1]))] for row in rows]
            rows += [row for info in others for row in kept_rows(info)]
        return Table(headings, rows, right=(3, 4))

    @magic_arguments("mesh status")
    @argument("name", nargs="?", metavar="NAME", help="the mesh (default: the one in use)")
    @_ranks_option
    def status(self, line: str) -> Table | None:
        """Show each rank of a mesh: state, process, memory, and where its code is."""
        found = parse(MeshMagics.status, line)
        if found is None:
            return None
        mesh = self._session.find(found.name, "%mesh status")
        extent = mesh.extent
        ranks = args_of.select("%mesh status", found.ranks, [], extent, mesh.name)
        states = mesh.status().get(ASK_TIMEOUT)
        places = self._places(mesh)
        rows: list[list[str]] = []
        for rank in ranks:
            status = states.get(rank)
            point = ",".join(f"{label}={at}" for label, at in extent.point(rank).items())
            alive = status.state in ("alive", "unresponsive")
            numbers = (
                [megabytes(status.rss_bytes), f"{status.cpu_percent:.0f} %", seconds(status.uptime_s)]
                if alive
                else ["", "", ""]
            )
            doing = status.cause or places.get(rank, "idle")
            rows.append([str(rank), point, status.state, str(status.pid or ""), status.host, *numbers, doing])
        headings = ["rank", "at", "state", "pid", "host", "memory", "cpu", "up", "doing"]
        host = kept_host_of(mesh)
        lost = "" if host is None or host.is_kept else f": kept {kept_state(host)}"
        return Table(headings, rows, caption=f"mesh {mesh.name}{lost}", right=(0, 3, 5, 6, 7))

    def _places(self, mesh: ProcMesh, actors: bool = True) -> dict[int, str]:
        """Where the ranks of a mesh are that run a cell, or an endpoint of an actor."""
        managed = self._session.managed(mesh.name)
        if managed is None:
            return _called(mesh) if actors else {}
        told: dict[int, str] = {}
        for slot in managed.monitor.where.stream():
            try:
                place = slot.get(ASK_TIMEOUT / 2)
            except TimeoutError:
                break  # completion order: nobody else has answered either
            except Exception:  # a dead rank
                continue
            if place is not None and (actors or not place.endpoint):
                what = f"{place.endpoint}, " if place.endpoint else ""
                told[place.rank] = what + self._notebook.place(place.file, place.line, place.function)
        return told

    @magic_arguments("mesh use")
    @argument("name", metavar="NAME", help="the mesh")
    def use(self, line: str) -> None:
        """Run the cells that follow on this mesh."""
        found = parse(MeshMagics.use, line)
        if found is not None:
            managed = self._session.use(found.name)
            print(f"mesh {managed.name}: {managed.describe()}, in use")

    @magic_arguments("mesh down")
    @argument("name", nargs="?", metavar="NAME", help="the mesh (default: the one in use)")
    @argument("--all", action="store_true", help="all meshes of this notebook")
    @argument("--force", action="store_true", help="also a kept mesh that another kernel holds")
    def down(self, line: str) -> None:
        """Stop a mesh and its processes."""
        found = parse(MeshMagics.down, line)
        if found is None:
            return
        if found.all and found.name:
            raise usage_error("%mesh down", "give either a name or --all, not both")
        if not found.all:
            print(self._session.down(found.name, found.force))
            return
        names = self._session.names()
        for name in names:
            print(self._session.down(name))
        if not names:
            print("No mesh is up.")

    @magic_arguments("mesh interrupt")
    @argument("name", nargs="?", metavar="NAME", help="the mesh (default: the one in use)")
    @_ranks_option
    def interrupt(self, line: str) -> None:
        """Raise KeyboardInterrupt in what runs on a mesh: cells that were started with -a, and calls of actors."""
        found = parse(MeshMagics.interrupt, line)
        if found is None:
            return
        command = "%mesh interrupt"
        mesh = self._session.find(found.name, command)
        ranks = args_of.select(command, found.ranks, [], mesh.extent, mesh.name)
        for run in get_relay().background:
            if isinstance(run, CellRun) and run.managed.procs is mesh:
                run.drop(ranks)  # a cell that waits behind another one must not begin
        print(self._session.interrupt(mesh, ranks))

    @magic_arguments("mesh heal")
    @argument("name", nargs="?", metavar="NAME", help="the mesh (default: the one in use)")
    @_ranks_option
    def heal(self, line: str) -> None:
        """Replace ranks that died, in their places; the others keep their variables."""
        found = parse(MeshMagics.heal, line)
        if found is None:
            return
        mesh = self._session.find(found.name, "%mesh heal")
        ranks = args_of.select("%mesh heal", found.ranks, [], mesh.extent, mesh.name)
        print(self._session.heal(mesh, ranks))

    @magic_arguments("mesh restart")
    @argument("name", nargs="?", metavar="NAME", help="the mesh (default: the one in use)")
    def restart(self, line: str) -> None:
        """Stop a mesh and start it again with the same options; its variables are gone."""
        found = parse(MeshMagics.restart, line)
        if found is not None:
            print(self._session.restart(found.name))

    # -- kept meshes ---------------------------------------------------------------------------

    @magic_arguments("mesh attach")
    @argument("name", metavar="NAME", help="the mesh, or the path of its folder")
    @argument("--force", action="store_true", help="also if another kernel holds it, which then has it no more")
    def attach(self, line: str) -> None:
        """Take over a mesh that was started with --keep: its variables, its actors, what runs on it."""
        found = parse(MeshMagics.attach, line)
        if found is None:
            return
        host = self._session.attach(found.name, found.force)
        for mesh in host.proc_meshes:
            managed = self._session.managed(mesh.name)
            sizes = managed.describe() if managed is not None else f"{len(mesh)} ranks"
            print(f"mesh {mesh.name}: {sizes}, attached, in use" if managed else f"mesh {mesh.name}: {sizes}, attached")
            dead = deaths_of(mesh)
            for cause in dict.fromkeys(dead.values()):
                ranks = _listed([rank for rank, why in dead.items() if why == cause])
                print(f"  died meanwhile: {ranks}, {cause}; %mesh heal {mesh.name} puts fresh ones in their places")
            places = self._places(mesh, actors=False)
            for place in dict.fromkeys(places.values()):
                ranks = _listed([rank for rank, where in places.items() if where == place])
                print(f"  still running a cell: {ranks}, at {place}")
        if not host.proc_meshes:
            print(f"{host.name}: attached; there is no mesh on it")
        if host.missed:
            size = megabytes(sum(host.missed.values()))
            print(f"  {size} of older output are not shown; %mesh logs has what was kept of them")

    @magic_arguments("mesh detach")
    @argument("name", nargs="?", metavar="NAME", help="the mesh (default: the one in use)")
    def detach(self, line: str) -> None:
        """Let go of a mesh that was started with --keep, without ending it."""
        found = parse(MeshMagics.detach, line)
        if found is not None:
            print(self._session.detach(found.name))

    # -- variables and logs --------------------------------------------------------------------

    @magic_arguments("mesh push")
    @argument("names", nargs="+", metavar="VAR", help="variables of the notebook")
    @_ranks_option
    @_mesh_option
    def push(self, line: str) -> None:
        """Copy variables of the notebook to the ranks."""
        found = parse(MeshMagics.push, line)
        if found is None:
            return
        command = "%mesh push"
        values = {name: self._notebook.variable(name, command) for name in found.names}
        managed, ranks = self._addressed(found, command)
        for name, value in values.items():
            try:
                cloudpickle.dumps(value)
            except Exception as error:  # pickling runs user code
                kind = type(value).__name__
                raise usage_error(
                    command, f"{name} (a {kind}) cannot be sent: {error}; make it on the ranks, in a %%mesh cell"
                ) from None
        calls = [(part, part.mesh.push.call(values)) for part in parts_of(managed, ranks)]
        for part, call in calls:
            try:
                call.get()
            except SupervisionError as error:
                more = "; the others have it now" if len(error.ranks) < len(ranks) else ""
                raise _cannot_answer(command, managed.name, part.ranks, error, more) from None

    @magic_arguments("mesh pull")
    @argument("names", nargs="+", metavar="VAR", help="variables of the ranks")
    @argument("--as", dest="target", metavar="NAME", help="what to call it in the notebook")
    @_ranks_option
    @_mesh_option
    def pull(self, line: str) -> None:
        """Copy variables of the ranks to the notebook: each becomes a ValueMesh, with one value per rank."""
        found = parse(MeshMagics.pull, line)
        if found is None:
            return
        command = "%mesh pull"
        for name in found.names:
            args_of.check_name(command, name, "variable")
        if found.target is not None:
            args_of.check_name(command, found.target, "variable")
            if len(found.names) > 1:
                raise usage_error(command, "--as names one variable, so give one to pull")
        managed, ranks = self._addressed(found, command)
        got: dict[int, dict[str, Any]] = {}
        calls = [(part, part.mesh.pull.call(found.names)) for part in parts_of(managed, ranks)]
        for part, call in calls:
            try:
                values = call.get()
            except SupervisionError as error:
                raise _cannot_answer(command, managed.name, part.ranks, error) from None
            except ActorError as error:
                first = error.failures[0]
                where = f"rank {part.ranks[first.rank]}"
                raise usage_error(command, f"{where} cannot send it: {first.message.rstrip('.')}") from None
            got.update(zip(part.ranks, values.values(), strict=True))
        for name in found.names:
            missing = [rank for rank in ranks if name not in got[rank]]
            if missing:
                who = "any rank" if len(missing) == len(ranks) else f"rank {_listed(missing)}"
                raise usage_error(command, f"there is no variable {name!r} on {who} of mesh {managed.name}")
        shape = managed.shape(ranks)
        for name in found.names:
            values = ValueMesh(shape, [got[rank][name] for rank in ranks])
            self._notebook.shell.user_ns[found.target or name] = values

    @magic_arguments("mesh logs")
    @argument("name", nargs="?", metavar="NAME", help="the mesh (default: the one in use)")
    @_ranks_option
    @argument("-n", "--lines", type=int, metavar="N", help="only the last N lines of each rank")
    def logs(self, line: str) -> None:
        """Print all that ranks have put out, from every cell, rank by rank."""
        found = parse(MeshMagics.logs, line)
        if found is None:
            return
        if found.lines is not None and found.lines < 1:
            raise usage_error("%mesh logs", f"-n takes a number of lines of at least 1, not {found.lines}")
        from monarch_kernel.output import logs

        mesh = self._session.find(found.name, "%mesh logs")
        ranks = args_of.select("%mesh logs", found.ranks, [], mesh.extent, mesh.name)
        try:
            texts = logs(mesh, ranks=ranks, tail=found.lines)
        except SupervisionError as error:
            raise usage_error(
                "%mesh logs", f"the logs of mesh {mesh.name} went with its host agent: {error.cause}"
            ) from None
        for rank in ranks:
            lines = texts.get(rank).rstrip("\n").split("\n")[-(found.lines or 0) :]
            print("\n".join(f"[{rank}] {each}" for each in lines if each or len(lines) > 1))

    def _addressed(self, found: Any, command: str) -> tuple[ManagedMesh, tuple[int, ...]]:
        managed = self._session.get(found.on, command)
        where = getattr(found, "where", [])
        return managed, args_of.select(command, found.ranks, where, managed.extent, managed.name)

    # -- %%mesh --------------------------------------------------------------------------------

    @cell_magic("mesh")
    @magic_arguments("%mesh")
    @argument("name", nargs="?", metavar="NAME", help="the mesh (default: the one in use)")
    @_mesh_option
    @_ranks_option
    @argument("--where", action="append", default=[], metavar="DIM=SLICE", help="as -r, a dimension at a time")
    @argument("-o", "--out", metavar="VAR", help="keep the values of the last expression in this variable")
    @argument("-a", "--no-wait", action="store_true", help="go on at once; the output still comes here")
    @argument("--raw", action="store_true", help="every line as it comes, with its rank, nothing folded")
    def mesh_cell(self, line: str, cell: str) -> Any:
        """Run the cell on the ranks of a mesh.

        Each rank has its own variables, which stay from cell to cell; rank, world_size and point are there
        from the start. The value of the cell is a ValueMesh of the last expression's values.
        """
        found = parse(MeshMagics.mesh_cell, line)
        if found is None:
            return None
        command = "%%mesh"
        if found.name and found.on:
            raise usage_error(command, f"give the mesh once, not as {found.name!r} and as --on {found.on}")
        found.on = found.on or found.name
        if found.out is not None:
            args_of.check_name(command, found.out, "variable")
        if not cell.strip():
            raise usage_error(command, "the cell is empty; write what the ranks are to run below the first line")
        made = self._notebook.make_cell(cell)
        managed, ranks = self._addressed(found, command)
        return self._run(managed, ranks, made, found)

    def addressed_by(self, line: str) -> tuple[ManagedMesh, tuple[int, ...]] | None:
        """The mesh and the ranks that the first line of a cell means, for what looks at a cell before it is run.

        None: cells have not run there yet, or the line makes no sense so far.
        """
        if {"-h", "--help"} & set(line.split()):
            return None
        try:
            found = parse(MeshMagics.mesh_cell, line)
            managed = self._session.managed(found.on or found.name or self._session.current or "") if found else None
            if found is None or managed is None:
                return None
            return managed, args_of.select("%%mesh", found.ranks, found.where, managed.extent, managed.name)
        except UsageError:
            return None

    def _run(self, managed: ManagedMesh, ranks: tuple[int, ...], cell: Any, found: Any) -> Any:
        notebook = self._notebook
        expected = [Source(managed.name, rank) for rank in ranks]
        output = notebook.router.open(cell.id, notebook.output(raw=found.raw, expected=expected))
        run = CellRun(managed, ranks, cell, output, notebook.router, notebook.file_label)
        if found.no_wait:
            handle = _in_background(run)
            if found.out:
                notebook.shell.user_ns[found.out] = handle
            return None
        relay = get_relay()

        def pressed() -> None:
            if not relay.connected:  # a plain ipykernel or IPython: the interrupt came to us alone
                relay.press(cell.id)

        with relay.active(run), notebook.stops.runs(run):
            run.start()
            run.wait(pressed)
        if run.detached:  # at the prompt, while ranks are stopped
            handle = _wait_apart(run)
            if found.out:
                notebook.shell.user_ns[found.out] = handle
            return None
        error = run.error()
        if error is not None:
            error.colours = notebook.colours
            raise error
        value = run.value()
        if found.out:
            notebook.shell.user_ns[found.out] = value
            return None
        notebook.keep(value)
        return None


def _in_background(run: CellRun) -> MeshCell:
    get_relay().add(run, background=True)
    run.start(then_wait=False)
    return _wait_apart(run)


def _wait_apart(run: CellRun) -> MeshCell:
    """Wait for a cell on a thread of its own; the cell of the notebook is over."""
    relay = get_relay()
    done = threading.Event()

    def wait() -> None:
        try:
            run.wait(lambda: None)
            error = run.error()
            if error is not None:
                run.show_error(error)
        finally:
            relay.remove(run)
            done.set()

    relay.remove(run)
    relay.add(run, background=True)
    threading.Thread(target=wait, name="monarch-cell", daemon=True).start()
    return MeshCell(run, done)


def _called(mesh: ProcMesh) -> dict[int, str]:
    """Which ranks of a mesh this process waits for, and in which call."""
    waiting = {proc: f"called: {call.what}" for call in awaited_here() for proc in call.procs}
    procs = mesh._target().procs
    return {rank: waiting[ref.id] for rank, ref in enumerate(procs) if ref.id in waiting}


def _ask(future: Any) -> Any:
    try:
        return future.get(ASK_TIMEOUT)
    except (TimeoutError, SupervisionError):
        return None


def _listed(ranks: list[int]) -> str:
    return format_ranks(ranks, limit=6)
