"""Reports on jobs that others have started: what all ranks did at one moment, as files that need no job to be read.

`collect` joins a job and asks its ranks, and reads those from outside that do not answer; a `job_report` displays
itself; `plain` is its form in files, which `files` writes and reads, and `webhook` posts.
"""
