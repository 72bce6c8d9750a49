"""Export jobs for programs written for torchrun, with Monarch's names; ``monarch_kernel.launchers`` has the code."""

from monarch_kernel.launchers.spmd_job import SPMDJob, StoreJob, serve

__all__ = ["SPMDJob", "StoreJob", "serve"]
