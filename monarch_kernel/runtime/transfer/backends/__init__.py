"""The interface of backends, and the backends that move bytes within one host."""
