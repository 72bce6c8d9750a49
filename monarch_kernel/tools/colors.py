"""Terminal codes for colours, with the names of ``monarch.tools.colors``; empty if the output is not a terminal."""

import sys

__all__ = ["BLUE", "CYAN", "ENDC", "GRAY", "GREEN", "ORANGE"]

_COLOURED = sys.stdout is not None and sys.stdout.isatty()
BLUE, CYAN, ENDC, GRAY, GREEN, ORANGE = (
    f"\033[{code}m" if _COLOURED else "" for code in ("34", "36", "0", "90", "32", "38;5;208")
)
