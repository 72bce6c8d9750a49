"""Data exchanged between client and hosts: manifests, workspaces, reports and errors. Plain values, no I/O."""
