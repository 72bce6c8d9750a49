"""Settings of this process that can be changed while it runs, under Monarch's names.

The module that uses a setting holds its value. This module has the names, and the text forms of the values. All of
Monarch's settings exist: those without an effect here are checked and stored, so that programs can set and read them.
"""

from __future__ import annotations

import enum
import os
import re
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from monarch_kernel import environment, logs
from monarch_kernel.runtime.actor import output, transports
from monarch_kernel.runtime.actor.definition import is_coroutine_function
from monarch_kernel.runtime.actor.execution import instance
from monarch_kernel.runtime.actor.hosts import attachment
from monarch_kernel.runtime.actor.hosts import host_mesh as hosts
from monarch_kernel.runtime.actor.meshes import proc_mesh as meshes
from monarch_kernel.runtime.transfer import backend_settings as transfer

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_PART = r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)\s*"


def _seconds(value: object) -> float:
    if not isinstance(value, str):
        raise TypeError(f"it must be a string such as '10s' or '500ms', not {value!r}")
    parts = re.findall(_PART, value)
    if not parts or re.sub(_PART, "", value).strip():
        raise TypeError(f"{value!r} is not a duration: write '10s', '500ms' or '1m 30s'")
    return sum(float(number) * _UNITS[unit] for number, unit in parts)


def _duration(seconds: float) -> str:
    left = round(seconds * 1000)
    parts: list[str] = []
    for unit in ("d", "h", "m", "s", "ms"):
        count, left = divmod(left, round(_UNITS[unit] * 1000))
        if count:
            parts.append(f"{count}{unit}")
    return " ".join(parts) or "0s"


def _start_limit(value: object) -> float:
    seconds = _seconds(value)
    if not seconds:
        raise ValueError("a process needs some time")
    return seconds


def _show_start_limit(seconds: float) -> str:
    return _duration(seconds or environment.START_LIMIT.get())


