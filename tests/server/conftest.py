"""A Jupyter server of its own, with the extension as an installation enables it, and kept meshes of the test's own."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import alive, children
from tests.kept.conftest import kept_folder
from tests.waiting import end_jupyter, jupyter_url

__all__ = ["kept_folder"]

CONFIG = Path(__file__).parents[2] / "monarch_kernel" / "server" / "config" / "monarch_kernel.json"


@dataclass
class JupyterServer:
    """A running server.

    Attributes:
        url: with the base URL of a hub, without a slash at the end.
        token: that opens it.
        pid: of its process.
        log: what it has written.
    """

    url: str
    token: str
    pid: int
    log: Path

    def ask(self, path: str, method: str = "GET", body: Any = None, token: str | None = None) -> tuple[int, Any]:
        """A request to the extension: the status, and the decoded JSON."""
        token = self.token if token is None else token
        headers = {"Authorization": f"token {token}"} if token else {}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"{self.url}/monarch-kernel/api/{path}", method=method, data=data, headers=headers
        )
        try:
            with urllib.request.urlopen(request, timeout=30) as reply:
                return reply.status, json.loads(reply.read())
        except urllib.error.HTTPError as error:
            text = error.read().decode()
            return error.code, json.loads(text) if text.startswith("{") else text


@pytest.fixture
def jupyter_server(tmp_path: Path, kept_folder: str) -> Iterator[JupyterServer]:
    config, token = tmp_path / "config", secrets.token_hex(8)
    enabled = config / "jupyter_server_config.d"
    enabled.mkdir(parents=True)
    shutil.copy(CONFIG, enabled)
    others = dict.fromkeys(
        ("jupyterlab", "notebook", "notebook_shim", "jupyter_lsp", "jupyter_server_terminals"), False
    )
    (enabled / "others.json").write_text(json.dumps({"ServerApp": {"jpserver_extensions": others}}))
    env = {
        **os.environ,
        "JUPYTER_CONFIG_DIR": str(config),
        "JUPYTER_PREFER_ENV_PATH": "0",
        "JUPYTER_DATA_DIR": str(tmp_path / "data"),
        "JUPYTER_RUNTIME_DIR": str(tmp_path / "runtime"),
        "JUPYTER_TOKEN": token,
    }
    log = tmp_path / "server.log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "jupyter_server", "--no-browser", "--allow-root", "--ServerApp.port=0"),
                *("--ServerApp.ip=127.0.0.1", f"--ServerApp.root_dir={tmp_path}", "--ServerApp.base_url=/user/ann/"),
            ],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        url = jupyter_url(process, tmp_path / "runtime", log)
        yield JupyterServer(url.rstrip("/"), token, process.pid, log)
    finally:
        left = children(process.pid)
        end_jupyter(process)
        assert not [pid for pid in left if alive(pid)]
