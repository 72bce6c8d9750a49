"""What programs import from ``monarch.simulator``; the names are also in ``monarch_kernel.tensor``."""

from monarch_kernel.tensor import Simulator, SimulatorInterface, set_meta

__all__ = ["Simulator", "SimulatorInterface", "set_meta"]
