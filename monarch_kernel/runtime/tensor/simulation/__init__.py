"""Simulate programs on meshes without processes: their computation, memory and communication, from shapes alone."""
