"""What a backend offers, and those that move bytes within one host."""
