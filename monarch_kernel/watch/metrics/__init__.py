"""Metrics of this controller's meshes, as a table, for Prometheus, and for OpenTelemetry.

``families`` computes them from a snapshot, ``counters`` accumulates monotonic values while metrics are on,
``collector`` combines both, and ``endpoint`` serves them.
"""
