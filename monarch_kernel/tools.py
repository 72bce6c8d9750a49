"""What tools need that look into other people's meshes: a debugger, a profiler.

``whole_of`` finds the proc mesh that something is on; ``failures`` are the exceptions that ended endpoints and cells of
this process, kept for a while with their frames; ``endpoints_here`` are those that run in this process, and
``stacks_from_outside`` has host agents read the stacks of ranks that cannot tell them. ``controllers`` are those of
this user that run on this machine, and ``ask_console`` connects to the debugger's console in one. ``peer_of`` and
``is_ours`` say whose the process at the other end of a Unix socket is, and ``remove_socket`` removes one of this user;
``read_own_file`` and ``write_own_file`` are for files that no other user may have written. ``after_import`` waits for a
module without importing it.
"""

from monarch_kernel.protocol.messages import StackRead
from monarch_kernel.protocol.private_files import read_own_file, remove_socket, write_own_file
from monarch_kernel.runtime.actor.execution.collectives import WAITING, called_method, failed_by_peer, said_first
from monarch_kernel.runtime.actor.execution.postmortem import Failure
from monarch_kernel.runtime.actor.import_hooks import after_import
from monarch_kernel.runtime.actor.inspection.activity import Running, actors_here, endpoints_here, running_here
from monarch_kernel.runtime.actor.inspection.awaited_calls import Awaited, awaited_by, awaited_here, proc_here
from monarch_kernel.runtime.actor.inspection.console_endpoint import Controller, ask_console, controllers
from monarch_kernel.runtime.actor.inspection.external_stacks import stacks_from_outside
from monarch_kernel.runtime.actor.inspection.failures import failures, keep_failure, on_failure
from monarch_kernel.runtime.actor.inspection.mesh_lookup import Whole, home, hosts_of, whole_of
from monarch_kernel.runtime.actor.inspection.wait_errands import call_in_wait
from monarch_kernel.runtime.node.link import is_ours, peer_of

__all__ = [
    "WAITING",
    "Awaited",
    "Controller",
    "Failure",
    "Running",
    "StackRead",
    "Whole",
    "actors_here",
    "after_import",
    "ask_console",
    "awaited_by",
    "awaited_here",
    "call_in_wait",
    "called_method",
    "controllers",
    "endpoints_here",
    "failed_by_peer",
    "failures",
    "home",
    "hosts_of",
    "is_ours",
    "keep_failure",
    "on_failure",
    "peer_of",
    "proc_here",
    "read_own_file",
    "remove_socket",
    "running_here",
    "said_first",
    "stacks_from_outside",
    "whole_of",
    "write_own_file",
]
