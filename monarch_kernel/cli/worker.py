"""``monarch-kernel worker``: let controllers of other hosts, or of this one, use this host."""

from __future__ import annotations

import argparse
import os


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
        metavar="FILE",
        help="this worker's key, or the team's, made by 'monarch-kernel keys FILE' (default: what "
        "MONARCH_KERNEL_KEY_FILE names, or ~/.config/monarch_kernel/key, which is made when it is first needed)",
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
    parser.add_argument("--lifeline", type=int, default=-1, help=argparse.SUPPRESS)
    parser.add_argument("--keep", default="", help=argparse.SUPPRESS)
    parser.add_argument("--ready", type=int, default=-1, help=argparse.SUPPRESS)
    parser.add_argument("--lock", type=int, default=-1, help=argparse.SUPPRESS)
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from monarch_kernel.protocol.worker_addresses import worker_address
    from monarch_kernel.runtime.host.worker_main import exec_worker, report_failure

    try:
        if worker_address(options.listen).listen.startswith("tcp://"):
            from monarch_kernel.protocol.keys import load_keys

            load_keys(options.key_file, options.allow)  # reports a mistake before the worker starts
        elif options.allow or options.audit:
            raise ValueError(f"--allow and --audit are for tcp://: only this user can connect to {options.listen}")
        if options.ready >= 0 and os.fork():  # the starting process needs a worker that is not its child
            os._exit(0)
        exec_worker(
            options.listen,
            options.key_file,
            options.name,
            options.lifeline,
            options.keep,
            options.idle,
            options.ready,
            options.lock,
            options.allow,
            options.audit and os.path.abspath(os.path.expanduser(options.audit)),
        )
    except (OSError, ValueError) as e:
        report_failure(options.ready, e)
        return 2
