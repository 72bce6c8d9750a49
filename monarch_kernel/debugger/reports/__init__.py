"""Reports on joined jobs: the state of all ranks at one moment, as files that can be read without the job.

`collect` joins a job and asks its ranks, and reads those from outside that do not answer; a `job_report` displays
itself; `plain` is its form in files, which `files` writes and reads, and `webhook` posts.
"""
