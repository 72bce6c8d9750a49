"""Processes that others have started, and that nothing of ours runs in: what can be read of them from outside.

`processes` reads the kernel's files of processes, `selection` and `slurm` find the ranks of a job, `reading` has py-spy
take their stacks twice, `evidence` turns these into what the hang verdict judges, and `report` shows it all. Nothing is
sent to a process, and nothing is injected into it.
"""
