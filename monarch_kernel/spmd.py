"""Run SPMD programs with ``torch.distributed`` on all ranks: the names of ``monarch.spmd``, and more.

This module only exports names; ``monarch_kernel.runtime.spmd`` has the code.
"""

# Registers the actor system, so that a process without one can create it.
import monarch_kernel.runtime.actor.system  # noqa: F401  # pyright: ignore[reportUnusedImport]
from monarch_kernel.runtime.actor.execution.collectives import are_broken, in_process_group, interrupt_first, release
from monarch_kernel.runtime.spmd.actor import SPMDActor, Stateful, share_state
from monarch_kernel.runtime.spmd.groups import (
    Group,
    ProcessGroups,
    setup_torch_elastic_env,
    setup_torch_elastic_env_async,
)
from monarch_kernel.runtime.spmd.member import Meeting, join, leave, own_address, reserve, set_environment
from monarch_kernel.runtime.spmd.rendezvous import count_meetings, meetings, tidy_up

__all__ = [
    "Group",
    "Meeting",
    "ProcessGroups",
    "SPMDActor",
    "Stateful",
    "are_broken",
    "count_meetings",
    "in_process_group",
    "interrupt_first",
    "join",
    "leave",
    "meetings",
    "own_address",
    "release",
    "reserve",
    "set_environment",
    "setup_torch_elastic_env",
    "setup_torch_elastic_env_async",
    "share_state",
    "tidy_up",
]
