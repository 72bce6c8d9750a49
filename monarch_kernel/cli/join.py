"""``monarch-kernel join``: list this user's jobs that can be joined, or show how to prepare ranks for joining."""

from __future__ import annotations

import argparse
import json
import sys

import msgspec


def add_join_command(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``monarch-kernel join``."""
    parser.description = (
        "Lists your jobs on this machine that a notebook can join with %%mesh join. After 'join install', all "
        "ranks that this environment's Python runs with MONARCH_KERNEL_JOIN=NAME can be joined, without changing "
        "their program or command."
    )
    parser.add_argument(
        "verb",
        nargs="?",
        choices=tuple(_VERBS),
        default="list",
        help="list the jobs (the default); add a line to this environment, or remove it; run a meeting point; "
        "prepare running processes",
    )
    parser.add_argument(
        "what",
        nargs="?",
        metavar="HOST:PORT|JOB",
        help="with meet: the address that ranks (by MONARCH_KERNEL_JOIN_MEET) and notebooks connect to; HOST may be "
        "*. With prepare: the name of the job of the processes",
    )
    which = parser.add_argument_group("with prepare, processes of Python 3.14 or later").add_mutually_exclusive_group()
    which.add_argument("--pids", metavar="123,456", help="processes of this machine")
    which.add_argument(
        "--torchrun", nargs="?", type=int, const=0, metavar="PID", help="the workers of torchrun (its only job here)"
    )
    which.add_argument("--slurm", metavar="JOB", help="the ranks of a Slurm job, on all its nodes")
    parser.add_argument("--this-node", action="store_true", help=argparse.SUPPRESS)  # what --slurm runs on each node
    parser.add_argument(
        "--meet",
        metavar="HOST:PORT",
        help="with prepare: the address where notebooks of other machines find the processes",
    )
    parser.add_argument(
        "--audit", default="", metavar="FILE", help="with meet: append connections and refusals to this file"
    )
    parser.add_argument(
        "--user", action="store_true", help="with install and uninstall: for all environments of this user"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from monarch_kernel.debugger.outside.processes import OutsideError
    from monarch_kernel.engines.join.announcements import JoinError

    try:
        return _VERBS[options.verb](options)
    except (JoinError, OutsideError, OSError, ValueError) as error:
        print(f"monarch-kernel join: {error}", file=sys.stderr)
        return 1


def _list(options: argparse.Namespace) -> int:
    from monarch_kernel.engines.join.jobs import JoinableList, jobs_of
    from monarch_kernel.engines.join.rank_machines import refreshed

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
    from monarch_kernel.engines.join.join_gateway import serve

    serve(options.what or "", options.audit, lambda url: print(f"Ranks and notebooks meet at {url}", flush=True))
    return 0


def _prepare(options: argparse.Namespace) -> int:
    from monarch_kernel.debugger.outside import slurm
    from monarch_kernel.debugger.outside.outside_report import chosen_here
    from monarch_kernel.debugger.outside.remote_exec import prepare_running

    name, job = options.what or "", options.slurm
    if job is None and options.pids is None and options.torchrun is None:
        raise ValueError("prepare needs processes: --pids 123,456, --torchrun [PID] or --slurm JOB")
    if job is not None and not options.this_node:
        notes = slurm.prepare_job(name, job)
        print("\n".join([*notes, f"%mesh join {name} --slurm {job} joins them"]))
        return 1 if notes else 0
    chosen = slurm.ranks_here(job) if job is not None else chosen_here(options.pids, options.torchrun)
    done = prepare_running(name, chosen, **({"meet": options.meet} if options.meet else {}))
    if options.json:
        print(json.dumps(msgspec.to_builtins(done)))
        return 0
    count = len(done.prepared)
    lines = [f"{count} process{'es' * (count != 1)} can be joined: %mesh join {name}"] if count else []
    print("\n".join([*done.refused, *lines]))
    return 1 if done.refused else 0


_VERBS = {"list": _list, "install": _install, "uninstall": _uninstall, "meet": _meet, "prepare": _prepare}
