"""Ctrl-C: what it does to the kernel's own code, and how it reaches the ranks."""
