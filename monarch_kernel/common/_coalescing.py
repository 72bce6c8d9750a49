"""What Monarch has in ``monarch.common._coalescing``: functions recorded once, and operations sent together."""

from monarch_kernel.tensor import coalescing, compile  # noqa: A004  # Monarch's name

__all__ = ["coalescing", "compile"]
