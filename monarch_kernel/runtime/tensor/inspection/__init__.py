"""Inspect the tensor engine for tools: costs by line, memory, layouts, running operations, and the first NaN.

`running` and `engines` do not import torch, so a debugger can use them in any process.
"""
