"""Proc meshes and actor meshes, and the registry of those that this controller has."""
