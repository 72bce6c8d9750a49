"""The tracer of a process: breakpoints, steps and frames, without debugpy.

`tracer.StopTracer` is its interface. `model.stops` defines its inputs and outputs.
"""
