"""Reduce a value of this process to digests and figures that the controller compares."""
