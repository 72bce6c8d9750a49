"""The keys of this process for TCP, read on first use."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from monarch_kernel.runtime.actor.process import System
from monarch_kernel.runtime.node import coredumps

if TYPE_CHECKING:
    from monarch_kernel.protocol.keys import Keys


StrPath = str | os.PathLike[str]


def load_key_files(key_file: StrPath | None, allow: StrPath | None) -> Keys:
    """The keys in these files; loads the library for TLS, which is not imported before."""
    from monarch_kernel.protocol.keys import load_keys

    return load_keys(key_file, allow)


def ensure_keys(system: System, key_file: StrPath | None, allow: StrPath | None) -> None:
    """Load this process's key on first use. Another key can replace it only while no connection uses it."""
    node = system.node
    if node.keys is not None and key_file is None and allow is None:
        return
    coredumps.give_up(for_good=False)
    keys = load_key_files(key_file, allow)
    if node.keys is not None and keys.same_as(node.keys):
        return  # the node's links already use these keys
    if node.keys is not None and any(ref.site != node.ref.site for ref in system.workers.values()):
        raise RuntimeError(
            f"{keys.path} (with the list {keys.allow}) is not the key of the workers that this process is attached to, "
            f"{node.keys.path} (with the list {node.keys.allow}): a process has one key and one list; put what is "
            "missing on that list with 'monarch-kernel keys add'"
        )
    node.keys = keys
