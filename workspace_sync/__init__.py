"""Workspace sync: what a person has edited and installed, on every host a second later, verified, or not at all.

Usable without the kernel (``python -m workspace_sync``). ``docs/sync.md`` has what it promises and how it works.
"""
