"""Hosts: the host mesh, the start of procs on it, workers, and how a controller attaches to them."""
