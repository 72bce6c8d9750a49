"""One script per peer, with the same metrics in each; `run.py` starts each in a fresh process."""
