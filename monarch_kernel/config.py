"""Settings that can be changed while a process runs, by Monarch's names: durations as in ``"10s"``.

``cleanup_timeout``: how long the actors of this process have for their ``__cleanup__``. ``process_exit_timeout``: how
long procs that this process stops have until they are killed. Environment variables set what else can be set; ``docs/``
has each where it belongs.
"""

from monarch_kernel.runtime.actor.settings import (
    clear_runtime_config,
    configure,
    configured,
    get_global_config,
    get_runtime_config,
)

__all__ = ["clear_runtime_config", "configure", "configured", "get_global_config", "get_runtime_config"]
