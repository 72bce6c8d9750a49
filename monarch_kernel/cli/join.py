"""``monarch-kernel join``: which jobs of this user can be joined, and how their ranks can be prepared."""

from __future__ import annotations

import argparse
import json
import sys


def add_join_command(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``monarch-kernel join``."""
    parser.description = (
        "Lists the jobs of yours on this machine that a notebook can join with %%mesh join. After 'join install', all "
        "ranks that this environment's Python runs with MONARCH_KERNEL_JOIN=NAME can be joined, without a change of "
        "their program or command."
    )
    parser.add_argument(
        "verb",
        nargs="?",
        choices=("list", "install", "uninstall", "meet"),
        default="list",
        help="list the jobs (the default); write a line into this environment, or remove it; be a meeting point",
    )
    parser.add_argument(
        "address",
        nargs="?",
        metavar="HOST:PORT",
        help="with meet: where ranks with this address in MONARCH_KERNEL_JOIN_MEET, and notebooks, come; HOST may be *",
    )
    parser.add_argument("--audit", default="", metavar="FILE", help="with meet: append connections and refusals to it")
    parser.add_argument("--user", action="store_true", help="with install and uninstall: for this user, not here only")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from monarch_kernel.engines.join.announcements import JoinError

    try:
        return {"list": _list, "install": _install, "uninstall": _uninstall, "meet": _meet}[options.verb](options)
    except (JoinError, OSError, ValueError) as error:
        print(f"monarch-kernel join: {error}", file=sys.stderr)
        return 1


def _list(options: argparse.Namespace) -> int:
    from monarch_kernel.engines.join.jobs import jobs_of
    from monarch_kernel.engines.join.listing import JoinableList
    from monarch_kernel.engines.join.places import refreshed

    found = JoinableList(jobs_of(refreshed()))
    if options.json:
        print(json.dumps(found.plain()))
    else:
        print(found if found.jobs else "There is no job to join.")
    return 0


def _install(options: argparse.Namespace) -> int:
    from monarch_kernel.engines.join.install import install

    print(f"Wrote {install(options.user)}: programs with MONARCH_KERNEL_JOIN=NAME can be joined as NAME")
    return 0


def _uninstall(options: argparse.Namespace) -> int:
    from monarch_kernel.engines.join.install import uninstall

    found = uninstall(options.user)
    print(f"Removed {found}" if found is not None else "Nothing was installed")
    return 0


def _meet(options: argparse.Namespace) -> int:
    from monarch_kernel.engines.join.meeting_point import serve

    serve(options.address or "", options.audit, lambda url: print(f"Ranks and notebooks meet at {url}", flush=True))
    return 0
