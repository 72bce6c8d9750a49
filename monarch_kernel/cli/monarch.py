"""``monarch``: the commands of Monarch's documentation, for the job of the working folder.

They are commands of ``monarch-kernel`` with Monarch's options. If torchmonarch is installed, ``monarch`` runs
torchmonarch's program instead.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import TYPE_CHECKING

from monarch_kernel.cli.lines import LineError, add_environment, add_per_host, guarded, sizes

if TYPE_CHECKING:
    from monarch_kernel.launchers.services import QueryEngineClient

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command, or torchmonarch's program if it is installed.

    Args:
        argv: the arguments; by default the arguments of the process.

    Returns:
        The exit status.
    """
    for theirs in metadata.entry_points(group="console_scripts", name="monarch"):
        if theirs.dist is not None and theirs.dist.name == "torchmonarch" and argv is None:
            return int(theirs.load()() or 0)
    options = get_parser().parse_args(argv)
    return int(guarded(_explained(options.run))(options))


def get_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands; each command sets ``run``."""
    parser = argparse.ArgumentParser(prog="monarch", description="Monarch's commands, implemented by monarch_kernel.")
    commands = parser.add_subparsers(title="COMMANDS", required=True)

    def add(name: str, text: str, run: Callable[[argparse.Namespace], int]) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=text, description=text)
        made.set_defaults(run=run)
        return made

    contexts = add("context", "Manage job contexts", _listed).add_subparsers(title="CONTEXT COMMANDS", required=True)
    for name, text in (
        ("create", "Create a new context"),
        ("use", "Make a context the active one"),
        ("rm", "Remove a context (kills its job)"),
        ("ls", "List contexts"),
    ):
        made = contexts.add_parser(name, help=text)
        made.set_defaults(run=_listed, change=name)
        if name != "ls":
            made.add_argument("name", help="name of the context")

    made = add("apply", "Provision workers from a job object (e.g. myjob.job)", _apply)
    made.add_argument("module_path", nargs="?", help="module path of the job (default: the job applied last)")

    made = add("exec", "Run a command on workers", _exec)
    where = made.add_mutually_exclusive_group()
    where.add_argument("--all", action="store_true", help="on all hosts of all meshes; each line starts with its rank")
    where.add_argument("--mesh", metavar="NAME", help="on all hosts of this mesh")
    where.add_argument("--one", action="store_true", help="on the first host of the first mesh (the default)")
    where.add_argument("--point", metavar="DIM=N,DIM=N", help="at these coordinates of the first mesh")
    add_per_host(made, "so many processes on each host along this dimension")
    add_environment(made)
    made.add_argument("--script", metavar="SCRIPT", help="run this bash script ('-': standard input)")
    made.add_argument("-m", dest="module", metavar="MODULE", help="run a Python module")
    made.add_argument("cmd", nargs=argparse.REMAINDER, help="command to run on workers")

    made = add("shell", "Open an interactive shell on one worker", _shell)
    made.add_argument("--mesh", metavar="NAME", help="on this mesh (default: the first one)")
    made.add_argument("--point", metavar="DIM=N,DIM=N", help="at this coordinate (default: the first host)")
    add_environment(made)

    add("kill", "Kill the active job", _kill).add_argument("name", nargs="?", help="context of the job")

    made = add("query", "Run SQL against the telemetry of the active job", _query)
    made.add_argument("sql", nargs="?", help="the query, or '-' for standard input")
    made.add_argument("-f", "--file", metavar="SQL_FILE", help="read the query from a file")
    made.add_argument("--format", choices=("table", "json", "jsonl"), default="table", help="output format")
    made.add_argument("--timeout", type=_seconds, default=10.0, help="time limit, such as 30s or 2m (10s)")

    made = add("profile", "Collect a Perfetto trace from the active job", _profile)
    made.add_argument("source", nargs="?", help="the URL of an admin server (default: the active job's)")
    made.add_argument("--time", type=_seconds, default=10.0, metavar="DURATION", help="duration of the trace (10s)")
    made.add_argument("-o", "--output", help="output file or folder")

    made = add("tui", "Inspect a Monarch mesh in a terminal", _tui)
    made.add_argument("-a", "--addr", required=True, help="the URL of an admin server")
    made.add_argument("--refresh-ms", type=int, default=2000, help="interval in milliseconds (2000)")

    made = add("debug", "Open the debugger of a program that runs on this machine", _debug)
    made.add_argument("--host", default="localhost", help="this machine")
    made.add_argument(
        "--port", type=int, help="accepted for compatibility with Monarch; not needed to find the program"
    )

    add("dashboard", "Print the address of the active job's page", _dashboard)
    return parser


def _explained(run: Callable[[argparse.Namespace], int]) -> Callable[[argparse.Namespace], int]:
    """Convert errors to messages that explain what is wrong on the command line."""

    def call(options: argparse.Namespace) -> int:
        try:
            return run(options)
        except ValueError as error:
            raise LineError(str(error)) from None

    return call


def _seconds(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s|m|h)?", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no time: write 30s or 2m")
    return float(match[1]) * _UNITS[match[2] or "s"]


def _listed(options: argparse.Namespace) -> int:
    from monarch_kernel.launchers import current_job as contexts

    if options.change == "ls":
        for name in contexts.names():
            print(f"{'*' if name == contexts.active() else ' '} {name}")
    else:
        change, done = {
            "create": (contexts.create, "Created"),
            "use": (contexts.use, "Switched to"),
            "rm": (contexts.remove, "Removed"),
        }[options.change]
        change(options.name)
        print(f"{done} context {options.name!r}")
    return 0


def _apply(options: argparse.Namespace) -> int:
    from monarch_kernel.launchers.current_job import apply_current_job

    job = apply_current_job(options.module_path)
    print(f"{job.status()}; the job is {job.job_id}")
    return 0


def _exec(options: argparse.Namespace) -> int:
    from monarch_kernel.cli.exec import run_exec
    from monarch_kernel.launchers.current_job import apply_current_job

    job = apply_current_job()  # activates the job if it is not active, like Monarch
    one = not (options.all or options.mesh or options.point)
    codes: list[int] = []
    meshes = list(job.meshes) if options.all else [options.mesh]
    for mesh in meshes:
        line = argparse.Namespace(
            **{**vars(options), "mesh": mesh, "one": one, "point": [options.point] if options.point else []},
            job=job.job_id,
            host=None,
            command=options.cmd,
            fold=False,
            json=False,
        )
        line.kill = options.kill and mesh == meshes[-1]
        codes.append(run_exec(line))
    return max(codes)


def _shell(options: argparse.Namespace) -> int:
    from monarch_kernel.cli.exec import run_shell_line
    from monarch_kernel.launchers.current_job import apply_current_job

    at = sizes("--point", [options.point]) if options.point else {}
    if at.keys() - {"hosts", "host"}:
        raise LineError(f"a shell needs one host: --point hosts=0, not {options.point}")
    host = next(iter(at.values()), 0)
    return run_shell_line(argparse.Namespace(**vars(options), job=apply_current_job().job_id, host=host))


def _kill(options: argparse.Namespace) -> int:
    from monarch_kernel.launchers.current_job import end

    end(options.name)
    return 0


def _client() -> QueryEngineClient:
    from monarch_kernel.launchers.current_job import applied_job

    return applied_job().telemetry_query_client()


def _query(options: argparse.Namespace) -> int:
    from monarch_kernel.display.tables import TableView, table_text

    if (options.sql is None) == (options.file is None):
        raise LineError("pass a query, '-' for standard input, or --file")
    if options.file is not None:
        with open(options.file) as file:
            sql = file.read()
    else:
        sql = sys.stdin.read() if options.sql == "-" else options.sql
    rows = _client().query(sql, options.timeout)["rows"]
    if options.format == "json":
        print(json.dumps(rows, indent=2))
    elif options.format == "jsonl":
        for row in rows:
            print(json.dumps(row))
    elif rows:
        print(table_text(TableView(list(rows[0]), [[str(value) for value in row.values()] for row in rows])))
    else:
        print("(no rows)")
    return 0


def _profile(options: argparse.Namespace) -> int:
    from monarch_kernel.launchers.services import QueryEngineClient
    from monarch_kernel.private_files import write_own_file
    from monarch_kernel.watch.tracing import trace_path

    client = _client() if options.source is None else QueryEngineClient(options.source.rstrip("/"))
    found = client.profile(options.time)
    path = trace_path(options.output, ".json.gz")
    write_own_file(str(path), found)
    print(f"{path}: open it in https://ui.perfetto.dev")
    return 0


def _tui(options: argparse.Namespace) -> int:
    from monarch_kernel.launchers.services import QueryEngineClient

    client = QueryEngineClient(options.addr.rstrip("/"))
    while True:
        tree = client.tree()
        print(f"\033[2J\033[H{tree}" if sys.stdout.isatty() else tree, end="", flush=True)
        if not sys.stdout.isatty():
            return 0
        time.sleep(options.refresh_ms / 1000)


def _debug(options: argparse.Namespace) -> int:
    from monarch_kernel.__main__ import main as ours

    if options.host not in ("localhost", "127.0.0.1", "::1"):
        raise LineError(f"the debugger must run on the machine of the program: run this command on {options.host}")
    return ours(["debug"])


def _dashboard(options: argparse.Namespace) -> int:
    print(_client().base_url)
    return 0
