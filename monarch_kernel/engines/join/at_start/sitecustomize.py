"""Imported by Python at startup: see ``monarch_kernel.engines.join.own_ranks``."""

import os

from monarch_kernel.engines.join.own_ranks import at_start

at_start(os.path.dirname(os.path.abspath(__file__)))
