"""Subcommands of `%mesh` that start, choose, heal and stop meshes."""

from __future__ import annotations

from collections.abc import Sequence

from IPython.core.magic_arguments import argument, magic_arguments

from monarch_kernel.actor import HostMesh
from monarch_kernel.display.quantities import memory
from monarch_kernel.kernel import mesh_lifecycle
from monarch_kernel.kernel.cell_run import CellRun, run_again
from monarch_kernel.kernel.interrupts.interrupt_relay import get_relay
from monarch_kernel.kernel.magics.arguments import Arguments, extended_by, mesh_argument, ranks_option
from monarch_kernel.kernel.magics.status_magics import rank_locations
from monarch_kernel.kernel.magics.subcommands import Subcommands, listed
from monarch_kernel.kernel.magics.up_arguments import (
    asked_hosts,
    check_for_ranks,
    check_no_provider,
    env_arguments,
    environment_prefix,
    idle_argument,
    provider_arguments,
    up_arguments,
)
from monarch_kernel.kernel.managed_mesh import ManagedMesh, UpOptions
from monarch_kernel.kernel.mesh_lifecycle import deaths_of
from monarch_kernel.kernel.provider_up import AskedJob, up_on_provider
from monarch_kernel.kernel.sync_run import sync_to
from monarch_kernel.kernel.usage_errors import check_drives, replacing, usage_error
from monarch_kernel.launchers.host_request import LOCAL, AskedHosts, argument_of, memory_size, seconds
from monarch_kernel.meshes import name_ranks
from workspace_sync.receipt import receipt_line


