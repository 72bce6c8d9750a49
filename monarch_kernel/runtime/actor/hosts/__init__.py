"""Hosts: the host mesh, how procs are started on it, workers and how a controller attaches to them."""
