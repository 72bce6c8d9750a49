"""News of syncs, for views of meshes. Nothing else of the package is loaded by it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from monarch_kernel.subscriptions import Subscribers

#: Notified after a sync with its hosts (a mesh), and by the name of each host that has switched, the digests of its
#: tree and of its environment (hex); on the thread that synced.
on_synced: Subscribers[[Any, Mapping[str, tuple[str, str]]]] = Subscribers("a callback on syncs")
