"""Hosts from SkyPilot."""
