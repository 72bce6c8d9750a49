"""``monarch-kernel worker``: let controllers of other hosts, or of this one, use this host."""

from __future__ import annotations

import argparse
import json
import os
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from monarch_kernel.runtime.host.worker_start import WorkerStart


def add_worker_command(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``monarch-kernel worker``."""
    parser.add_argument(
        "--listen",
        required=True,
        metavar="URL",
        help="tcp://HOST:PORT, ipc:///PATH, or tcp://ADVERTISED:PORT@tcp://0.0.0.0:PORT if others reach this host by "
        "another address than the one to listen at",
    )
    parser.add_argument(
        "--key-file",
        "--key",
        dest="key_file",
        metavar="FILE|-",
        help="this worker's key, or the team's, made by 'monarch-kernel keys FILE'; -: the first line of standard "
        "input (default: what MONARCH_KERNEL_KEY_FILE names, or ~/.config/monarch_kernel/key, which is made when it is "
        "first needed)",
    )
    parser.add_argument(
        "--key-env",
        default="",
        metavar="NAME",
        help="take the key from this environment variable, which is removed before anything is started",
    )
    parser.add_argument(
        "--env",
        choices=["-"],
        help="read environment variables from the next line of standard input, a JSON object",
    )
    parser.add_argument(
        "--allow",
        metavar="LIST",
        help="the keys that may connect besides this one, a list kept by 'monarch-kernel keys add' and 'revoke' "
        "(default: what MONARCH_KERNEL_ALLOW names, or the file with the key file's name and .allow, if there is one)",
    )
    parser.add_argument(
        "--audit", default="", metavar="FILE", help="also append accepted and refused connections to this file"
    )
    parser.add_argument("--name", default="", help="what this host is called in errors and tables (its host name)")
    parser.add_argument(
        "--idle",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="end after this time without a controller (default: never)",
    )
    parser.add_argument(
        "--walltime",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="the engine ends this worker after this time: it ends its ranks in good order before (default: not known)",
    )
    parser.add_argument(
        "--announce",
        action="append",
        default=[],
        metavar="FILE|-|FD",
        help="write one line of JSON (URL, host, pid, versions, devices; or why it cannot start) to a file, standard "
        "output or a descriptor when it listens",
    )
    parser.add_argument("--log", default="", metavar="FILE", help="append all output to this file, of mode 0600")
    parser.add_argument(
        "--background", action="store_true", help="leave the session that starts it, so that this command returns"
    )
    parser.add_argument("--lifeline", type=int, default=-1, help=argparse.SUPPRESS)
    parser.add_argument("--keep", default="", help=argparse.SUPPRESS)
    parser.add_argument("--lock", type=int, default=-1, help=argparse.SUPPRESS)
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from monarch_kernel.protocol.worker_addresses import worker_address
    from monarch_kernel.runtime.host.worker_exec import exec_worker, report_failure
    from monarch_kernel.runtime.host.worker_start import WorkerStart

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
    try:
        if start.quiet:
            start.announce_to.append(os.dup(1))
            os.dup2(2, 1)
        start = _read_input(options, start)
        if options.log:
            _redirect(_absolute(options.log))
        if worker_address(start.address).listen.startswith("tcp://"):
            if not start.key:
                from monarch_kernel.protocol.keys import load_keys

                load_keys(start.key_file, start.allow)  # reports a mistake before the worker starts
        elif start.allow or start.audit:
            raise ValueError(f"--allow and --audit are for tcp://: only this user can connect to {start.address}")
        if options.background:
            if os.fork():
                os._exit(0)
            os.setsid()
        exec_worker(start)
    except (OSError, ValueError) as e:
        report_failure(start, e)
        return 2


def _absolute(path: str) -> str:
    return os.path.abspath(os.path.expanduser(path))


def _read_input(options: argparse.Namespace, start: WorkerStart) -> WorkerStart:
    """Read what comes by standard input, and take the key from the environment; the options with it."""
    if options.key_file == "-":
        start = start._replace(key_file=None, key=_line("the key"), key_from="standard input")
    if options.env:
        try:
            found: Any = json.loads(_line("the environment"))
            os.environ.update(found)
        except (ValueError, TypeError) as e:
            raise ValueError(f"--env -: the line of standard input is no JSON object of variables: {e}") from None
    if options.key_env:
        start = start._replace(key=os.environ.pop(options.key_env, ""), key_from=f"the variable {options.key_env}")
        if not start.key:
            raise ValueError(f"--key-env: there is no environment variable {options.key_env} with a key")
    if options.key_file == "-" or options.env or options.background:
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
    return start


def _line(what: str) -> str:
    """The next line of standard input, and nothing beyond it."""
    line = b""
    while not line.endswith(b"\n"):
        piece = os.read(0, 1)
        if not piece:
            raise ValueError(f"standard input ended before {what} came")
        line += piece
    return line.decode()


def _redirect(path: str) -> None:
    """Have all output of this process in a file of its user."""
    os.makedirs(os.path.dirname(path), 0o700, exist_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
    for stream in (1, 2):
        os.dup2(fd, stream)
    os.close(fd)
