"""Determine the versions of the software in this process."""

from __future__ import annotations

import platform
import sys

from monarch_kernel._version import __version__


def versions_here() -> dict[str, str]:
    """Return the versions of Python, of this package, and of PyTorch with its CUDA if it is loaded, by name."""
    found = {"Python": platform.python_version(), "monarch_kernel": __version__}
    torch = sys.modules.get("torch")
    if torch is not None:
        found["torch"] = str(getattr(torch, "__version__", ""))
        cuda = getattr(getattr(torch, "version", None), "cuda", None)
        if cuda:
            found["CUDA"] = str(cuda)
    return {name: version for name, version in found.items() if version}
