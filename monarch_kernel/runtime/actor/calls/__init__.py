"""Calls of actors: endpoints, pending calls, and casts to many hosts."""
