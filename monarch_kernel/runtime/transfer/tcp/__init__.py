"""The TCP backend: its connections, and how two processes set one up."""
