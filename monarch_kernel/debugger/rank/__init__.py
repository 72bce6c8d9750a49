"""The code that runs in a rank: its debug agent, its stop engine, and the functions that the controller sends."""
