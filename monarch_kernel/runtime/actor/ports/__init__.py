"""Ports: one-way typed pipes between processes, and the record of their holders."""
