"""Syncs whose client, agents and hosts are killed at random moments, each of which the next sync repairs.

    python -m tests.sync.chaos --seed 7 --kills 50

What must hold after each ``kill -9``, whoever it struck, and whenever:

* every host has the old tree or the new one, which all its files are read for;
* the next sync, which nothing disturbs, brings the new tree to every host, and ends without an error;
* then nothing is left of what was staged, and no process of a client that has ended.

The same seed gives the same changes, victims and moments; what a moment meets is up to the machine.
"""
