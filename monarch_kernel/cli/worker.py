"""``monarch-kernel worker``: make this host available to controllers on this or other hosts."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

if TYPE_CHECKING:
    import argparse

    from monarch_kernel.runtime.host.worker_start import RunDir, WorkerStart


class _Option(NamedTuple):
    """An option of the command.

    Attributes:
        names: its names; the last one, without dashes, is the name of its field.
        kind: converts a word to the value; bool: the option takes no value.
        default: the value if the option is missing; a list: the option may be repeated.
        metavar: the name of the value in the help.
        help: the help text; "": only processes of this package use the option.
    """

    names: tuple[str, ...]
    kind: Callable[[str], Any]
    default: Any
    metavar: str
    help: str


_OPTIONS = (
    _Option(
        ("--listen",),
        str,
        None,
        "URL",
        "tcp://HOST:PORT, ipc:///PATH, or tcp://ADVERTISED:PORT@tcp://0.0.0.0:PORT if other hosts reach this host "
        "at another address than the one to listen on",
    ),
    _Option(
        ("--key", "--key-file"),
        str,
        None,
        "FILE|-",
        "this worker's key, or the team's, made by 'monarch-kernel keys FILE'; -: the first line of standard "
        "input (default: the file in MONARCH_KERNEL_KEY_FILE, or ~/.config/monarch_kernel/key, created when it is "
        "first needed)",
    ),
    _Option(
        ("--key-env",),
        str,
        "",
        "NAME",
        "take the key from this environment variable, which is removed before any process is started",
    ),
    _Option(
        ("--env",), str, None, "-", "read environment variables from the next line of standard input, a JSON object"
    ),
    _Option(
        ("--allow",),
        str,
        None,
        "LIST",
        "the keys that may connect besides this one, a list kept by 'monarch-kernel keys add' and 'revoke' "
        "(default: the list in MONARCH_KERNEL_ALLOW, or the file with the key file's name and .allow, if there is one)",
    ),
    _Option(("--audit",), str, "", "FILE", "also append accepted and refused connections to this file"),
    _Option(("--name",), str, "", "NAME", "name of this host in errors and tables (default: its host name)"),
    _Option(("--idle",), float, 0.0, "SECONDS", "end after this time without a controller (default: never)"),
    _Option(
        ("--walltime",),
        float,
        0.0,
        "SECONDS",
        "the provider ends this worker after this time; the worker ends its ranks cleanly before (default: unknown)",
    ),
    _Option(
        ("--announce",),
        str,
        [],
        "FILE|-|FD",
        "write one line of JSON (URL, host, pid, versions, devices; or why it cannot start) to a file, standard "
        "output or a descriptor when it listens",
    ),
    _Option(("--log",), str, "", "FILE", "append all output to this file, of mode 0600"),
    _Option(("--background",), bool, False, "", "run in a new session in the background, so that this command returns"),
    _Option(("--lifeline",), int, -1, "FD", ""),
    _Option(("--keep",), str, "", "FOLDER", ""),
    _Option(("--lock",), int, -1, "FD", ""),
)


def add_worker_command(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``monarch-kernel worker``."""
    from argparse import SUPPRESS

    for option in _OPTIONS:
        more: dict[str, Any] = {"default": option.default, "help": option.help or SUPPRESS}
        if option.kind is bool:
            more["action"] = "store_true"
        else:
            more |= {"metavar": option.metavar, "type": option.kind}
            more |= {"action": "append"} if option.default == [] else {}
        more |= {"required": True} if option.names == ("--listen",) else {}
        more |= {"choices": ["-"]} if option.names == ("--env",) else {}
        parser.add_argument(*option.names, dest=_field(option), **more)
    parser.set_defaults(run=_run)


def run_plain(words: Sequence[str]) -> int | None:
    """Run the command without ``argparse`` if the words have the form that launchers use.

    In that form, option names are not abbreviated and each value is a separate word. Importing ``argparse`` would take
    longer than everything else that this process does before hosts can be used.

    Returns:
        The exit status; None: the command was not run, and the caller must parse the words with ``argparse``.
    """
    known = {name: option for option in _OPTIONS for name in option.names}
    given: dict[str, Any] = {_field(option): option.default for option in _OPTIONS} | {"announce": []}
    rest = iter(words)
    try:
        for word in rest:
            option = known[word]
            if option.kind is bool:
                given[_field(option)] = True
                continue
            value = next(rest)
            if value.startswith("-") and value != "-":
                return None
            if option.default == []:
                given[_field(option)].append(value)
            else:
                given[_field(option)] = option.kind(value)
    except (KeyError, StopIteration, ValueError):
        return None
    if given["listen"] is None or given["env"] not in (None, "-"):
        return None
    return _run(SimpleNamespace(**given))


def _field(option: _Option) -> str:
    return option.names[-1].removeprefix("--").replace("-", "_")


