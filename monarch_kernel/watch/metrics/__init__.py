"""Metrics of this controller's meshes: as a table, for Prometheus, and for OpenTelemetry.

``families`` computes them from what a watch sees, ``counters`` keeps what only grows while metrics are on,
``collector`` has both, and ``endpoint`` serves them.
"""
