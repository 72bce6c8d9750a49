"""Export jobs for programs written for torchrun, with Monarch's names; ``monarch_kernel.launchers`` has the code."""

from monarch_kernel.launchers.spmd_job import SPMDJob, serve
from monarch_kernel.launchers.store_job import StoreJob

__all__ = ["SPMDJob", "StoreJob", "serve"]
