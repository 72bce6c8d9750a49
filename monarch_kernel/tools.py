"""What tools need that look into other people's meshes: a debugger, a profiler.

``whole_of`` finds the proc mesh that something is on; ``failures`` are the exceptions that ended endpoints and cells of
this process, kept for a while with their frames; ``endpoints_here`` are those that run in this process, and
``stacks_from_outside`` has host agents read the stacks of ranks that cannot tell them. ``controllers`` are those of
this user that run on this machine, and ``ask_console`` connects to the debugger's console in one.
"""

from monarch_kernel.protocol.messages import StackRead
from monarch_kernel.runtime.actor.activity import Running, endpoints_here, stacks_from_outside
from monarch_kernel.runtime.actor.door import Controller, ask_console, call_in_wait, controllers
from monarch_kernel.runtime.actor.inspecting import (
    Whole,
    actors_here,
    failures,
    home,
    hosts_of,
    keep_failure,
    on_failure,
    running_here,
    whole_of,
)
from monarch_kernel.runtime.actor.pending import Awaited, awaited_by, proc_here
from monarch_kernel.runtime.actor.postmortem import Failure

__all__ = [
    "Awaited",
    "Controller",
    "Failure",
    "Running",
    "StackRead",
    "Whole",
    "actors_here",
    "ask_console",
    "awaited_by",
    "call_in_wait",
    "controllers",
    "endpoints_here",
    "failures",
    "home",
    "hosts_of",
    "keep_failure",
    "on_failure",
    "proc_here",
    "running_here",
    "stacks_from_outside",
    "whole_of",
]
