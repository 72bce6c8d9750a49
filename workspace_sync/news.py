"""Notify views of meshes about syncs. This module imports no other module of the package."""

from __future__ import annotations

from monarch_kernel.subscriptions import Subscribers

#: By the key of each host that this process has synced: the digests of its tree and environment (hex).
trees: dict[str, tuple[str, str]] = {}
#: Notified after a sync, once ``trees`` is updated, on the thread that synced.
on_synced: Subscribers[[]] = Subscribers("a callback on syncs")
