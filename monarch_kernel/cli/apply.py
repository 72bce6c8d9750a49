"""``monarch-kernel apply``: the hosts of a job that a Python file defines."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import sys
from types import ModuleType
from typing import TYPE_CHECKING

from monarch_kernel.cli.lines import LineError, add_json, guarded

if TYPE_CHECKING:
    from monarch_kernel.job import EngineJob

_NAME = "job"


def add_apply_command(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``monarch-kernel apply``."""
    parser.description = (
        "Asks for the hosts of a job, and waits for them, unless an equal job has them already. A program in this "
        "folder whose state() is of an equal job finds them, and so do exec, shell and notebooks, by the job's id."
    )
    parser.add_argument(
        "spec",
        metavar="MODULE.NAME|FILE[:NAME]",
        help=f"where the job stands, or a function that returns it: jobs.train, jobs.py:train; NAME of a file: {_NAME}",
    )
    parser.add_argument("--script", metavar="FILE", help="run this on the hosts once they are there (batch mode)")
    parser.add_argument("--no-wait", action="store_true", help="return once the engine has taken the request")
    add_json(parser)
    parser.set_defaults(run=guarded(_apply))


def _apply(options: argparse.Namespace) -> int:
    from monarch_kernel.launchers.listing import plain_host

    job = _defined(options.spec)
    new = True
    if options.script is not None:
        try:
            job.apply(options.script)
        except ValueError as e:
            raise LineError(str(e)) from None
        status = job.status()
    else:
        new = job.find_or_apply()
        try:
            status = job.status() if options.no_wait else job.wait()
        except BaseException:
            if new:
                job.kill()
            raise
    if options.json:
        hosts = [plain_host(host) for host in status.hosts]
        print(json.dumps({"job": job.job_id, "engine": job.engine, "new": new, "meshes": job.meshes, "hosts": hosts}))
    else:
        print(f"{status}; the job{'' if new else ', which was there already,'} is {job.job_id}")
    return 0


def _defined(spec: str) -> EngineJob:
    """The job that a line names.

    Raises:
        LineError: there is no such module, file, name or job.
    """
    from monarch_kernel.job import EngineJob, JobTrait

    sys.path.insert(0, os.getcwd())  # as python -m does
    file, _, name = spec.partition(":")
    if file.endswith(".py"):
        module, name = _imported_file(file), name or _NAME
    else:
        where, _, name = spec.replace(":", ".").rpartition(".")
        try:
            module = importlib.import_module(where)
        except (ModuleNotFoundError, ValueError) as e:
            if isinstance(e, ModuleNotFoundError) and e.name != where.partition(".")[0]:
                raise  # the module is there, and what it imports is not
            raise LineError(f"there is no module {where!r}: name a job as MODULE.NAME, or as FILE.py:NAME") from None
    try:
        found = getattr(module, name)
    except AttributeError:
        raise LineError(f"{module.__file__} defines no {name!r}: name the job in it") from None
    if callable(found) and not isinstance(found, type):
        found = found()
    if not isinstance(found, EngineJob):
        said = (
            "is known to its program only, so it cannot be applied here" if isinstance(found, JobTrait) else "is no job"
        )
        raise LineError(f"{spec}, a {type(found).__name__}, {said}: name a job of an engine, such as SlurmJob")
    return found


def _imported_file(path: str) -> ModuleType:
    if not os.path.isfile(path):
        raise LineError(f"there is no file {path}")
    name = os.path.splitext(os.path.basename(path))[0]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
