"""Inspection of the runtime by tools: running endpoints, awaited calls, failures, and the console endpoint."""
