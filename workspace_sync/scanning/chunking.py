"""How large files are cut: into pieces of one size.

Measured against cuts that depend on the content, see docs/sync.md.
"""

from __future__ import annotations

#: The size of a chunk (bytes). A file that is not larger is one piece.
CHUNK = 1 << 20
