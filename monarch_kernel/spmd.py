"""Programs that run alike on all ranks, for ``torch.distributed``. Has the names of ``monarch.spmd``, and more.

This module holds names only; ``monarch_kernel.runtime.spmd`` has the code.
"""

from monarch_kernel.runtime.spmd.groups import (
    Group,
    ProcessGroups,
    setup_torch_elastic_env,
    setup_torch_elastic_env_async,
)
from monarch_kernel.runtime.spmd.member import own_address
from monarch_kernel.runtime.spmd.state import Stateful, share_state

__all__ = [
    "Group",
    "ProcessGroups",
    "Stateful",
    "own_address",
    "setup_torch_elastic_env",
    "setup_torch_elastic_env_async",
    "share_state",
]
