"""The kernel's side of mesh views: the panel's comm, answers, actions, logs (docs/watching.md)."""
