"""What calls, endpoints and collectives record while a trace is on, and how a trace is collected from all processes."""
