"""The bench: this project, its peers and the machine's own limits, measured on the same work.

`python -m bench --help` says how to run it; docs/performance.md says what the metrics mean.
"""
