"""A command on a node of a job of Slurm, beside what runs there."""

from __future__ import annotations

import os


def step_beside(job: str, node: str) -> list[str]:
    """What runs a command on a node of a job of Slurm, in a step beside those that run there.

    The step takes nothing from them: it shares what they have, and has no devices. Its output comes as it is written;
    otherwise Slurm keeps it until a line ends, and frames have no lines.
    """
    # Of an allocation that this process is in: they would be taken for options.
    told = [name for name in os.environ if name.startswith(("SLURM_", "SRUN_", "PMI")) and name != "SLURM_CONF"]
    step = ["srun", "--overlap", f"--jobid={job}", f"--nodelist={node}", "--nodes=1", "--ntasks=1", "--quiet"]
    step += ["--unbuffered", "--mpi=none", "--gres=none", "--cpu-bind=none", "--kill-on-bad-exit=0"]
    return ["env", *(f"--unset={name}" for name in told), *step, f"--chdir={os.sep}"]
