"""Settings. Those that a process can change while it runs have Monarch's names: durations as in ``"10s"``.

``get_global_config()`` has those that exist here, and ``docs/actors.md`` says what each does. Everything else is set by
environment variables: ``environment_variables()`` lists them, as ``docs/configuration.md`` does.

This module holds names only.
"""

from monarch_kernel.environment import EnvironmentVariable, InvalidSettingError
from monarch_kernel.environment import variables as environment_variables
from monarch_kernel.runtime.actor.settings import (
    clear_runtime_config,
    configure,
    configured,
    get_global_config,
    get_runtime_config,
)

__all__ = [
    "EnvironmentVariable",
    "InvalidSettingError",
    "clear_runtime_config",
    "configure",
    "configured",
    "environment_variables",
    "get_global_config",
    "get_runtime_config",
]
