"""Inspect the activity of meshes and what they wait for. For tools such as debuggers and profilers.

* Meshes: ``whole_of`` returns the proc mesh behind a mesh of procs or actors, ``hosts_of`` the hosts of its ranks,
  ``deaths_of`` the deaths of its dead ranks, and ``home`` the mesh of the calling actor.
* Tools: ``each_host`` lists the hosts of any mesh. ``spawn_tool`` starts a process for a tool's actors on a host.
* This process: ``endpoints_here`` and ``actors_here`` list its running endpoints and its actors. ``running_here``
  returns the endpoint that the caller runs in, and ``repeats_here`` whether the same endpoint also ran just before.
  ``awaited_here`` lists the calls that the process waits for, and ``call_in_wait`` runs a function in such a wait.
  ``after_import`` runs a function after a module is imported. ``interrupt_main_thread`` interrupts the code on the
  main thread.
* Failures: ``failures`` lists the recent exceptions that ended endpoints and cells of this process, with their frames.
  ``latest_failure`` returns the exception that ended the last endpoint or cell. ``on_failure`` reports new failures.
* Collectives: ``failed_by_peer`` returns whether another rank caused an error of a process group, and ``said_first``
  extracts that rank's message.
* Code changes: ``between_messages`` runs a function while the actors of this process are idle.
  ``actor_class_changed`` updates the runtime after a class was changed in place. ``sources_changed`` notifies the
  subscribers of ``on_sources_changed`` that ranks run new sources.
* Views: ``MeshObserver`` reports the state of meshes, as known to this controller and its host agents, as it changes.
* Traces: ``living_ranks`` lists the processes that can record, with the means to query each. ``start_recording``,
  ``take_records`` and ``stop_recording`` record this process. ``begin_record`` and ``recorded`` add a tool's own
  records, with times from ``trace_clock``. ``is_recording`` returns whether a trace is on. ``observe_calls`` reports
  the durations of calls of this process.
* Tensors: ``operation_on`` returns the operation of a controller that a thread of a rank runs, ``issued_at`` the line
  of the controller that issued it, and ``tensor_value`` a value that a rank holds for a controller.
  ``finish_operations`` waits until ranks have run all issued operations. `TensorArgument` is raised if a mesh tensor
  is pickled outside a call of an endpoint.
* Other processes: ``stacks_from_outside`` makes host agents read the stacks of ranks that cannot answer. ``py_spy``
  returns the command line of that program. ``read_gpus_once`` reads the GPUs of this host, with the memory of each
  process. ``controllers`` lists this user's controllers on this machine, and ``ask_console`` connects to the
  debugger's console in one of them.
* Displays: ``use_display`` sets the module with which ranks show figures and rich values.
* Pickling: ``by_value_pickler`` pickles objects of notebooks and scripts. ``child_processes`` makes these objects
  available in processes that `multiprocessing` starts. ``install_rank_main`` creates a ``__main__`` module for cells,
  and ``main_names`` returns its variables.

This module only exports names; ``monarch_kernel.runtime.actor`` has the code.
"""

from monarch_kernel.loading import after_import
from monarch_kernel.protocol import trace_records
from monarch_kernel.protocol.main_module import install_rank_main, main_names
from monarch_kernel.protocol.messages import ProcUnresponsive, StackRead
from monarch_kernel.protocol.observation import ActorActivity, Observed
from monarch_kernel.protocol.refs import Death, DeathKind
from monarch_kernel.protocol.serialize import by_value_pickler
from monarch_kernel.runtime.actor import child_processes
from monarch_kernel.runtime.actor.execution.collectives import WAITING, called_method, failed_by_peer, said_first
from monarch_kernel.runtime.actor.execution.message_gate import StillBusy
from monarch_kernel.runtime.actor.execution.postmortem import Failure
from monarch_kernel.runtime.actor.extensions import TensorArgument, use_display
from monarch_kernel.runtime.actor.inspection.activity import (
    Awaited,
    Running,
    actor_class_changed,
    actors_here,
    awaited_by,
    awaited_here,
    between_messages,
    call_in_wait,
    endpoints_here,
    failures,
    interrupt_main_thread,
    keep_failure,
    latest_failure,
    on_failure,
    on_sources_changed,
    proc_here,
    repeats_here,
    running_here,
    sources_changed,
)
from monarch_kernel.runtime.actor.inspection.console_endpoint import Controller, ask_console, controllers
from monarch_kernel.runtime.actor.inspection.mesh_lookup import (
    ToolHost,
    Whole,
    deaths_of,
    each_host,
    home,
    hosts_of,
    spawn_tool,
    stacks_from_outside,
    whole_of,
)
from monarch_kernel.runtime.actor.inspection.mesh_observer import MeshObserver, ObservedMesh
from monarch_kernel.runtime.actor.tracing.call_records import observe_calls
from monarch_kernel.runtime.actor.tracing.recording import (
    TracedRank,
    begin_record,
    is_recording,
    living_ranks,
    recorded,
    start_recording,
    stop_recording,
    take_records,
    trace_clock,
)
from monarch_kernel.runtime.host import py_spy
from monarch_kernel.runtime.host.host_observer import read_gpus_once
from monarch_kernel.runtime.tensor.inspection.running import (
    RunningOperation,
    finish_operations,
    issued_at,
    operation_on,
    tensor_value,
)

__all__ = [
    "WAITING",
    "ActorActivity",
    "Awaited",
    "Controller",
    "Death",
    "DeathKind",
    "Failure",
    "MeshObserver",
    "Observed",
    "ObservedMesh",
    "ProcUnresponsive",
    "Running",
    "RunningOperation",
    "StackRead",
    "StillBusy",
    "TensorArgument",
    "ToolHost",
    "TracedRank",
    "Whole",
    "actor_class_changed",
    "actors_here",
    "after_import",
    "ask_console",
    "awaited_by",
    "awaited_here",
    "begin_record",
    "between_messages",
    "by_value_pickler",
    "call_in_wait",
    "called_method",
    "child_processes",
    "controllers",
    "deaths_of",
    "each_host",
    "endpoints_here",
    "failed_by_peer",
    "failures",
    "finish_operations",
    "home",
    "hosts_of",
    "install_rank_main",
    "interrupt_main_thread",
    "is_recording",
    "issued_at",
    "keep_failure",
    "latest_failure",
    "living_ranks",
    "main_names",
    "observe_calls",
    "on_failure",
    "on_sources_changed",
    "operation_on",
    "proc_here",
    "py_spy",
    "read_gpus_once",
    "recorded",
    "repeats_here",
    "running_here",
    "said_first",
    "sources_changed",
    "spawn_tool",
    "stacks_from_outside",
    "start_recording",
    "stop_recording",
    "take_records",
    "tensor_value",
    "trace_clock",
    "trace_records",
    "use_display",
    "whole_of",
]
