"""The stop engine of a process: breakpoints, steps and frames, without debugpy.

`engine.StopEngine` is its interface; `model.stops` has the values that go in and come out.
"""
