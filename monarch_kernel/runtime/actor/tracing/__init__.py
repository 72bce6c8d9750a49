"""Record calls, endpoints and collectives while a trace is on, and collect the records of all processes."""
