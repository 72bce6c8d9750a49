"""A rank in an interpreter of its own: ``python -m monarch_kernel.runtime.rank FD``, configuration read from FD."""

from __future__ import annotations

import os
import sys

from monarch_kernel.runtime.rank.main import main


def _read(fd: int) -> bytes:
    with os.fdopen(fd, "rb") as source:
        return source.read()


if __name__ == "__main__":
    main(_read(int(sys.argv[1])))
