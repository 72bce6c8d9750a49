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
        assert inside["process_exit_timeout"] == "1m 500ms"
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
        "enable_log_forwarding": False,
        "default_transport": ChannelTransport.TcpWithHostname,
        "codec_max_frame_length": 1 << 20,
        "actor_spawn_max_idle": "1h 10m",
        "mesh_orphan_timeout": None,
        "message_delivery_timeout": "1d",
        "host_spawn_ready_timeout": "5m",
        "tail_log_lines": 100,
        "mesh_admin_addr": "[::]:1730",
        "message_latency_sampling_rate": 0.5,
        "default_encoding": config.Encoding.Json,
        "rdma_allow_tcp_fallback": False,
    }
    config.configure(**wanted)
    assert wanted.items() <= config.get_global_config().items()
    assert transfer.tcp_fallback() is False
    assert hosts.START_TIMEOUT == 300
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


def test_settings_of_the_environment() -> None:
    env = {
        "HYPERACTOR_CLEANUP_TIMEOUT": "7s",
        "HYPERACTOR_MESH_TAIL_LOG_LINES": "5",
        "HYPERACTOR_MESH_ENABLE_FILE_CAPTURE": "true",
        "MONARCH_RDMA_QPS_PER_PEER": "2",
        "HYPERACTOR_CODEC_MAX_FRAME_LENGTH": "many",
    }
    names = "cleanup_timeout", "tail_log_lines", "enable_file_capture", "rdma_qps_per_peer", "codec_max_frame_length"
    script = f"from monarch_kernel.config import get_global_config as g; print([g()[name] for name in {names}])"
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=patience(60), env=os.environ | env
    )
    assert (run.stdout, run.stderr) == (f"{['7s', 5, True, 2, 10 << 30]}\n", "")


@config.parametrize_config(tail_log_lines={1, 2}, prefix_with_rank={True, False})
def test_combinations_of_settings() -> None:
    COMBINED.append((config.get_global_config()["tail_log_lines"], config.get_global_config()["prefix_with_rank"]))
    assert len(COMBINED) < 4 or sorted(COMBINED) == [(1, False), (1, True), (2, False), (2, True)]


COMBINED: list[tuple[int, bool]] = []


def test_wrong_settings_change_nothing() -> None:
    first = config.get_global_config()
    for settings, error, message in (
        (
            {"no_such": 1},
            ValueError,
            "invalid configuration key: `no_such`; the keys are actor_spawn_max_idle, ",
        ),
        ({"cleanup_timeout": 3}, TypeError, "invalid value `3` for configuration key `cleanup_timeout`: it must be a"),
        ({"cleanup_timeout": "soon"}, TypeError, "'soon' is not a duration"),
        ({"enable_log_forwarding": "yes"}, TypeError, "it must be True or False"),
        ({"prefix_with_rank": 1}, TypeError, "it must be True or False"),
        ({"actor_spawn_max_idle": 1}, TypeError, "it must be a string such as '10s'"),
        ({"tail_log_lines": "5"}, TypeError, "it must be a whole number"),
        ({"tail_log_lines": -1}, ValueError, "it must not be negative"),
        ({"message_latency_sampling_rate": "5"}, TypeError, "it must be a number"),
        ({"mesh_admin_addr": 1729}, TypeError, "it must be a string"),
        ({"default_encoding": "json"}, TypeError, "it must be an Encoding"),
        ({"default_transport": "pigeon"}, ValueError, "there is no transport 'pigeon'"),
        ({"mesh_proc_spawn_max_idle": "0s"}, ValueError, "needs some time"),
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
for name in ("monarch.tools.debug_env", "monarch.notebook", "monarch.x.y", "monarch.rdma.z"):
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
        "monarch.tools.debug_env False",
        "monarch.notebook False",
        "monarch.x False",
        "monarch.rdma.z False",
    ]
