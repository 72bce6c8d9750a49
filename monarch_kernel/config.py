"""Settings that can be changed while a process runs, by Monarch's names: durations as in ``"10s"``.

``get_global_config()`` has those that exist here, and ``docs/actors.md`` says what each does. Environment variables set
what else can be set; ``docs/`` has each where it belongs.
"""

from monarch_kernel.runtime.actor.settings import (
    clear_runtime_config,
    configure,
    configured,
    get_global_config,
    get_runtime_config,
)

__all__ = ["clear_runtime_config", "configure", "configured", "get_global_config", "get_runtime_config"]
