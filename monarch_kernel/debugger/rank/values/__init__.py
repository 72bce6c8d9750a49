"""A value of this process, reduced to digests and figures that the controller compares."""
