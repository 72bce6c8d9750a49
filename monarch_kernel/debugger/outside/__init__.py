"""Read processes of other programs from outside, without running code in them.

`processes` reads the operating system's files of processes. `selection` and `slurm` find the ranks of a job. `reading`
runs py-spy to read their stacks twice. `evidence` converts these to evidence for the hang verdict, and `report`
displays everything. Nothing is sent to a process or injected into it.
"""
