"""The TCP keys of this process, read on first use."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from monarch_kernel.runtime.actor.process import System
from monarch_kernel.runtime.node import coredumps

if TYPE_CHECKING:
    from monarch_kernel.protocol.keys import Keys


StrPath = str | os.PathLike[str]


def load_key_files(key_file: StrPath | None, allow: StrPath | None) -> Keys:
    """Return the keys in these files. This imports the TLS library, which is not loaded before."""
    from monarch_kernel.protocol.keys import load_keys

    return load_keys(key_file, allow)


def keys_for(system: System, key_file: StrPath | None, allow: StrPath | None) -> Keys:
    """Return the keys for links to some workers, loaded on first use.

    A process may use several: each worker is dialled with the keys with which it was attached. The first ones become
    the process's own keys, for workers that it learns of from others.
    """
    node = system.node
    if node.keys is not None and key_file is None and allow is None:
        return node.keys
    coredumps.give_up(for_good=False)
    keys = load_key_files(key_file, allow)
    if node.keys is None:
        node.keys = keys
    return node.routes.known_keys(keys)
