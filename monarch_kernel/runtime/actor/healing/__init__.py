"""Healing: the replacement of dead procs and actors, and the calls that wait for it."""
