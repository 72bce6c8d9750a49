"""Tensors whose parts are on the ranks: `distribute`, and the code that makes operations on them correct.

`rank/` runs operations on DTensors and corrects the errors of DTensor. `controller/` has the API for programs.
"""
