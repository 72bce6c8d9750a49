"""`%mesh focus` and `%mesh debugpy`: debug ranks in front ends and IDEs that speak DAP."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from IPython.core.magic_arguments import argument, magic_arguments

from monarch_kernel.kernel.magics.arguments import Arguments, Subcommands, mesh_argument, mesh_option, ranks_option
from monarch_kernel.kernel.notebook import Notebook
from monarch_kernel.kernel.usage_errors import usage_error

if TYPE_CHECKING:
    from monarch_kernel.debugger.dap import RankSession
    from monarch_kernel.debugger.dap.gateway import Gateway

# Implement `%mesh focus`: select the rank that the front end's debugger shows.

#: Formats a location in code (file, line, function) as a short text.
PlaceText = Callable[[str, int, str], str]


@dataclass(frozen=True, slots=True)
class FocusAnswer:
    """The outcome of `%mesh focus`."""

    text: str
    refused: bool = False


def focus(ranks: RankSession, rank: int | None, mesh: str | None, place: PlaceText | None = None) -> FocusAnswer:
    """Show another stopped rank.

    Args:
        ranks: the session of the front end's debugger.
        rank: the rank to show; None only lists the stopped ranks.
        mesh: its mesh; may be None if that rank is stopped in one mesh only.
        place: formats locations in code.
    """
    from monarch_kernel.debugger.dap import RequestError

    if rank is None:
        return FocusAnswer(state_text(ranks.state(), place))
    try:
        return FocusAnswer(f"{ranks.focus(rank, mesh)} is shown")
    except RequestError as error:
        return FocusAnswer(str(error), refused=True)


def state_text(state: Mapping[str, Any], place: PlaceText | None = None) -> str:
    """Return where ranks are stopped, one stop per line; `*` marks the one that is shown.

    Args:
        state: the result of `RankSession.state`.
        place: formats locations in code.
    """
    lines: list[str] = []
    for mesh in state["meshes"]:
        for rank in mesh["ranks"]:
            for stop in rank.get("stops", ()):
                where = (stop["file"], stop["line"], stop["name"])
                text = place(*where) if place is not None else f"line {stop['line']} in {stop['name']}"
                mark = "*" if stop["shown"] else " "
                lines.append(f"{mark} mesh {mesh['name']} rank {rank['rank']}: {text} ({stop['reason']})")
    return "\n".join(lines) or "No rank is stopped."


class DapMagics(Subcommands):
    """Ranks in debuggers that speak DAP."""

    def __init__(self, notebook: Notebook, *more: Any) -> None:
        super().__init__(notebook, *more)
        self._open: dict[tuple[str, int], Gateway] = {}

    # -- %mesh focus -----------------------------------------------------------------------------

    @magic_arguments("mesh focus")
    @argument("rank", nargs="?", type=int, metavar="RANK", help="a stopped rank (default: list the stopped ranks)")
    @mesh_option("its mesh, where several have that rank stopped")
    def focus(self, found: Arguments) -> None:
        """Show another stopped rank in the debugger of JupyterLab. Works in its "Evaluate Code" box, too."""
        kernel = getattr(self._notebook.shell, "kernel", None)
        ranks = getattr(getattr(kernel, "debugger", None), "ranks", None)
        if ranks is None:
            raise usage_error(found.magic, "the front end's debugger is off; turn it on with the bug button first")
        answer = focus(ranks, found.rank, found.on, self._notebook.place)
        if answer.refused:
            raise usage_error(found.magic, answer.text)
        self.say(answer.text)

    # -- %mesh debugpy ---------------------------------------------------------------------------

    @magic_arguments("mesh debugpy")
    @mesh_argument()
    @ranks_option("ranks, such as 3 or 0-1 (needed to start)")
    @argument("--stop", action="store_true", help="end it (without -r: on all ranks)")
    def debugpy(self, found: Arguments) -> None:
        """Open ranks to any IDE that speaks DAP: a local port for each, and a launch configuration for VS Code."""
        gateways = self._gateways()
        if found.ranks is None:
            if found.stop:
                self._end_gateways(list(gateways.values()))
            elif gateways:
                for gateway in gateways.values():
                    self.say(_where(gateway))
            else:
                raise usage_error(found.magic, "say which rank: %mesh debugpy -r 3")
            return
        mesh, ranks = self.addressed(found)
        if found.stop:
            self._end_gateways([gateways[mesh.name, rank] for rank in ranks if (mesh.name, rank) in gateways])
            return
        from monarch_kernel.debugger.dap.gateway import Gateway
        from monarch_kernel.introspection import hosts_of

        here = socket.gethostname()
        for rank in ranks:
            if (mesh.name, rank) not in gateways:
                try:
                    gateways[mesh.name, rank] = Gateway(mesh, rank)
                except RuntimeError as error:
                    raise usage_error(found.magic, str(error)) from None
        opened = [gateways[mesh.name, rank] for rank in ranks]
        for gateway in opened:
            self.say(_where(gateway))
        hosts = hosts_of(mesh)
        configurations = [_launch(each, hosts[each.rank]) for each in opened]
        text = json.dumps({"version": "0.2.0", "configurations": configurations}, indent=4)
        self.say(f"\nFor VS Code, in .vscode/launch.json:\n\n{text}\n")
        ports = " ".join(f"-L {gateway.address[1]}:127.0.0.1:{gateway.address[1]}" for gateway in opened)
        self.say(f"From another machine, first: ssh {ports} {here}")
        self.say(f"%mesh debugpy --stop ends it.{_cost(opened)}")

    def _gateways(self) -> dict[tuple[str, int], Gateway]:
        for key in [key for key, gateway in self._open.items() if not gateway.is_open]:
            self._open.pop(key).close()
        return self._open

    def _end_gateways(self, ended: list[Gateway]) -> None:
        known = self._gateways()
        for gateway in ended:
            gateway.close()
            known.pop((gateway.mesh, gateway.rank), None)
            slow = gateway.begun.python < (3, 12)
            said = "; its code stays slower than before until the rank is replaced (Python 3.11)" if slow else ""
            self.say(f"rank {gateway.rank} of mesh {gateway.mesh}: debugpy has ended{said}")
        if not ended:
            self.say("debugpy runs on none of them.")


def _where(gateway: Gateway) -> str:
    host, port = gateway.address
    return f"rank {gateway.rank} of mesh {gateway.mesh} (pid {gateway.begun.pid}): DAP at {host}:{port}, with its token"


def _cost(opened: list[Gateway]) -> str:
    if all(gateway.begun.python >= (3, 12) for gateway in opened):
        return ""
    return (
        " On Python 3.11 all code of these ranks runs some 4 times slower from now on, until they are replaced, and "
        "breakpoints of %mesh break do not hold on them meanwhile."
    )


def _launch(gateway: Gateway, host: str) -> dict[str, object]:
    address, port = gateway.address
    made: dict[str, object] = {
        "name": f"rank {gateway.rank} of mesh {gateway.mesh} on {host}",
        "type": "debugpy",
        "request": "attach",
        "connect": {"host": address, "port": port},
        "token": gateway.token,
        "justMyCode": True,
        "subProcess": False,
    }
    if gateway.begun.folder != os.getcwd():
        made["pathMappings"] = [{"localRoot": "${workspaceFolder}", "remoteRoot": gateway.begun.folder}]
    return made