def _run(options: argparse.Namespace | SimpleNamespace) -> int:
    from monarch_kernel.protocol.worker_addresses import worker_address
    from monarch_kernel.runtime.host.worker_start import WorkerStart, exec_worker, marked_run, report_failure

    start = WorkerStart(
        address=options.listen,
        name=options.name,
        key_file=options.key_file,
        allow=options.allow,
        audit=options.audit and _absolute(options.audit),
        lifeline=options.lifeline,
        keep=options.keep,
        idle=options.idle,
        ends_at=time.time() + options.walltime if options.walltime > 0 else 0.0,
        announce_in=[_absolute(path) for path in options.announce if path != "-" and not path.isdigit()],
        announce_to=[int(fd) for fd in options.announce if fd.isdigit()],
        quiet="-" in options.announce,
        folder_lock=options.lock,
    )
    first = _leave_session() if options.background else -1
    try:
        if start.quiet:
            start.announce_to.append(os.dup(1))
            os.dup2(2, 1)
        if (run_dir := marked_run() if _may_stay(options) else None) is not None:
            _become_worker(options, start, run_dir, first)
        start = _read_input(options, start)
        if options.log:
            _redirect(_absolute(options.log))
        if worker_address(start.address).listen.startswith("tcp://"):
            if not start.key:
                from monarch_kernel.protocol.keys import load_keys

                load_keys(start.key_file, start.allow)  # reports a mistake before the worker starts
        elif start.allow or start.audit:
            raise ValueError(f"--allow and --audit are for tcp://: only this user can connect to {start.address}")
        _end_first(first, 0)
        first = -1
        exec_worker(start)
    except (OSError, ValueError) as e:
        report_failure(start, e)
        _end_first(first, 2)
        return 2


def _may_stay(options: argparse.Namespace | SimpleNamespace) -> bool:
    """Return whether this process can become the worker without an exec.

    It can if it needs no variables that an interpreter reads at startup, its environment never contained a key, and its
    key, if any, arrives on standard input.
    """
    if options.env or options.key_env or options.keep or options.allow or options.audit:
        return False
    return options.key_file == "-" or options.listen.startswith("ipc://")


def _become_worker(
    options: argparse.Namespace | SimpleNamespace, start: WorkerStart, run_dir: RunDir, first: int
) -> NoReturn:
    """Become the worker in the same interpreter."""
    from monarch_kernel.runtime.host.worker_main import start_here

    if options.log:
        _redirect(_absolute(options.log))

    def complete() -> WorkerStart:
        found = _read_input(options, start)
        _end_first(first, 0)
        return found

    start_here(start, run_dir, complete, first)


def _leave_session() -> int:
    """Continue in a forked child that leads a new session. Return the descriptor for ``_end_first``."""
    status, tell = os.pipe()
    if os.fork():
        os.close(tell)
        os._exit((os.read(status, 1) or b"\1")[0])
    os.close(status)
    os.setsid()
    return tell


def _end_first(tell: int, status: int) -> None:
    """Make the original process exit if this is its child. Call this last: standard input may end with that process."""
    if tell >= 0:
        with contextlib.suppress(OSError):  # it was killed
            os.write(tell, bytes([status]))
        os.close(tell)


def _absolute(path: str) -> str:
    return os.path.abspath(os.path.expanduser(path))


def _read_input(options: argparse.Namespace | SimpleNamespace, start: WorkerStart) -> WorkerStart:
    """Return the start parameters with the key and variables from standard input or the environment."""
    if options.key_file == "-":
        start = start._replace(key_file=None, key=_line("the key"), key_from="standard input")
    if options.env:
        try:
            os.environ.update(_variables(_line("the environment")))
        except (ValueError, TypeError) as e:
            raise ValueError(f"--env -: the line on standard input is not a JSON object of variables: {e}") from None
    if options.key_env:
        start = start._replace(key=os.environ.pop(options.key_env, ""), key_from=f"the variable {options.key_env}")
        if not start.key:
            raise ValueError(f"--key-env: there is no environment variable {options.key_env} with a key")
    if options.key_file == "-" or options.env or options.background:
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
    return start


def _variables(line: str) -> dict[str, str]:
    if line.strip() == "{}":
        return {}
    import json

    return json.loads(line)


def _line(what: str) -> str:
    """Read one line from standard input, and no byte beyond it."""
    line = b""
    while not line.endswith(b"\n"):
        piece = os.read(0, 1)
        if not piece:
            raise ValueError(f"standard input ended before {what} arrived")
        line += piece
    return line.decode()


def _redirect(path: str) -> None:
    """Redirect standard output and standard error to a file of mode 0600."""
    os.makedirs(os.path.dirname(path), 0o700, exist_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
    for stream in (1, 2):
        os.dup2(fd, stream)
    os.close(fd)
