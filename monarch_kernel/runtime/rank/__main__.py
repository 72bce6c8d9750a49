"""A rank in its own interpreter: ``python -m monarch_kernel.runtime.rank FD`` reads its configuration from FD."""

from __future__ import annotations

import os
import sys

import msgspec

from monarch_kernel.protocol.messages import RankConfig
from monarch_kernel.runtime.rank.main import main


def _read(fd: int) -> bytes:
    with os.fdopen(fd, "rb") as source:
        return source.read()


def _find_user_modules(config: bytes) -> None:
    """Put the controller's folders of scripts and notebooks on the import path, as in a forked rank.

    Folders of installed packages are left out: they may belong to another interpreter.
    """
    for entry in msgspec.msgpack.decode(config, type=RankConfig).sys_path:
        if entry not in sys.path and "-packages" not in entry and f"{os.sep}python3" not in entry:
            sys.path.append(entry)


if __name__ == "__main__":
    given = _read(int(sys.argv[1]))
    _find_user_modules(given)
    main(given)
