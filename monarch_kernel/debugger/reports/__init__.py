"""Reports on joined jobs: the state of all ranks at one moment, as files that can be read without the job.

`collect` joins a job and queries its ranks. It reads ranks that do not answer from outside. A `job_report` displays
itself. `plain` is its file format, which `files` writes and reads, and `webhook` posts.
"""
