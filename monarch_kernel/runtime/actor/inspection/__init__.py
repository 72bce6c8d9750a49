"""What tools see of the runtime: running endpoints, awaited calls, failures, and the console endpoint."""
