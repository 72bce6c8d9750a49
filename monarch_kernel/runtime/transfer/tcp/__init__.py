"""The TCP backend: connections, and their setup between two processes."""
