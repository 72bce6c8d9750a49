"""What programs import from ``monarch.cached_remote_function``; the names are also in ``monarch_kernel.tensor``."""

from monarch_kernel.tensor import RemoteAutogradFunction, remote_autograd_function

__all__ = ["RemoteAutogradFunction", "remote_autograd_function"]
