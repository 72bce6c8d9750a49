"""Calling actors: endpoints, calls that wait for replies, and casts to many hosts."""
