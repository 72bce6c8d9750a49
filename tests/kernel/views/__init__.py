"""The comm of front ends, in real kernels."""
