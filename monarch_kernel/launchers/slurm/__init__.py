"""Hosts from Slurm."""
