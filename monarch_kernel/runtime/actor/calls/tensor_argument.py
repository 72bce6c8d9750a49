"""`TensorArgument`: a tensor of a mesh among the arguments of an endpoint, which crosses as what its ranks have."""

from __future__ import annotations


class TensorArgument(TypeError):
    """Raised where a tensor of a mesh is pickled. An endpoint then sends its arguments by the tensor engine's means."""
