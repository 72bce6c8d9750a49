"""The command line: ``python -m workspace_sync sync --host tcp://node1:26600 ~/project``.

Exit codes: 0, all hosts have the requested content; 1, some hosts do not, or damage was found; 2, nothing was done,
because the command, a folder or a key is wrong; 130, Ctrl-C.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from monarch_kernel.actor import attach_to_workers, shutdown_context, this_host
from monarch_kernel.display.quantities import duration, text_size
from monarch_kernel.display.tables import TableView, only_colours_printed, table_text, without_controls
from workspace_sync import session
from workspace_sync.model.errors import ScanError, SyncError
from workspace_sync.model.sync_report import SyncProgress, SyncReport
from workspace_sync.model.workspace import CondaEnvironment, Workspace
from workspace_sync.receipt import DIGITS, forgotten_table, kept_text, progress_line, receipt_table, trees_table
from workspace_sync.reload.file_events import SyncEvent, watch
from workspace_sync.reload.live import rollback, sync
from workspace_sync.transfer.messages import Collected, HostState

#: Progress is shown only for work that takes longer (seconds).
_SOON = 1.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: the arguments; by default those of the process.

    Returns:
        The exit status.
    """
    options = _parser().parse_args(argv)
    with only_colours_printed():
        return _run(options)


def _run(options: argparse.Namespace) -> int:
    try:
        return int(options.run(options))
    except SyncError as e:
        report = e.report
        if isinstance(report, SyncReport) and (options.json or not all(host.error for host in report.hosts)):
            _show(report, options)
        print(e, file=sys.stderr)
        return 2 if isinstance(e, ScanError) else 1
    except (ValueError, TypeError, OSError) as e:
        print(e, file=sys.stderr)
        return 2
    except KeyboardInterrupt as e:
        print("interrupted;", *getattr(e, "__notes__", ["the hosts keep the trees that they have"]), file=sys.stderr)
        return 130
    finally:
        shutdown_context()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m workspace_sync",
        description="The content of folders, and of an environment, on every host: verified, and switched at once.",
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument(
        "--host",
        action="append",
        default=[],
        metavar="URL",
        help="a worker (monarch-kernel worker), as tcp://node1:26600; several times for several (default: this host)",
    )
    common.add_argument("--key-file", metavar="FILE", help="the key that the workers trust")
    common.add_argument("--timeout", type=float, default=30.0, metavar="SECONDS", help="for connecting (30)")
    common.add_argument("--json", action="store_true", help="print the report as JSON")
    about = argparse.ArgumentParser(add_help=False, parents=[common])
    about.add_argument("dirs", nargs="*", metavar="DIR", help="folders of the workspace (default: the current one)")
    about.add_argument("--env", nargs="?", const="", metavar="PREFIX", help="and an environment (default: this one)")
    about.add_argument("--with-python", action="store_true", help="... with the Python that a venv was made from")
    about.add_argument(
        "--from-lock",
        metavar="FILE",
        help="... of which hosts make what they can themselves, from this lock file and their package caches",
    )
    about.add_argument(
        "--links",
        choices=("refuse", "follow", "keep"),
        default="refuse",
        help="symbolic links that lead out of the workspace (refuse)",
    )

    def add(
        name: str, run: Callable[[argparse.Namespace], int], text: str, base: argparse.ArgumentParser
    ) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.", parents=[base])
        command.set_defaults(run=run)
        return command

    syncing = add("sync", _sync, "bring hosts to what the workspace holds now", about)
    syncing.add_argument("--dry-run", action="store_true", help="only show what would be sent and deleted")
    syncing.add_argument(
        "--verify", action="store_true", help="hash all files on the hosts first, and mend damaged ones"
    )
    syncing.add_argument("--watch", action="store_true", help="and again at every save, until Ctrl-C")
    add("status", _status, "say which trees hosts have", about)
    add("verify", _verify, "hash all files of the workspace on the hosts", about)
    back = add("rollback", _rollback, "go back to an earlier tree, which hosts still have", about)
    back.add_argument("--steps", type=int, default=1, help="how many trees to go back (1)")
    back.add_argument("--to", default="", metavar="TREE", help="... or the tree to go to, as --list shows it")
    back.add_argument("--list", action="store_true", help="only show the trees that hosts have")
    collecting = add("collect", _collect, "remove old content that no tree needs from hosts", common)
    collecting.add_argument(
        "--kept", action="store_true", help="also files of ranks that were in the way of a tree, for good"
    )
    collecting.add_argument("--limit", type=int, metavar="BYTES", help="how much old content may stay")
    forgetting = add(
        "forget", _forget, "remove a workspace from hosts: its trees, and the way back to earlier ones", about
    )
    forgetting.add_argument("--dry-run", action="store_true", help="only list them")
    forgetting.add_argument("--kept", action="store_true", help="also files that ranks have made, for good")
    return parser


# -- commands ---------------------------------------------------------------------------------------


def _sync(options: argparse.Namespace) -> int:
    if options.watch:
        return _watch(options)
    with _Bar() as bar:
        report = sync(
            _hosts(options), _workspace(options), dry_run=options.dry_run, verify=options.verify, progress=bar
        )
    _show(report, options)
    return 0


