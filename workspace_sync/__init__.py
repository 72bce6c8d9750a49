"""The home of workspace sync: content-addressed sync of code and environments to every host.

Usable without the kernel.  Nothing is here yet; it comes with its own issue.
"""
