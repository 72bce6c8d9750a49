"""Settings that a process can change while it runs, under Monarch's names, with durations such as ``"10s"``.

``get_global_config()`` returns these settings. ``docs/actors.md`` describes each of them. All other settings are
environment variables, listed by ``environment_variables()`` and in ``docs/configuration.md``.

This module only exports names.
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
