"""The stop agent's engine: breakpoints, stepping and looking at frames, of one process, without debugpy.

`model.stops` says what goes in and out; `engine.StopEngine` is what a rank's debug agent drives.
"""
