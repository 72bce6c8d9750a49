"""What crosses between client and hosts: manifests, workspaces, reports and errors. Plain data, no I/O."""
