"""Settings of this process that can be changed while it runs, under Monarch's names.

The module that uses a setting holds its value; this module has the names, and the text forms of the values.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from monarch_kernel import environment
from monarch_kernel.runtime.actor import transports
from monarch_kernel.runtime.actor.execution import instance
from monarch_kernel.runtime.actor.hosts import host_mesh as hosts
from monarch_kernel.runtime.actor.meshes import proc_mesh as meshes
from monarch_kernel.runtime.actor.output import output_hub as output
from monarch_kernel.runtime.transfer import backend_settings as transfer

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = r"(\d+(?:\.\d+)?)\s*(ms|s|m|h)\s*"


def _seconds(value: Any) -> float:
    if not isinstance(value, str):
        raise TypeError(f"it must be a string such as '10s' or '500ms', not {value!r}")
    parts = re.findall(_PART, value)
    if not parts or re.sub(_PART, "", value).strip():
        raise TypeError(f"{value!r} is not a duration: write '10s', '500ms' or '1m 30s'")
    return sum(float(number) * _UNITS[unit] for number, unit in parts)


def _duration(seconds: float) -> str:
    return f"{seconds:g}s" if seconds >= 1 else f"{seconds * 1000:g}ms"


def _start_limit(value: Any) -> float:
    seconds = _seconds(value)
    if not seconds:
        raise ValueError("a process needs some time to start")
    return seconds


def _show_start_limit(seconds: float) -> str:
    return _duration(seconds or environment.START_LIMIT.get())


def _boolean(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError("it must be True or False")
    return value


def _forwarding(value: Any) -> bool:
    if not _boolean(value):
        raise ValueError("output of ranks is always forwarded to their controller")
    return True


def _transport(value: Any) -> Any:
    if not isinstance(value, str | transports.ChannelTransport):
        raise TypeError("it must be a ChannelTransport, its name or an address")
    return transports.checked(value)


def _same(value: Any) -> Any:
    return value


class _Setting:
    """One setting: the modules that hold it, and how its value is read and shown."""

    def __init__(
        self,
        attribute: str,
        places: tuple[ModuleType, ...],
        read: Callable[[Any], Any],
        show: Callable[[Any], Any] = _same,
    ) -> None:
        self.attribute = attribute
        self.places = places
        self.read = read
        self.show = show
        self.first: tuple[Any] | None = None  # the value before the first change

    def change(self, value: Any) -> None:
        if self.first is None:
            self.first = (self.get(),)
        self.put(value)

    def clear(self) -> None:
        if self.first is not None:
            self.put(self.first[0])

    def get(self) -> Any:
        return getattr(self.places[0], self.attribute)

    def put(self, value: Any) -> None:
        for place in self.places:
            setattr(place, self.attribute, value)


class _TcpFallback(_Setting):
    """Whether RDMA buffers may travel by TCP. Ranks inherit it, so it is also set in the environment."""

    def __init__(self) -> None:
        super().__init__("", (), _boolean, lambda allowed: allowed is not False)

    def get(self) -> Any:
        return transfer.tcp_fallback()

    def put(self, value: Any) -> None:
        transfer.allow_tcp_fallback(value)


class _Always(_Setting):
    """A fixed setting, which can only be set to its value."""

    def __init__(self, value: Any, read: Callable[[Any], Any]) -> None:
        self.value = value
        super().__init__("", (), read)

    def get(self) -> Any:
        return self.value

    def put(self, value: Any) -> None:
        """Does nothing; ``read`` has checked the value."""


class _Unlimited(_Setting):
    """A limit in Monarch that does not exist here; values from Monarch's default upwards are accepted."""

    def __init__(self, least: Any, read: Callable[[Any], Any], show: Callable[[Any], Any] = _same) -> None:
        self.least = least
        self.value = least
        super().__init__("value", (), lambda value: self._checked(read(value)), show)

    def _checked(self, value: Any) -> Any:
        if value < self.least:
            raise ValueError(
                f"this limit does not exist here, so a value below {self.show(self.least)} would have no effect; "
                "futures take a timeout: get(timeout=...)"
            )
        return value

    def get(self) -> Any:
        return self.value

    def put(self, value: Any) -> None:
        self.value = value


