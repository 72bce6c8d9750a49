"""Settings of this process that can be changed while it runs, under Monarch's names for them.

Each lies in the module that uses it, as a plain number; here is what it is called, and how it is written.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from monarch_kernel.runtime.actor import async_instance, hosts, instance, meshes

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h)\s*")


def _seconds(value: Any) -> float:
    if not isinstance(value, str):
        raise TypeError(f"it must be a string such as '10s' or '500ms', not {value!r}")
    parts = _PART.findall(value)
    if not parts or _PART.sub("", value).strip():
        raise TypeError(f"{value!r} is no duration: write '10s', '500ms' or '1m 30s'")
    return sum(float(number) * _UNITS[unit] for number, unit in parts)


def _duration(seconds: float) -> str:
    return f"{seconds:g}s" if seconds >= 1 else f"{seconds * 1000:g}ms"


class _Setting:
    """One setting: where it lies, and how its value is read and shown."""

    def __init__(
        self, attribute: str, modules: tuple[ModuleType, ...], read: Callable[[Any], Any], show: Callable[[Any], Any]
    ) -> None:
        self.attribute = attribute
        self.modules = modules
        self.read = read
        self.show = show
        self.default = show(getattr(modules[0], attribute))

    def get(self) -> Any:
        return self.show(getattr(self.modules[0], self.attribute))

    def put(self, value: Any) -> None:
        for module in self.modules:
            setattr(module, self.attribute, value)


_SETTINGS = {
    # How long the actors of this process have for their __cleanup__.
    "cleanup_timeout": _Setting("CLEANUP_TIMEOUT", (instance, async_instance), _seconds, _duration),
    # How long procs that this process stops have until they are killed.
    "process_exit_timeout": _Setting("STOP_GRACE", (meshes, hosts), _seconds, _duration),
}


def configure(**settings: Any) -> None:
    """Change settings of this process: all of them, or none if one is wrong.

    Raises:
        ValueError: there is no such setting here.
        TypeError: a value that it cannot have.
    """
    read: dict[str, Any] = {}
    for name, value in settings.items():
        setting = _SETTINGS.get(name)
        if setting is None:
            raise ValueError(f"invalid configuration key: `{name}`; those that exist here are {', '.join(_SETTINGS)}")
        try:
            read[name] = setting.read(value)
        except TypeError as e:
            raise TypeError(f"invalid value `{value!r}` for configuration key `{name}`: {e}") from None
    for name, value in read.items():
        _SETTINGS[name].put(value)


@contextmanager
def configured(**settings: Any) -> Generator[dict[str, Any]]:
    """Settings that hold inside a ``with`` block; gives all settings as they are there."""
    before = {name: _SETTINGS[name].get() for name in settings if name in _SETTINGS}
    configure(**settings)
    try:
        yield get_runtime_config()
    finally:
        configure(**before)


def get_global_config() -> dict[str, Any]:
    """All settings, as they are in this process now."""
    return {name: setting.get() for name, setting in _SETTINGS.items()}


#: The same: what ``configure`` has changed is all that there is beside the defaults.
get_runtime_config = get_global_config


def clear_runtime_config() -> None:
    """All settings are as they were at first."""
    configure(**{name: setting.default for name, setting in _SETTINGS.items()})
