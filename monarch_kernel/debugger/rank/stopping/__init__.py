"""The tracer of a process: breakpoints, steps and frames, without debugpy.

`tracer.StopTracer` is its interface; `model.stops` has the values that go in and come out.
"""
