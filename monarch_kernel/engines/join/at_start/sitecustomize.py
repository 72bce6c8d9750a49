"""Python imports a module of this name when it starts: see ``monarch_kernel.engines.join.own_ranks``."""

import os

from monarch_kernel.engines.join.own_ranks import at_start

at_start(os.path.dirname(os.path.abspath(__file__)))
