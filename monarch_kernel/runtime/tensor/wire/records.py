"""Records that are no operations, and ids that the two sides agree on."""

from __future__ import annotations

#: ``[DELETE, n, id...]``: forget these values.
DELETE = 0
#: ``[WAIT, token]``: go on when another stream of this rank has come to ``[SIGNAL, token]`` (borrowed values).
WAIT = 1
SIGNAL = 2
#: ``[LEND, token, n, id..., m, rank...]``: actors of these ranks are about to take these values.
LEND = 3
#: Definitions are numbered from here.
FIRST_DEFINITION = 16
