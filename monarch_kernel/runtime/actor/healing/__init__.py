"""Healing: replace dead procs and actors, and hold calls meanwhile."""
