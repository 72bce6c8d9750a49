"""Hosts from Kubernetes."""
