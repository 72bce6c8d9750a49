"""Monarch's import paths for parts of the tensor engine. The names are also in ``monarch_kernel.tensor``."""
