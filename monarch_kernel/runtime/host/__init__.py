"""The host agent: starts ranks, watches them, reads their output, and leaves nothing behind."""
