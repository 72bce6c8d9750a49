"""Proc meshes and actor meshes, and the registry of the meshes of this controller."""
