"""Names of ``monarch.fetch``, also available in ``monarch_kernel.tensor``."""

from monarch_kernel.tensor import call_on_shard_and_fetch, fetch_shard, inspect, show

__all__ = ["call_on_shard_and_fetch", "fetch_shard", "inspect", "show"]
