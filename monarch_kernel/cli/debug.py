"""``monarch-kernel debug [PID]``: open the debugger's console of a running controller in this terminal."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from monarch_kernel.introspection import Controller


def add_debug_command(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``monarch-kernel debug``."""
    parser.add_argument("pid", nargs="?", type=int, metavar="PID", help="the process to debug, if there are several")
    parser.add_argument("--list", action="store_true", help="list the processes with meshes, then exit")
    parser.add_argument(
        "-c",
        "--command",
        action="append",
        default=[],
        metavar="COMMAND",
        help="execute this command, then exit; repeatable",
    )
    parser.description = (
        "Opens the debugger's console of a kernel or script of yours that runs on this machine, even if it was never "
        "debugged before. help lists the commands."
    )
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from monarch_kernel.introspection import ask_console, controllers

    found = controllers()
    if options.list:
        print(listed(found) if found else "No process of yours has meshes on this machine.")
        return 0
    try:
        chosen = choose(found, options.pid)
        sock = ask_console(chosen)
    except (LookupError, ConnectionError) as error:
        print(f"monarch-kernel debug: {error.args[0]}", file=sys.stderr)
        return 1
    from monarch_kernel.debugger.terminal.client import TerminalClient

    terminal = TerminalClient(sock, chosen)
    try:
        return terminal.execute(options.command) if options.command else terminal.talk()
    finally:
        terminal.close()


def choose(found: Sequence[Controller], pid: int | None) -> Controller:
    """Return the controller to debug.

    Raises:
        LookupError: there is no such controller, or there are several and no PID was given. The message lists them.
    """
    if pid is not None:
        for controller in found:
            if controller.pid == pid:
                return controller
        others = (
            f"; these processes have:\n{listed(found)}" if found else ", and none of your other processes has meshes"
        )
        raise LookupError(f"process {pid} has no meshes or belongs to another user{others}")
    if not found:
        raise LookupError("none of your processes on this machine has meshes")
    if len(found) > 1:
        raise LookupError(f"several processes have meshes; pass the PID of one:\n{listed(found)}")
    return found[0]


def listed(found: Iterable[Controller]) -> str:
    """Return the controllers as text, one per line."""
    return "\n".join(f"  {controller.pid:>7}  {controller.program[:100]}" for controller in found)
