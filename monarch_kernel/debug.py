"""The mesh debugger in Python. Notebooks use ``%mesh stacks``, ``diff``, ``break``, ``debug``, ``pm`` and ``hang``.

* ``stacks(mesh)``: the Python stacks of all ranks, merged.
* ``diff(mesh, EXPR)``, ``pull(mesh, EXPR, rank=)``: values across ranks.
* ``hang(mesh)``: why a mesh makes no progress.
* ``stragglers(mesh)``: which ranks reach collectives late, and at which lines.
* ``load(report)``: opens a report on a job (``monarch-kernel report``) without the job.
* ``get_debugger()``: breakpoints and stopped ranks.
* ``select(mesh)``: the stopped ranks of a mesh, which step together.

This module only exports names; ``monarch_kernel.debugger`` has the code.
"""

from monarch_kernel.debugger import existing_debugger, get_debugger, select
from monarch_kernel.debugger.controller.hang import hang
from monarch_kernel.debugger.controller.hub import MeshDebugger
from monarch_kernel.debugger.controller.query import Answers, ask
from monarch_kernel.debugger.controller.sets import Moved, StopGroup, StopSet
from monarch_kernel.debugger.controller.stacks import Stacks, stacks
from monarch_kernel.debugger.controller.stragglers import StragglerReport, stragglers
from monarch_kernel.debugger.controller.values import Diff, diff, pull
from monarch_kernel.debugger.controller.viewers import DriverError, Viewer
from monarch_kernel.debugger.events import (
    BreakpointsChanged,
    MeshBreakpoint,
    RankGone,
    RankRanOff,
    RankResumed,
    RankStop,
    RankStopped,
)
from monarch_kernel.debugger.reports.job_report import JobReport, ReportError, load

#: Former name of `StopGroup`.
Group = StopGroup

__all__ = [
    "Answers",
    "BreakpointsChanged",
    "Diff",
    "DriverError",
    "Group",
    "JobReport",
    "MeshBreakpoint",
    "MeshDebugger",
    "Moved",
    "RankGone",
    "RankRanOff",
    "RankResumed",
    "RankStop",
    "RankStopped",
    "ReportError",
    "Stacks",
    "StopGroup",
    "StopSet",
    "StragglerReport",
    "Viewer",
    "ask",
    "diff",
    "existing_debugger",
    "get_debugger",
    "hang",
    "load",
    "pull",
    "select",
    "stacks",
    "stragglers",
]
