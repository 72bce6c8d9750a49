"""Hosts from Ray."""
