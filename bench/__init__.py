"""Benchmarks: this project, its peers and the machine's own limits, measured on the same work.

`python -m bench --help` prints the usage; docs/performance.md explains the metrics.
"""
