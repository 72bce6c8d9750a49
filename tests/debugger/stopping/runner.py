"""Runs test bodies by name, in whatever Python runs this: ``python -m tests.debugger.stopping.runner MODULE NAME...``

Prints one line of JSON for each: its name, and what it raised (null if nothing).
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import sys
import traceback
import warnings

LIMIT = 60.0


def main(module: str, *names: str) -> None:
    warnings.filterwarnings("ignore", message=".*multi-threaded, use of fork.*")
    faulthandler.enable()
    bodies = importlib.import_module(module)
    for name in names:
        faulthandler.dump_traceback_later(LIMIT, exit=True)
        error: str | None = None
        try:
            getattr(bodies, name)()
        except BaseException:
            error = traceback.format_exc()
        faulthandler.cancel_dump_traceback_later()
        print(json.dumps([name, error]), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
