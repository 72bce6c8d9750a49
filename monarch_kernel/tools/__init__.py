"""Export names of ``monarch_kernel.introspection`` and ``monarch_kernel.private_files`` under their old module."""

from monarch_kernel.introspection import *  # noqa: F403
from monarch_kernel.private_files import *  # noqa: F403
