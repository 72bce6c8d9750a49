"""Determine what this process waits for, as evidence for the verdict over all ranks."""
