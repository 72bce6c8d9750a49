"""Records that are no operations, and ids that the two sides agree on."""

from __future__ import annotations

#: ``[DELETE, n, id...]``: forget these values.
DELETE = 0
#: ``[WAIT, stream, count]``: go on when that stream of this rank has run `count` records (borrowed values).
WAIT = 1
#: Definitions are numbered from here.
FIRST_DEFINITION = 16
