"""What programs import from ``monarch.common.remote``; the names are also in ``monarch_kernel.tensor``."""

from monarch_kernel.tensor import call_on_shard_and_fetch, remote

__all__ = ["call_on_shard_and_fetch", "remote"]
