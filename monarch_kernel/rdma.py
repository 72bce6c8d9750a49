"""RDMA buffers: memory that other processes read and write, with the names and semantics of ``monarch.rdma``.

This module only exports names; ``monarch_kernel.runtime.transfer`` has the code.
"""

# Registers the actor system, which provides this process's node to transfers.
import monarch_kernel.runtime.actor.system  # noqa: F401  # pyright: ignore[reportUnusedImport]
from monarch_kernel.runtime.transfer.backend_settings import (
    RDMAReadTransferWarning,
    RDMATcpFallbackWarning,
    RDMAWriteTransferWarning,
    configure,
)
from monarch_kernel.runtime.transfer.buffer import (
    RDMAAction,
    RDMABuffer,
    get_rdma_backend,
    is_ibverbs_available,
    is_rdma_available,
)
from monarch_kernel.runtime.transfer.errors import RDMAError, RDMATimeoutError

__all__ = [
    "RDMAAction",
    "RDMABuffer",
    "RDMAError",
    "RDMAReadTransferWarning",
    "RDMATcpFallbackWarning",
    "RDMATimeoutError",
    "RDMAWriteTransferWarning",
    "configure",
    "get_rdma_backend",
    "is_ibverbs_available",
    "is_rdma_available",
]
