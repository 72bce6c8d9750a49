"""What a notebook answers to views of its meshes, and does for them: what its `%mesh` lines do, and by them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from monarch_kernel.actor import ProcMesh
from monarch_kernel.debugger import existing_debugger
from monarch_kernel.debugger.commands import breakpoint_commands
from monarch_kernel.debugger.controller.query import ask
from monarch_kernel.debugger.frames import user_frames
from monarch_kernel.engines import engine
from monarch_kernel.kernel.job_views import listed
from monarch_kernel.kernel.magics.dispatch import MeshCommands
from monarch_kernel.kernel.notebook import Notebook
from monarch_kernel.kernel.rank.namespace import MOST, variables_here
from monarch_kernel.kernel.views.command_lines import ACTIONS, OF_NO_MESH, Click, line_of, lines_wanted
from monarch_kernel.kernel.views.log_follower import LogFollower
from monarch_kernel.launchers.listing import list_jobs
from monarch_kernel.watch.model import plain
from monarch_kernel.widgets.connection import Closable, ViewRequestError
from monarch_kernel.widgets.lookup import mesh_of

if TYPE_CHECKING:
    from monarch_kernel.debugger.controller.hang.verdict import Verdict
    from monarch_kernel.debugger.controller.stacks import Stacks
    from monarch_kernel.debugger.events import RankStop
    from monarch_kernel.debugger.model.stacks import StackFrame

#: How long ranks may take to list their variables (seconds).
VARIABLES_TIMEOUT = 5.0
#: How other viewers of the debugger see a view.
NAME = "a view in the front end"


class NotebookServices:
    """The `Services` of the front ends of one notebook. Any thread may use them.

    Args:
        notebook: the notebook.
    """

    def __init__(self, notebook: Notebook) -> None:
        self._notebook = notebook
        self._questions: dict[str, Callable[[Click], Any]] = {
            "stack": self._stack,
            "log": self._log,
            "variables": self._variables,
            "breakpoints": self._breakpoints,
            "hang": self._hang,
            "code": self._code,
            "jobs": self._jobs,
        }

    @property
    def is_busy(self) -> bool:
        """See `Services`."""
        return self._notebook.is_busy

    def ask(self, request: Mapping[str, Any]) -> Any:
        """See `Services`."""
        what = str(request.get("what"))
        if what not in self._questions:
            raise ViewRequestError(f"there is nothing called {what!r} to ask")
        of_none = what in OF_NO_MESH or (what == "code" and request.get("action") in OF_NO_MESH)
        return self._questions[what](self._click(request, what, of_none))

    def act(self, request: Mapping[str, Any]) -> str:
        """See `Services`."""
        what = str(request.get("what"))
        if what not in ACTIONS:
            raise ViewRequestError(f"there is nothing called {what!r} to do")
        said: list[str] = []
        value = self._run(self._click(request, what, what in OF_NO_MESH), said.append)
        if value is not None:  # the receipt of a sync
            said.append(str(value))
        return "\n".join(said)

    def follow(self, request: Mapping[str, Any], push: Callable[[dict[str, Any]], object]) -> Closable:
        """See `Services`."""
        click = self._click(request, "log", False)
        return LogFollower(click.mesh, click.ranks or None, str(request.get("search") or ""), push)

    # -- what is meant ----------------------------------------------------------------------------

    def _click(self, request: Mapping[str, Any], what: str, of_none: bool) -> Click:
        if of_none:
            return Click(what, options=request)
        mesh = self._mesh(request)
        ranks = sorted({int(rank) for rank in request.get("ranks") or ()})
        for rank in ranks:
            if not 0 <= rank < len(mesh):
                raise ViewRequestError(f"mesh {mesh.name} has no rank {rank}: it has {len(mesh)}")
        return Click(what, mesh.name, len(mesh), tuple(ranks), request)

    def _mesh(self, request: Mapping[str, Any]) -> ProcMesh:
        mesh = mesh_of(str(request.get("mesh")))
        if self._notebook.session.proc_meshes().get(mesh.name) is not mesh:
            raise ViewRequestError(
                f"a newer mesh is called {mesh.name}, too, so that name means the other one",
                "give meshes names of their own",
            )
        return mesh

    def _run(self, click: Click, say: Callable[[str], object]) -> Any:
        return MeshCommands(self._notebook, say, NAME).run(line_of(click))

    def _code(self, click: Click) -> dict[str, Any]:
        action = str(click.options.get("action"))
        return {"code": f"%mesh {line_of(Click(action, click.mesh, click.size, click.ranks, click.options))}"}

    # -- answers ----------------------------------------------------------------------------------

    def _stack(self, click: Click) -> dict[str, Any]:
        found: Stacks = self._run(click, _nothing)
        groups: list[dict[str, Any]] = [
            {"ranks": list(note.ranks), "frames": [], "note": note.text} for note in found.notes if note.ranks
        ]
        for each in found.classes:
            outside = any(found.snapshots[rank].outside for rank in each.ranks)
            by = ["by py-spy"] if outside else []
            for stack in each.stacks:
                note = ", ".join(filter(None, [stack.state, *by]))
                frames = [self._frame(frame) for frame in stack.frames]
                groups.append({"ranks": list(each.ranks), "frames": frames, "note": note})
        if found.idle:
            groups.append({"ranks": list(found.idle), "frames": [], "note": "idle: waiting for a message"})
        return {"stacks": groups}

    def _frame(self, frame: StackFrame) -> dict[str, Any]:
        place = frame.place
        return {
            "function": place.name,
            "file": self._label(place.file),
            "line": place.line,
            "text": frame.source,
        }

    def _log(self, click: Click) -> dict[str, Any]:
        lines = lines_wanted(click)
        mesh = self._notebook.session.proc_meshes()[click.mesh]
        texts = engine().logs(mesh, ranks=click.all_ranks, tail=lines)
        found: list[list[Any]] = []
        for rank in click.all_ranks:
            # What the agent keeps is one text: which stream a line came from is only known as it is written.
            found += [[rank, "stdout", line] for line in texts.get(rank).splitlines()]
        return {"lines": found[-lines * len(click.all_ranks) :], "dropped": 0}

    def _variables(self, click: Click) -> dict[str, Any]:
        if len(click.all_ranks) != 1:
            raise ViewRequestError("variables are shown of one rank at a time", "choose a rank")
        (rank,) = click.all_ranks
        stop = self._stop_of(click.mesh, rank)
        if stop is not None:
            return self._of_frame(stop, click.options.get("frame"))
        mesh = self._notebook.session.proc_meshes()[click.mesh]
        answers = ask(mesh, variables_here, ranks=[rank], timeout=VARIABLES_TIMEOUT)
        if rank not in answers.values:
            why = answers.dead.get(rank) or answers.error_of(rank) or f"no answer within {VARIABLES_TIMEOUT:g} s"
            raise ViewRequestError(f"rank {rank} of mesh {click.mesh}: {why}")
        named = [{"name": name, "type": kind, "text": text} for name, kind, text in answers.values[rank]]
        return {"frame": None, "variables": named}

    @staticmethod
    def _stop_of(mesh: str, rank: int) -> RankStop | None:
        debugger = existing_debugger()
        if debugger is None:
            return None
        stops = [at for at in debugger.stops(mesh) if at.rank == rank and at.stop.thread]
        return stops[-1] if stops else None

    def _of_frame(self, at: RankStop, wanted: Any) -> dict[str, Any]:
        debugger = existing_debugger()
        assert debugger is not None
        frames = user_frames(at.stop.frames)
        frame = frames[min(max(0, wanted if isinstance(wanted, int) else 0), len(frames) - 1)]
        scopes = debugger.scopes(at.key, frame.index)
        found = debugger.variables(at.key, scopes[0].ref, 0, MOST) if scopes else []
        return {
            "frame": {"function": frame.name, "file": self._label(frame.file), "line": frame.line},
            "variables": [{"name": each.name, "type": each.type, "text": each.value} for each in found[:MOST]],
        }

    def _breakpoints(self, _click: Click) -> dict[str, Any]:
        debugger = existing_debugger()
        found: list[dict[str, Any]] = []
        for each in debugger.breakpoints() if debugger is not None else ():
            found.append(
                {
                    "id": str(each.id),
                    "file": self._label(each.spec.file) if each.spec.file else "",
                    "line": each.spec.line,
                    "condition": each.spec.condition,
                    "ranks": None if each.ranks is None else list(each.ranks),
                    "text": breakpoint_commands.described(each, self._notebook.file_label),
                }
            )
        return {"breakpoints": found}

    def _jobs(self, _click: Click) -> dict[str, Any]:
        places = self._notebook.session.engine_hosts
        found = list_jobs(places.awaited())
        return {"jobs": [plain(listed(job, places)) for job in found.jobs], "notes": list(found.notes)}

    def _hang(self, click: Click) -> dict[str, Any]:
        from monarch_kernel.debugger.controller.hang.verdict import NOTHING

        verdict: Verdict = self._run(click, _nothing)
        return {"hangs": verdict.kind != NOTHING, "text": str(verdict)}

    def _label(self, file: str) -> str:
        label = self._notebook.file_label(file)
        return label.removeprefix("Cell ") if label else file


def _nothing(_text: str) -> None:
    """What a question says beside its value is of no use to a view."""