class LifecycleMagics(Subcommands):
    """Starting, choosing, healing and stopping meshes."""

    @magic_arguments("mesh up")
    @argument("words", nargs="*", metavar="NAME | DIM=SIZE", help="a name (default: m), and dimensions: gpus=4")
    @argument("--procs", type=int, metavar="N", help="that many processes in one dimension, gpus; on each host")
    @argument("--on", metavar="ENGINE", help="hosts from this engine, profile or job; see --on ENGINE --help")
    @argument("--hosts", type=int, metavar="N", help="with --on: so many hosts")
    @argument("--gpus", type=int, metavar="N", help="... with so many GPUs each; a rank on each, with its own")
    @argument("--cpus", type=int, metavar="N", help="... with so many processors each")
    @argument("--memory", type=argument_of(memory_size), metavar="SIZE", help="... with so much memory each: 64GB")
    @argument("--walltime", type=argument_of(seconds), metavar="TIME", help="... for so long: 2h, 30m")
    @argument("--python", metavar="PATH", help="... with this interpreter there")
    @argument("--key-file", metavar="FILE", help="... with this key of their workers (default: a new one)")
    @argument("--timeout", type=argument_of(seconds), metavar="TIME", help="... which are waited for so long (10m)")
    @argument("--all-devices", action="store_true", help="... whose ranks see all GPUs of their host, as torchrun's do")
    @argument("--trust", action="store_true", help="... by a profile in a project's file that you trust as it is")
    @argument("--no-wait", action="store_true", help="... which are not waited for; a line appears here")
    @argument(
        "--env", action="append", default=[], metavar="K=V | NAME", help="a variable (repeatable); or an environment"
    )
    @argument("--sync", action="store_true", help="first sync the folders that %%mesh sync would, and run in them")
    @argument("--dist", choices=["gloo", "nccl"], help="join all ranks in a torch.distributed process group")
    @argument("--preload", action="append", default=[], metavar="MODULE", help="import it once, for all ranks")
    @argument("--reuse", action="store_true", help="use the existing mesh of that name if it is like this")
    @argument("--replace", action="store_true", help="stop the mesh of that name first, if there is one")
    @argument("--keep", action="store_true", help="it outlives this kernel; %%mesh attach takes it back")
    @argument(
        "--idle", type=float, metavar="HOURS", help="with --keep, --on: ends after so many hours without a kernel (12)"
    )
    @extended_by(provider_arguments)
    def up(self, found: Arguments) -> None:
        """Start a mesh of processes on this host, or on hosts of an engine, and use it for the following cells."""
        if found.on in (None, LOCAL):
            check_no_provider(found)
            self._up(found, up_arguments(found.magic, found.words, found.procs), "", None)
            return
        asked = asked_hosts(found)
        usual = asked.procs or asked.gpus or 1
        named = up_arguments(found.magic, found.words, found.procs, usual)
        if not found.reuse and not found.replace:
            mesh_lifecycle.check_free(self._session, named[0])
        self._up(found, named, found.on, asked)

    def _up(
        self, found: Arguments, named: tuple[str, dict[str, int]], on: str, asked: AskedHosts | AskedJob | None
    ) -> None:
        name, dims = named
        env, environment = env_arguments(found.magic, found.env)
        preload = tuple(word for item in found.preload for word in item.split(",") if word)
        idle = 0.0 if asked is not None else idle_argument(found.magic, found.idle, found.keep)
        if found.reuse and found.replace:
            raise usage_error(found.magic, "give either --reuse or --replace, not both")
        if environment:
            environment = environment_prefix(found.magic, environment)
            check_for_ranks(found.magic, environment)
        options = UpOptions(name, dims, env, found.dist or "", preload, found.keep, idle, environment, found.sync, on)
        if found.replace and (ended := mesh_lifecycle.make_room(self._session, options)):
            self.say(ended)
        if found.reuse and (reused := mesh_lifecycle.reuse(self._session, options)):
            self.say(reused)
        elif asked is None:
            self.say(mesh_lifecycle.up(self._session, options, self._sync))
        else:
            up_on_provider(
                self._notebook, options, asked, self._sync, self.say, wait=not found.no_wait, shared=found.all_devices
            )

    def _sync(self, hosts: HostMesh) -> str:
        """Sync the workspace of `%mesh sync` to the hosts of a new mesh. Return a line for the user."""
        return receipt_line(sync_to(self._notebook, "%mesh up", hosts, self.say))

    @magic_arguments("mesh use")
    @argument("name", metavar="NAME", help="the mesh")
    def use(self, found: Arguments) -> None:
        """Run the following cells on this mesh."""
        managed = self._session.use(found.name)
        self.say(f"mesh {managed.name}: {managed.describe()}, in use")

    @magic_arguments("mesh down")
    @mesh_argument()
    @argument("--all", action="store_true", help="all meshes of this notebook")
    @argument("--force", action="store_true", help="also where a cell runs, or a mesh attached to another kernel")
    def down(self, found: Arguments) -> None:
        """Stop a mesh and its processes."""
        if found.all and found.name:
            raise usage_error(found.magic, "give either a name or --all, not both")
        if not found.force:
            self._check_idle(found)
        if not found.all:
            self.say(mesh_lifecycle.down(self._session, found.name, found.force))
            return
        names = self._session.names()
        for name in names:
            self.say(mesh_lifecycle.down(self._session, name))
        if not names:
            self.say("No mesh is up.")

    def _check_idle(self, found: Arguments) -> None:
        """Refuse to stop a mesh on which a cell of this notebook runs in the background."""
        name = found.name or self._session.current
        for run in get_relay().background:
            if isinstance(run, CellRun) and run.waiting and run.managed.is_alive:
                mesh = run.managed.name
                if found.all or mesh == name:
                    what = (self._notebook.file_label(run.cell.filename) or "a cell").removeprefix("Cell ")
                    raise usage_error(
                        found.magic,
                        f"{what} runs on {name_ranks(sorted(run.waiting), limit=6)} of mesh {mesh}: "
                        f"%mesh interrupt {mesh} ends it, --force stops the mesh all the same",
                    )

    @magic_arguments("mesh interrupt")
    @mesh_argument()
    @ranks_option()
    def interrupt(self, found: Arguments) -> None:
        """Interrupt the cells and endpoints of a mesh; again within 2 s, and ranks that do not respond are killed."""
        mesh, ranks = self.addressed(found)
        check_drives(mesh, found.magic)
        for run in get_relay().background:
            if isinstance(run, CellRun) and run.managed.procs is mesh:
                run.drop(ranks)  # a queued cell must not begin
        self.say(mesh_lifecycle.interrupt(self._session, mesh, ranks))

    @magic_arguments("mesh kill")
    @mesh_argument()
    @ranks_option("the ranks that are killed, such as 3 or 0-1 (needed)")
    def kill(self, found: Arguments) -> None:
        """Kill ranks at once, whatever they run; %mesh heal replaces them."""
        if found.ranks is None:
            raise usage_error(found.magic, "say which ranks: %mesh kill -r 3; %mesh down stops the whole mesh")
        mesh, ranks = self.addressed(found)
        self.say(mesh_lifecycle.kill(mesh, ranks))

    @magic_arguments("mesh heal")
    @mesh_argument()
    @ranks_option()
    @argument(
        "--replay", action="store_true", help="run earlier cells on the new ranks: those with --setup, or else all"
    )
    def heal(self, found: Arguments) -> None:
        """Replace dead ranks; the others keep their variables."""
        mesh, ranks = self.addressed(found)
        self.say(mesh_lifecycle.heal(self._session, mesh, ranks))
        if found.replay:
            self._replay(self._session.get(mesh.name, found.magic), ranks)

    def _replay(self, managed: ManagedMesh, ranks: Sequence[int]) -> None:
        """Run the cells of predecessors on new ranks, in the same order, after listing them."""
        missed = {rank: managed.missed(rank) for rank in ranks}
        cells = list({id(each): each for some in missed.values() for each in some}.values())
        cells = [each for each in cells if each.cell.setup] or cells
        if not cells:
            self.say("  no cell that this notebook knows of has run on the predecessors of these ranks")
            return
        listed = [self._notebook.file_label(each.cell.filename) or "a cell" for each in cells]
        new = [rank for rank in ranks if missed[rank]]
        self.say(
            f"  on {name_ranks(new, limit=6)} run again: {', '.join(each.removeprefix('Cell ') for each in listed)}"
        )
        for each in cells:
            here = [rank for rank in ranks if each in missed[rank]]
            run_again(self._notebook, managed, here, each.cell)
            managed.note_replayed(each, here)

    @magic_arguments("mesh restart")
    @mesh_argument()
    def restart(self, found: Arguments) -> None:
        """Stop a mesh and start it again with the same options; its variables are lost."""
        self.say(mesh_lifecycle.restart(self._session, found.name, self._sync))

    # -- kept meshes ---------------------------------------------------------------------------

    @magic_arguments("mesh attach")
    @argument("name", metavar="NAME", help="the mesh, or the path of its folder")
    @argument("--force", action="store_true", help="also if it is attached to another kernel, which then loses it")
    def attach(self, found: Arguments) -> None:
        """Attach a mesh that was started with --keep: its variables, its actors, and what runs on it."""
        host = mesh_lifecycle.attach(self._session, found.name, found.force)
        for mesh in host.proc_meshes:
            managed = self._session.managed(mesh.name)
            sizes = managed.describe() if managed is not None else f"{len(mesh)} ranks"
            self.say(
                f"mesh {mesh.name}: {sizes}, attached, in use" if managed else f"mesh {mesh.name}: {sizes}, attached"
            )
            dead = deaths_of(mesh)
            for cause in dict.fromkeys(dead.values()):
                ranks = listed([rank for rank, why in dead.items() if why == cause])
                self.say(f"  died meanwhile: {ranks}, {cause}; {replacing(mesh.name)}")
            places = rank_locations(self._notebook, mesh, actors=False)
            for place in dict.fromkeys(places.values()):
                ranks = listed([rank for rank, where in places.items() if where == place])
                self.say(f"  still running a cell: {ranks}, at {place}")
        if not host.proc_meshes:
            self.say(f"{host.name}: attached; there is no mesh on it")
        if host.missed:
            size = memory(sum(host.missed.values()))
            self.say(f"  {size} of older output are not shown; %mesh logs has what is left of it")

    @magic_arguments("mesh detach")
    @mesh_argument()
    def detach(self, found: Arguments) -> None:
        """Detach a mesh that was started with --keep; it goes on."""
        self.say(mesh_lifecycle.detach(self._session, found.name))
