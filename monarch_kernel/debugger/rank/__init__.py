"""The code that runs in a rank: its debug agent, its tracer, and the functions that the controller sends."""
