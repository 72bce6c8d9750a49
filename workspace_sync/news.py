"""Notify views of meshes of syncs. Loads no other module of the package."""

from __future__ import annotations

from monarch_kernel.subscriptions import Subscribers

#: By the key of each host that this process has synced: the digests of its tree and of its environment (hex).
trees: dict[str, tuple[str, str]] = {}
#: Notified after a sync, when ``trees`` has it, on the thread that synced.
on_synced: Subscribers[[]] = Subscribers("a callback on syncs")
