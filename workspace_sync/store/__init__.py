"""Store trees on a host: complete trees that are switched at once, content by digest, and the records of both.

``Store`` is the entry point; ``docs/sync.md`` ("On a host") describes the layout. The store runs without actors, on any
file system.
"""
