"""``monarch.config``, and which modules the alias ``monarch`` has."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from typing import Any

import pytest

from monarch_kernel import config, environment
from monarch_kernel.actor import Actor, BootstrapCommand, ChannelTransport, SupervisionError, endpoint, this_host
from monarch_kernel.runtime.actor.hosts import host_mesh as hosts
from monarch_kernel.runtime.actor.meshes import proc_mesh as meshes
from monarch_kernel.runtime.transfer import backend_settings as transfer
from tests.actor.actors import PATIENCE, started
from tests.waiting import patience


class Waits(Actor):
    @endpoint
    def sleep(self, port: Any) -> None:
        port.send(None)
        threading.Event().wait()


def test_settings_are_changed_and_restored() -> None:
    first = config.get_global_config()
    assert first["process_exit_timeout"] == "5s"
    with config.configured(process_exit_timeout="1m 500ms") as inside:
        assert inside["process_exit_timeout"] == "60.5s"
        assert meshes.STOP_GRACE == hosts.STOP_GRACE == 60.5
    assert config.get_runtime_config() == first
    config.configure(cleanup_timeout="250ms")
    assert config.get_runtime_config()["cleanup_timeout"] == "250ms"
    config.clear_runtime_config()
    assert config.get_global_config() == first


def test_a_setting_has_its_effect() -> None:
    world = this_host().spawn_procs()
    opened = started(world.spawn("waits", Waits))
    with config.configured(process_exit_timeout="100ms"):
        world.stop().get(PATIENCE)
    assert "did not stop within 0.1 s" in str(opened.exception(PATIENCE))


def test_what_programs_written_for_monarch_set() -> None:
    first = config.get_global_config()
    assert first["enable_log_forwarding"] is True and first["rdma_allow_tcp_fallback"] is True
    wanted = {
        "enable_log_forwarding": True,
        "default_transport": ChannelTransport.TcpWithHostname,
        "codec_max_frame_length": 1 << 40,
        "actor_spawn_max_idle": "600s",
        "rdma_allow_tcp_fallback": False,
    }
    config.configure(**wanted)
    assert wanted.items() <= config.get_global_config().items()
    assert transfer.tcp_fallback() is False
    config.clear_runtime_config()
    assert config.get_global_config() == first
    assert transfer.tcp_fallback() is None and environment.RDMA_TCP_FALLBACK.name not in os.environ


def test_a_limit_on_starts(faults: Any) -> None:
    command = BootstrapCommand("sh", args=("-c", "sleep 1000"))
    with config.configured(mesh_proc_spawn_max_idle="250ms") as inside:
        assert inside["mesh_proc_spawn_max_idle"] == "250ms"
        world = this_host().spawn_procs(bootstrap_command=command, name="mute")
    with pytest.raises(SupervisionError, match=r"did not come up within 0.25 s .*mesh_proc_spawn_max_idle"):
        world.initialized.get(PATIENCE)
    assert "did not come up" in faults.get(timeout=PATIENCE).report()


def test_a_wrong_environment_stops_no_import() -> None:
    env = {**os.environ, environment.RDMA_TCP_FALLBACK.name: "2"}
    script = """
from monarch_kernel.actor import config
config.clear_runtime_config()
try:
    config.get_global_config()
except ValueError as e:
    print(e)
"""
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=patience(60), env=env, check=True
    )
    assert "MONARCH_KERNEL_RDMA_TCP_FALLBACK='2'" in run.stdout


def test_wrong_settings_change_nothing() -> None:
    first = config.get_global_config()
    for settings, error, message in (
        (
            {"no_such": 1},
            ValueError,
            "invalid configuration key: `no_such`; the keys that exist here are clean",
        ),
        ({"cleanup_timeout": 3}, TypeError, "invalid value `3` for configuration key `cleanup_timeout`: it must be a"),
        ({"cleanup_timeout": "soon"}, TypeError, "'soon' is not a duration"),
        ({"enable_log_forwarding": False}, ValueError, "output of ranks is always forwarded to their controller"),
        ({"prefix_with_rank": 1}, TypeError, "it must be True or False"),
        ({"actor_spawn_max_idle": "1s"}, ValueError, r"this limit does not exist here.* below 30s .*get\(timeout="),
        ({"default_transport": "pigeon"}, ValueError, "there is no transport 'pigeon'"),
        ({"message_delivery_timeout": "5m"}, ValueError, "set MONARCH_KERNEL_HEARTBEAT_TIMEOUT in the environment"),
    ):
        with pytest.raises(error, match=message):
            config.configure(process_exit_timeout="1s", **settings)  # type: ignore[arg-type]
        with pytest.raises(error, match=message), config.configured(**settings):  # type: ignore[arg-type]
            raise AssertionError("the block began")
        assert config.get_global_config() == first


def test_modules_of_monarch() -> None:
    script = """
import importlib, monarch_kernel
monarch_kernel.enable_monarch_imports()
for name in ("monarch.config", "monarch.actor.config"):
    print(importlib.import_module("monarch.config").__name__)
from monarch.tools.config.workspace import Workspace
from monarch.tools.config.environment import CondaEnvironment
print(Workspace.__module__, CondaEnvironment.__module__)
for name in ("monarch.tools.cli", "monarch.tools.config.defaults", "monarch.x.y", "monarch.rdma.z"):
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as e:
        print(e.name, "monarch_kernel." in str(e))
"""
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=patience(60), check=True
    )
    assert run.stdout.splitlines() == [
        *["monarch_kernel.config"] * 2,
        "workspace_sync.model.workspace workspace_sync.model.workspace",
        "monarch.tools.cli False",
        "monarch.tools.config.defaults False",
        "monarch.x False",
        "monarch.rdma.z False",
    ]
