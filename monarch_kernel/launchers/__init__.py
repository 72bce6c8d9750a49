"""Where hosts come from."""