def _boolean(value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError("it must be True or False")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError("it must be a string")
    return value


def _number(value: object) -> int:
    if not isinstance(value, int):
        raise TypeError("it must be a whole number")
    if value < 0:
        raise ValueError("it must not be negative")
    return int(value)


def _real(value: object) -> float:
    if not isinstance(value, int | float):
        raise TypeError("it must be a number")
    return float(value)


def _encoding(value: object) -> Encoding:
    if not isinstance(value, Encoding):
        raise TypeError("it must be an Encoding")
    return value


def _or_none(read: Callable[[object], object]) -> Callable[[Any], Any]:
    return lambda value: None if value is None else read(value)


class Encoding(enum.Enum):
    """Monarch's names for encodings of messages, for ``default_encoding``. Here there is only one encoding."""

    Bincode = "bincode"
    Json = "json"
    Multipart = "multipart"


def _transport(value: object) -> object:
    if not isinstance(value, str | transports.ChannelTransport):
        raise TypeError("it must be a ChannelTransport, its name or an address")
    return transports.checked(value)


def _same(value: object) -> object:
    return value


class _Setting:
    """One setting: the modules that hold it, and how its value is read and shown."""

    def __init__(
        self,
        attribute: str,
        places: tuple[ModuleType, ...],
        read: Callable[[object], object],
        show: Callable[[Any], Any] = _same,
    ) -> None:
        self.attribute = attribute
        self.places = places
        self.read = read
        self.show = show
        self.first: tuple[Any] | None = None  # the value before the first change

    def change(self, value: object) -> None:
        if self.first is None:
            self.first = (self.get(),)
        self.put(value)

    def clear(self) -> None:
        if self.first is not None:
            self.put(self.first[0])

    def get(self) -> Any:
        return getattr(self.places[0], self.attribute)

    def put(self, value: object) -> None:
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


class _Kept(_Setting):
    """A setting of Monarch without an effect here: it is checked, stored and returned.

    Args:
        value: Monarch's default.
    """

    def __init__(
        self, name: str, value: object, read: Callable[[object], object], show: Callable[[Any], Any] = _same
    ) -> None:
        super().__init__("value", (), read, show)
        self.name = name
        self.value = value if value is None else read(value)

    def change(self, value: object) -> None:
        logs.logger(__name__).debug("the setting %s means nothing here: it is kept, and changes nothing", self.name)
        super().change(value)

    def get(self) -> Any:
        return self.value

    def put(self, value: object) -> None:
        self.value = value


def _kept(
    read: Callable[[object], object], show: Callable[[Any], Any] = _same, **defaults: object
) -> dict[str, _Setting]:
    return {name: _Kept(name, value, read, show) for name, value in defaults.items()}


def _prefixed(prefix: str, names: str) -> dict[str, str]:
    return {name: prefix + name.upper() for name in names.split()}


_SETTINGS: dict[str, _Setting] = {
    # The time limit for the __cleanup__ of an actor of this process.
    "cleanup_timeout": _Setting("CLEANUP_TIMEOUT", (instance,), _seconds, _duration),
    # The time limit for a proc that this process stops, after which it is killed.
    "process_exit_timeout": _Setting("STOP_GRACE", (meshes, hosts), _seconds, _duration),
    # The time limit for the start of a host agent.
    "host_spawn_ready_timeout": _Setting("START_TIMEOUT", (hosts,), _start_limit, _duration),
    # The time limit for the start of procs that this process spawns.
    "mesh_proc_spawn_max_idle": _Setting("START_LIMIT", (hosts,), _start_limit, _show_start_limit),
    # The time limit for a worker to answer when this process attaches to it.
    "mesh_attach_config_timeout": _Setting("ATTACH_TIMEOUT", (attachment,), _start_limit, _duration),
    "prefix_with_rank": _Setting("PREFIX_WITH_RANK", (output,), _boolean),
    "rdma_allow_tcp_fallback": _TcpFallback(),
    "default_transport": _Setting("DEFAULT", (transports,), _transport),
    **_kept(
        _seconds,
        _duration,
        actor_spawn_max_idle="30s",
        channel_net_rx_buffer_full_check_interval="5s",
        channel_reconnect_timeout="1m",
        channel_tcp_keepalive_idle="1m",
        forwarder_flush_timeout="5s",
        get_actor_state_max_idle="30s",
        get_proc_state_max_idle="1m",
        mesh_admin_config_dump_bridge_timeout="5s",
        mesh_admin_pyspy_bridge_timeout="13s",
        mesh_admin_pyspy_client_timeout="20s",
        mesh_admin_pyspy_max_profile_duration="5m",
        mesh_admin_pyspy_timeout="10s",
        mesh_admin_query_child_timeout="100ms",
        mesh_admin_resolve_actor_timeout="200ms",
        mesh_admin_single_host_timeout="3s",
        mesh_admin_tree_timeout="10s",
        mesh_terminate_timeout="10s",
        message_ack_time_interval="500ms",
        message_delivery_timeout="30s",
        otel_metric_export_interval="1s",
        pending_actor_delivery_timeout="30s",
        proc_stop_max_idle="30s",
        process_memory_metric_interval="5m",
        rdma_qp_init_timeout="30s",
        server_heartbeat_interval="1s",
        split_max_buffer_age="50ms",
        stop_actor_timeout="10s",
        stop_grace_period="10s",
        supervision_watchdog_timeout="2m",
    ),
    **_kept(_or_none(_seconds), lambda seconds: seconds and _duration(seconds), mesh_orphan_timeout="1m"),
    **_kept(
        _number,
        codec_max_frame_length=10 * 1024**3,
        max_cast_dimension_size=16,
        max_cast_fanout=16,
        mesh_admin_max_concurrent_resolves=2,
        mesh_terminate_concurrency=16,
        message_ack_every_n_messages=1000,
        message_ttl_default=64,
        rdma_max_chunk_size_mb=64,
        rdma_min_stripe_size_kb=512,
        rdma_qps_per_cq=64,
        rdma_qps_per_peer=4,
        rdma_runtime_worker_threads=4,
        rdma_tcp_fallback_parallelism=1,
        read_log_buffer=100,
        sequencer_max_locked_keys=128,
        small_write_threshold=256,
        split_max_buffer_size=5,
        tail_log_lines=0,
        terminated_snapshot_retention=100,
    ),
    **_kept(_or_none(_number), rdma_max_nics_per_buffer=None, tokio_worker_threads=None),
    **_kept(_real, message_latency_sampling_rate=0.01),
    **_kept(
        _boolean,
        enable_dest_actor_reordering_buffer=True,
        enable_file_capture=False,
        enable_log_forwarding=True,  # the output of ranks always is
        enable_otel_metrics=True,
        enable_otel_tracing=True,
        enable_recorder_tracing=True,
        enable_sqlite_tracing=False,
        enable_unawaited_python_task_traceback=False,
        force_file_log=False,
        mesh_bootstrap_enable_pdeathsig=True,
        rdma_cq_poller_per_device=True,
        rdma_disable_ibverbs=False,
        rdma_host_odp=False,
        scuba_log_enter_exit=False,
        use_direct_spawn=False,
    ),
    **_kept(
        _text,
        channel_tcp_congestion="",
        file_log_level="",
        mesh_admin_addr="[::]:1729",
        monarch_log_suffix="",
        proc_launcher_kind="",
        pyspy_bin="",
        rdma_ibverbs_target="",
        rdma_peer_device_affinity="",
    ),
    **_kept(_encoding, default_encoding=Encoding.Multipart),
}

#: Settings whose environment variable in Monarch is not HYPERACTOR_MESH_ and the name. "": there is none.
_VARIABLES = {
    **_prefixed(
        "HYPERACTOR_",
        """
        channel_net_rx_buffer_full_check_interval channel_reconnect_timeout channel_tcp_congestion
        channel_tcp_keepalive_idle cleanup_timeout codec_max_frame_length enable_dest_actor_reordering_buffer
        force_file_log forwarder_flush_timeout host_spawn_ready_timeout mesh_admin_config_dump_bridge_timeout
        mesh_admin_max_concurrent_resolves mesh_admin_pyspy_bridge_timeout mesh_admin_pyspy_client_timeout
        mesh_admin_pyspy_max_profile_duration mesh_admin_pyspy_timeout mesh_admin_query_child_timeout
        mesh_admin_resolve_actor_timeout mesh_admin_single_host_timeout mesh_admin_tree_timeout
        mesh_attach_config_timeout mesh_bootstrap_enable_pdeathsig mesh_orphan_timeout mesh_proc_spawn_max_idle
        mesh_terminate_concurrency mesh_terminate_timeout message_ack_every_n_messages message_ack_time_interval
        message_delivery_timeout message_latency_sampling_rate message_ttl_default
        pending_actor_delivery_timeout prefix_with_rank process_exit_timeout process_memory_metric_interval
        read_log_buffer sequencer_max_locked_keys server_heartbeat_interval split_max_buffer_age
        split_max_buffer_size stop_actor_timeout terminated_snapshot_retention
        """,
    ),
    **{name: f"MONARCH_{name.upper()}" for name in _SETTINGS if name.startswith("rdma_")},
    **dict.fromkeys(
        (
            "default_encoding",
            "default_transport",
            "enable_otel_metrics",
            "enable_otel_tracing",
            "enable_recorder_tracing",
            "enable_sqlite_tracing",
            "mesh_admin_addr",
            "otel_metric_export_interval",
            "pyspy_bin",
            "scuba_log_enter_exit",
        ),
        "",
    ),
    "enable_unawaited_python_task_traceback": "MONARCH_HYPERACTOR_ENABLE_UNAWAITED_PYTHON_TASK_TRACEBACK",
    "file_log_level": "MONARCH_FILE_LOG",
    "monarch_log_suffix": "MONARCH_LOG_SUFFIX",
    "small_write_threshold": "MONARCH_HYPERACTOR_SMALL_WRITE_THRESHOLD",
    "stop_grace_period": "HYPERACTOR_REMOTE_STOP_GRACE_PERIOD",
    "tokio_worker_threads": "MONARCH_TOKIO_WORKER_THREADS",
}
_WORDS = {"true": True, "1": True, "false": False, "0": False}


def _variable(name: str) -> str:
    """Return the environment variable of a setting in Monarch; "": there is none."""
    return _VARIABLES.get(name, f"HYPERACTOR_MESH_{name.upper()}")


def _take_environment() -> None:
    """Apply Monarch's environment variables. Like in Monarch, unreadable values are ignored."""
    for name, setting in _SETTINGS.items():
        variable = _variable(name)
        text = os.environ.get(variable) if variable else None
        if text is None:
            continue
        for value in (text, _WORDS.get(text.lower()), int(text) if text.isdigit() else None):
            try:
                setting.put(setting.read(value))
            except (TypeError, ValueError):
                continue
            break
        else:
            logs.logger(__name__).debug("%s=%r is no value for the setting %s", variable, text, name)


_take_environment()


def configure(**settings: object) -> None:
    """Change settings of this process: all of them, or none if one is invalid.

    Raises:
        ValueError: the setting does not exist, or has no such value.
        TypeError: the value has the wrong type.
    """
    read: dict[str, object] = {}
    for name, value in settings.items():
        setting = _SETTINGS.get(name)
        if setting is None:
            raise ValueError(f"invalid configuration key: `{name}`; the keys are {', '.join(sorted(_SETTINGS))}")
        try:
            read[name] = setting.read(value)
        except (TypeError, ValueError) as e:
            raise type(e)(f"invalid value `{value!r}` for configuration key `{name}`: {e}") from None
    for name, value in read.items():
        _SETTINGS[name].change(value)


@contextmanager
def configured(**settings: object) -> Generator[dict[str, Any]]:
    """Change settings inside a ``with`` block; yields all settings."""
    before = {name: _SETTINGS[name].get() for name in settings if name in _SETTINGS}
    configure(**settings)
    try:
        yield get_runtime_config()
    finally:
        for name, value in before.items():
            _SETTINGS[name].put(value)


def get_global_config() -> dict[str, Any]:
    """Return all settings of this process and their current values."""
    return {name: setting.show(setting.get()) for name, setting in _SETTINGS.items()}


#: The same, as ``configure`` is the only source besides the defaults.
get_runtime_config = get_global_config


def clear_runtime_config() -> None:
    """Reset all settings to their values at the start of the process."""
    for setting in _SETTINGS.values():
        setting.clear()


def parametrize_config_pointwise(*settings: dict[str, object]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a pytest decorator that runs a test once with each of these groups of settings."""
    import functools

    import pytest  # pyright: ignore[reportMissingImports]

    def decorate(function: Callable[..., Any]) -> Callable[..., object]:
        if is_coroutine_function(function):

            @functools.wraps(function)
            async def awaited(*args: Any, _settings: dict[str, object], **kwargs: Any) -> object:
                with configured(**_settings):
                    return await function(*args, **kwargs)

            tested: Any = awaited
        else:

            @functools.wraps(function)
            def called(*args: object, _settings: dict[str, object], **kwargs: object) -> object:
                with configured(**_settings):
                    return function(*args, **kwargs)

            tested = called
        import inspect

        signature = inspect.signature(function)
        own = inspect.Parameter("_settings", inspect.Parameter.KEYWORD_ONLY)
        tested.__signature__ = signature.replace(parameters=[*signature.parameters.values(), own])  # pytest reads it
        return pytest.mark.parametrize("_settings", list(settings))(tested)

    return decorate


def parametrize_config(**options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a pytest decorator that runs a test once with each combination of these values of settings.

    Args:
        options: for each setting the values to test, in any collection.
    """
    from itertools import product

    combined = product(*(sorted(values, key=repr) for values in options.values()))
    return parametrize_config_pointwise(*(dict(zip(options, values, strict=True)) for values in combined))
