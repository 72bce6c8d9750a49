"""Inspect the runtime from tools: running endpoints, awaited calls, failures, and the console endpoint."""
