"""What programs import from ``monarch.fetch``; the names are also in ``monarch_kernel.tensor``."""

from monarch_kernel.tensor import fetch_shard, inspect, show

__all__ = ["fetch_shard", "inspect", "show"]