def _bytes(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError("it must be a number of bytes")
    return value


_SETTINGS: dict[str, _Setting] = {
    # How long the __cleanup__ of an actor of this process may take.
    "cleanup_timeout": _Setting("CLEANUP_TIMEOUT", (instance,), _seconds, _duration),
    # How long a proc that this process stops may take before it is killed.
    "process_exit_timeout": _Setting("STOP_GRACE", (meshes, hosts), _seconds, _duration),
    # How long procs that this process spawns may take to start.
    "mesh_proc_spawn_max_idle": _Setting("START_LIMIT", (hosts,), _start_limit, _show_start_limit),
    "prefix_with_rank": _Setting("PREFIX_WITH_RANK", (output,), _boolean),
    "rdma_allow_tcp_fallback": _TcpFallback(),
    "default_transport": _Setting("DEFAULT", (transports,), _transport),
    # Settings that programs written for Monarch change, and that are fixed here.
    "enable_log_forwarding": _Always(True, _forwarding),
    "actor_spawn_max_idle": _Unlimited(30.0, _seconds, _duration),
    "get_actor_state_max_idle": _Unlimited(30.0, _seconds, _duration),
    "get_proc_state_max_idle": _Unlimited(60.0, _seconds, _duration),
    "codec_max_frame_length": _Unlimited(10 * 1024**3, _bytes),
}

#: Settings of Monarch that environment variables set here, for all processes.
_BY_ENVIRONMENT = {
    "max_cast_fanout": environment.CAST_FANOUT.name,
    "mesh_orphan_timeout": environment.HEARTBEAT_TIMEOUT.name,
    "message_delivery_timeout": environment.HEARTBEAT_TIMEOUT.name,
    "server_heartbeat_interval": environment.HEARTBEAT_TIMEOUT.name,
    "supervision_watchdog_timeout": environment.HEARTBEAT_TIMEOUT.name,
}


def configure(**settings: Any) -> None:
    """Change settings of this process: all of them, or none if one is invalid.

    Raises:
        ValueError: the setting does not exist here, or the value would have no effect.
        TypeError: the value has the wrong type.
    """
    read: dict[str, Any] = {}
    for name, value in settings.items():
        setting = _SETTINGS.get(name)
        if setting is None:
            variable = _BY_ENVIRONMENT.get(name)
            instead = f"set {variable} in the environment of all processes instead; " if variable else ""
            raise ValueError(
                f"invalid configuration key: `{name}`; {instead}the keys that exist here are {', '.join(_SETTINGS)}"
            )
        try:
            read[name] = setting.read(value)
        except (TypeError, ValueError) as e:
            raise type(e)(f"invalid value `{value!r}` for configuration key `{name}`: {e}") from None
    for name, value in read.items():
        _SETTINGS[name].change(value)


@contextmanager
def configured(**settings: Any) -> Generator[dict[str, Any]]:
    """Change settings inside a ``with`` block; yields all settings."""
    before = {name: _SETTINGS[name].get() for name in settings if name in _SETTINGS}
    configure(**settings)
    try:
        yield get_runtime_config()
    finally:
        for name, value in before.items():
            _SETTINGS[name].put(value)


def get_global_config() -> dict[str, Any]:
    """All settings of this process and their current values."""
    return {name: setting.show(setting.get()) for name, setting in _SETTINGS.items()}


#: The same, as ``configure`` is the only source besides the defaults.
get_runtime_config = get_global_config


def clear_runtime_config() -> None:
    """Reset all settings to their values at the start of the process."""
    for setting in _SETTINGS.values():
        setting.clear()
