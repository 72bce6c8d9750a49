"""``monarch.tools.commands``: the current job of a folder; ``monarch_kernel.launchers`` has the code."""

from monarch_kernel.job import DEFAULT_JOB_PATH, load_current_job

__all__ = ["DEFAULT_JOB_PATH", "load_current_job"]
