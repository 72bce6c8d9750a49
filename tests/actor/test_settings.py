"""``monarch.config``, and which modules the alias ``monarch`` has."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import Any

import pytest

from monarch_kernel import config
from monarch_kernel.actor import Actor, endpoint, this_host
from monarch_kernel.runtime.actor import hosts, meshes
from tests.actor.actors import PATIENCE, started


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


def test_wrong_settings_change_nothing() -> None:
    first = config.get_global_config()
    for settings, error, message in (
        (
            {"no_such": 1},
            ValueError,
            "invalid configuration key: `no_such`; those that exist here are clean",
        ),
        ({"cleanup_timeout": 3}, TypeError, "invalid value `3` for configuration key `cleanup_timeout`: it must be a"),
        ({"cleanup_timeout": "soon"}, TypeError, "'soon' is no duration"),
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
for name in ("monarch.tools", "monarch.tools.config", "monarch.x.y", "monarch.rdma.z"):
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as e:
        print(e.name, "monarch_kernel." in str(e))
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout.splitlines() == [
        *["monarch_kernel.config"] * 2,
        "monarch.tools False",
        "monarch.tools False",
        "monarch.x False",
        "monarch.rdma.z False",
    ]
