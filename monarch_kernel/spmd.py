"""Programs that run on all ranks, for ``torch.distributed``. It has the names of ``monarch.spmd``, and more.

This module holds names only; ``monarch_kernel.runtime.spmd`` has the code.
"""

# This import lets a process that has no actor system create one.
import monarch_kernel.runtime.actor.system  # noqa: F401  # pyright: ignore[reportUnusedImport]
from monarch_kernel.runtime.actor.execution.collectives import are_broken, in_process_group, interrupt_first, release
from monarch_kernel.runtime.spmd.actor import SPMDActor
from monarch_kernel.runtime.spmd.groups import (
    Group,
    ProcessGroups,
    setup_torch_elastic_env,
    setup_torch_elastic_env_async,
)
from monarch_kernel.runtime.spmd.member import Meeting, join, leave, own_address, reserve, set_environment
from monarch_kernel.runtime.spmd.rendezvous import count_meetings, meetings, tidy_up
from monarch_kernel.runtime.spmd.state import Stateful, share_state

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
