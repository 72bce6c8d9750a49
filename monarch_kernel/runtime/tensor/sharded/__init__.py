"""Tensors whose parts are on the ranks: `distribute`, and all that makes operations on them right.

`rank/` runs operations on DTensors and makes up for what DTensor gets wrong; `controller/` is what programs call.
"""
