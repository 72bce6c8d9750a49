"""Names of ``monarch.cached_remote_function``, also available in ``monarch_kernel.tensor``."""

from monarch_kernel.tensor import RemoteAutogradFunction, remote_autograd_function

__all__ = ["RemoteAutogradFunction", "remote_autograd_function"]
