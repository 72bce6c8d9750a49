"""Hosts: the host mesh, starting procs on it, workers, and attaching a controller to them."""