def _watch(options: argparse.Namespace) -> int:
    """Sync at every save, until Ctrl-C."""

    def tell(event: SyncEvent) -> None:
        print(_json(event) if options.json else f"{time.strftime('%H:%M:%S')} {event.text}", flush=True)

    with watch(_hosts(options), _workspace(options), on_event=tell, how=None) as watcher:
        try:
            watcher.wait()
        except KeyboardInterrupt:
            return 130
    return 2  # the watcher has reported why it cannot continue


def _rollback(options: argparse.Namespace) -> int:
    if options.list:
        states = session.status(_hosts(options), _workspace(options))
        _print(states, options, lambda: trees_table(states, time.time()))
        return 0
    with _Bar() as bar:
        report = rollback(_hosts(options), _workspace(options), steps=options.steps, tree=options.to, progress=bar)
    _show(report, options)
    return 0


def _verify(options: argparse.Namespace) -> int:
    with _Bar() as bar:
        report = session.verify(_hosts(options), _workspace(options), progress=bar)
    _show(report, options)
    return 1 if any(host.problems for host in report.hosts) else 0


def _status(options: argparse.Namespace) -> int:
    states = session.status(_hosts(options), _workspace(options))
    _print(states, options, lambda: _state_table(states))
    return 0


def _collect(options: argparse.Namespace) -> int:
    found = session.collect(_hosts(options), limit=options.limit, kept=options.kept)
    _print(found, options, lambda: _collected_table(found))
    return 1 if any(each.error for each in found) else 0


def _forget(options: argparse.Namespace) -> int:
    found = session.forget(_hosts(options), _workspace(options), kept=options.kept, dry_run=options.dry_run)
    _print(found, options, lambda: forgotten_table(found, "forget --kept"))
    return 0


# -- arguments -------------------------------------------------------------------------------------


def _hosts(options: argparse.Namespace) -> Any:
    if not options.host:
        return this_host()
    return attach_to_workers(workers=options.host, key_file=options.key_file, timeout=options.timeout)


def _workspace(options: argparse.Namespace) -> Workspace:
    if options.with_python and options.env is None:
        raise ValueError("--with-python is about the Python of an environment: give --env, too")
    if options.from_lock is not None and options.env is None:
        raise ValueError("--from-lock is about making an environment: give --env, too")
    env = None
    if options.env is not None:
        env = CondaEnvironment(options.env or None, with_python=options.with_python, lock=options.from_lock)
    return Workspace(options.dirs or ["."], env, links=options.links)


# -- output -----------------------------------------------------------------------------------------


def _show(report: SyncReport, options: argparse.Namespace) -> None:
    _print(report, options, lambda: receipt_table(report))
    for note in report.notes if not options.json else ():
        print(f"note: {note}")


def _print(what: object, options: argparse.Namespace, table: Callable[[], TableView]) -> None:
    print(_json(what) if options.json else table_text(table()))


def _json(what: object) -> str:
    return msgspec.json.encode(_plain(what)).decode()


def _plain(what: object) -> Any:
    """Convert structs to dicts of their fields, and bytes to hexadecimal digits."""
    if isinstance(what, msgspec.Struct):
        return {name: _plain(getattr(what, name)) for name in what.__struct_fields__}
    if isinstance(what, dict):
        return {key: _plain(value) for key, value in what.items()}
    if isinstance(what, list | tuple):
        return [_plain(each) for each in what]
    return what.hex() if isinstance(what, bytes) else what


def _state_table(states: Sequence[HostState]) -> TableView:
    rows: list[list[str]] = []
    for state in states:
        digests = [part.digest.hex()[:DIGITS] for part in state.parts.values()]
        since = max((each.time for each in state.generations if each.number == state.generation), default=0.0)
        age = f"{duration(time.time() - since)} ago" if since else ""
        earlier = sum(each.number < state.generation for each in state.generations)
        rows.append(
            [
                state.host,
                " ".join(digests) or "none",
                age,
                str(earlier),
                state.path,
                kept_text(state.kept_files, state.kept_bytes),
                "; ".join(filter(None, [state.repair, state.left])),
            ]
        )
    headings = ["host", "tree", "switched", "earlier", "folder", "kept", ""]
    kept = any(state.kept_files for state in states)
    note = "kept, as they were in the way of a tree, in the folder kept: collect --kept removes them for good" * kept
    return TableView(headings, rows, right=(3,), note=note).without_empty_columns()


def _collected_table(found: Sequence[Collected]) -> TableView:
    rows = [
        [
            each.host,
            text_size(each.freed + each.removed_bytes),
            text_size(each.left),
            kept_text(each.kept_files, each.kept_bytes),
            each.error,
        ]
        for each in found
    ]
    kept = any(each.kept_files for each in found)
    note = "kept, as they were in the way of a tree, in the folders kept: collect --kept removes them for good" * kept
    return TableView(["host", "removed", "left", "kept", ""], rows, right=(1, 2), note=note).without_empty_columns()


class _Bar:
    """Progress bar on the terminal for work that takes over a second; notes are printed and remain."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._status: Any = None
        self._terminal = sys.stderr.isatty()

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()

    def __call__(self, progress: SyncProgress) -> None:
        if progress.note:
            print(progress.note, file=sys.stderr)
            return
        if not self._terminal or time.monotonic() - self._began < _SOON:
            return
        if self._status is None:
            from rich.console import Console  # takes 30 ms to import
            from rich.status import Status

            self._status = Status("", console=Console(file=sys.__stderr__))
            self._status.start()
        self._status.update(without_controls(progress_line(progress)))


if __name__ == "__main__":
    sys.exit(main())
