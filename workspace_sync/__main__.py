"""``python -m workspace_sync``."""

import sys

from workspace_sync.cli import main

if __name__ == "__main__":
    sys.exit(main())
