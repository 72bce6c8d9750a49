"""``python -m monarch_kernel.runtime.host``: the host agent, started by ``launch``."""

from monarch_kernel.runtime.host.agent import main

if __name__ == "__main__":
    main()
