"""One text for a value, the same in every process that has an equal one."""

from __future__ import annotations

from typing import Any

from monarch_kernel.debugger.rank.values.blocks import Deadline, TimeLimitError
from monarch_kernel.debugger.rank.values.reduce import Parts

#: How long `digest` may read (seconds).
DIGEST_TIMEOUT = 5.0


def digest(value: Any) -> str:
    """A text that is equal for equal values, whichever process they are in.

    Values that take longer to read than `DIGEST_TIMEOUT` all have the same text, as nothing shows that they differ.
    """
    try:
        return Parts(value, Deadline(DIGEST_TIMEOUT)).reading().digest.hex()
    except TimeLimitError:
        return "too large to read"
