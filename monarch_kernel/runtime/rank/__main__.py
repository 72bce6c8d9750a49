"""Start a rank in its own interpreter: ``python -m monarch_kernel.runtime.rank FD`` reads its configuration from FD."""

from __future__ import annotations

import os
import sys

import msgspec

from monarch_kernel.protocol.messages import RankConfig
from monarch_kernel.protocol.placement import Placement, is_below
from monarch_kernel.runtime.rank.main import main


def _read(fd: int) -> bytes:
    with os.fdopen(fd, "rb") as source:
        return source.read()


def _find_user_modules(config: RankConfig) -> None:
    """Add the controller's folders of scripts and notebooks to the import path, as in a forked rank.

    Folders of installed packages are excluded, because they may belong to another interpreter.
    """
    if config.placement is not None and sys.path and sys.path[0] == os.getcwd():
        sys.path[0] = _current(sys.path[0], config.placement)
    for entry in config.sys_path:
        if entry not in sys.path and "-packages" not in entry and f"{os.sep}python3" not in entry:
            sys.path.append(entry)


def _current(cwd: str, placement: Placement) -> str:
    """Return a name of the working directory that stays valid when a folder of a placement is switched."""
    for there in placement.folders.values():
        real = os.path.realpath(there)
        if is_below(cwd, real):
            return there + cwd[len(real) :]
    return cwd


if __name__ == "__main__":
    given = _read(int(sys.argv[1]))
    _find_user_modules(msgspec.msgpack.decode(given, type=RankConfig))
    main(given)
