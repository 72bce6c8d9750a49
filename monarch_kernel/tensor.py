"""Tensors on a mesh: every rank runs the torch operations of the controller. The names are those of ``monarch``.

This module only exports names; ``monarch_kernel.runtime.tensor`` has the code.
"""

# Registers the actor system, so that a process without one can create it.
import monarch_kernel.runtime.actor.system  # noqa: F401  # pyright: ignore[reportUnusedImport]
from monarch_kernel.runtime.tensor.api.activation import (
    activate,
    coalescing,
    end_tensors,
    get_active_mesh,
    get_active_stream,
    no_mesh,
)
from monarch_kernel.runtime.tensor.api.fetching import call_on_shard_and_fetch, fetch_shard, inspect
from monarch_kernel.runtime.tensor.api.gradients import (
    GradientGenerator,
    RemoteAutogradFunction,
    grad_function,
    grad_generator,
    gradient_execution_order,
    remote_autograd_function,
)
from monarch_kernel.runtime.tensor.api.lending import lend_arguments, refer_to_result
from monarch_kernel.runtime.tensor.api.opaque_object import OpaqueModule, OpaqueObject, opaque_method
from monarch_kernel.runtime.tensor.api.pipes import Pipe, create_pipe, remote_generator
from monarch_kernel.runtime.tensor.api.placement import (
    python_local_mesh,
    rank_tensor,
    rank_tensors,
    reduce,
    reduce_,
    show,
    slice_mesh,
    to_mesh,
    world_mesh,
)
from monarch_kernel.runtime.tensor.api.process_groups import RemoteProcessGroup, process_group
from monarch_kernel.runtime.tensor.api.randomness import manual_seed
from monarch_kernel.runtime.tensor.api.remote_function import RemoteFunction, function_resolvers, remote
from monarch_kernel.runtime.tensor.controller.borrowing import Borrow
from monarch_kernel.runtime.tensor.controller.errors import (
    BorrowError,
    DeviceMeshError,
    MixedTensorsError,
    NonFiniteError,
    RanksDifferWarning,
    RemoteException,
)
from monarch_kernel.runtime.tensor.controller.fetched_values import FetchedValues
from monarch_kernel.runtime.tensor.controller.handle import Tensor
from monarch_kernel.runtime.tensor.controller.opaque_ref import OpaqueRef
from monarch_kernel.runtime.tensor.controller.stream import Stream
from monarch_kernel.runtime.tensor.inspection.explanation import Explanation, clear_plans, explain
from monarch_kernel.runtime.tensor.inspection.memory import TensorMemory, memory
from monarch_kernel.runtime.tensor.inspection.nan_watch import NanWatching, watch_nan
from monarch_kernel.runtime.tensor.inspection.pictures import TensorPicture, ValueAddress, address_of
from monarch_kernel.runtime.tensor.rank.calls import call_ended, keep_result
from monarch_kernel.runtime.tensor.replay.compiled import Compiled, compile  # noqa: A004  # Monarch's name
from monarch_kernel.runtime.tensor.simulation import (
    SimulatedMesh,
    SimulatedRanks,
    SimulatedRates,
    SimulationReport,
    Simulator,
    SimulatorInterface,
    set_meta,
)

__all__ = [
    "Borrow",
    "BorrowError",
    "Compiled",
    "DeviceMeshError",
    "Explanation",
    "FetchedValues",
    "GradientGenerator",
    "MixedTensorsError",
    "NanWatching",
    "NonFiniteError",
    "OpaqueModule",
    "OpaqueObject",
    "OpaqueRef",
    "Pipe",
    "RanksDifferWarning",
    "RemoteAutogradFunction",
    "RemoteException",
    "RemoteFunction",
    "RemoteProcessGroup",
    "SimulatedMesh",
    "SimulatedRanks",
    "SimulatedRates",
    "SimulationReport",
    "Simulator",
    "SimulatorInterface",
    "Stream",
    "Tensor",
    "TensorMemory",
    "TensorPicture",
    "ValueAddress",
    "activate",
    "address_of",
    "call_ended",
    "call_on_shard_and_fetch",
    "clear_plans",
    "coalescing",
    "compile",
    "create_pipe",
    "end_tensors",
    "explain",
    "fetch_shard",
    "function_resolvers",
    "get_active_mesh",
    "get_active_stream",
    "grad_function",
    "grad_generator",
    "gradient_execution_order",
    "inspect",
    "keep_result",
    "lend_arguments",
    "manual_seed",
    "memory",
    "no_mesh",
    "opaque_method",
    "process_group",
    "python_local_mesh",
    "rank_tensor",
    "rank_tensors",
    "reduce",
    "reduce_",
    "refer_to_result",
    "remote",
    "remote_autograd_function",
    "remote_generator",
    "set_meta",
    "show",
    "slice_mesh",
    "to_mesh",
    "watch_nan",
    "world_mesh",
]
