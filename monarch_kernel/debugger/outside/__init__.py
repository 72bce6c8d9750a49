"""Read processes of other programs from outside, without running code in them.

`processes` reads the kernel's files of processes, `selection` and `slurm` find the ranks of a job, `reading` has py-spy
take their stacks twice, `evidence` turns these into what the hang verdict judges, and `report` shows it all. Nothing is
sent to a process, and nothing is injected into it.
"""
