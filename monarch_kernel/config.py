"""Settings. A process can change some of them while it runs, under Monarch's names, with durations as in ``"10s"``.

``get_global_config()`` returns these, and ``docs/actors.md`` describes each. Environment variables set all others:
``environment_variables()`` lists them, and so does ``docs/configuration.md``.

This module holds names only.
"""

from monarch_kernel.environment import EnvironmentVariable, InvalidSettingError
from monarch_kernel.environment import variables as environment_variables
from monarch_kernel.runtime.actor.settings import (
    Encoding,
    clear_runtime_config,
    configure,
    configured,
    get_global_config,
    get_runtime_config,
    parametrize_config,
    parametrize_config_pointwise,
)
from monarch_kernel.runtime.actor.transports import ChannelTransport

__all__ = [
    "ChannelTransport",
    "Encoding",
    "EnvironmentVariable",
    "InvalidSettingError",
    "clear_runtime_config",
    "configure",
    "configured",
    "environment_variables",
    "get_global_config",
    "get_runtime_config",
    "parametrize_config",
    "parametrize_config_pointwise",
]
