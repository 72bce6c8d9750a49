"""Hosts from Lightning AI."""
