"""Jobs: hosts that a program requests by name. Names and semantics are those of ``monarch.job``.

This module holds names only; ``monarch_kernel.launchers`` has the code.
"""

from monarch_kernel.launchers.base import Job as JobTrait
from monarch_kernel.launchers.base import JobState, job_load, job_loads
from monarch_kernel.launchers.local import LocalJob
from monarch_kernel.launchers.process import ProcessJob

__all__ = ["JobState", "JobTrait", "LocalJob", "ProcessJob", "job_load", "job_loads"]
