"""SkyPilot for tests: its own client, against an API server that is played on the loopback address (``sky_api``).

The nodes of clusters are behind a real sshd. It has a home of its own, as it changes ``~/.ssh/config``.

``python -m tests.launchers.sky_engine`` makes the environment with SkyPilot; `make test` calls it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.environments import EnvironmentFailed, python_for
from monarch_kernel.job import SkyPilotJob
from monarch_kernel.launchers.sky import SkyLauncher
from monarch_kernel.launchers.sky.launcher import client, close_clients
from tests.launchers.sshd import Sshd

#: How many nodes the cloud has; labels with which a cluster is never given, and is refused.
MOST, NEVER, REFUSED = 4, {"labels": {"zone": "never"}}, {"labels": {"zone": "refused"}}
SERVER = Path(__file__).with_name("sky_api.py")


class SkyPilot:
    """The API server, and what a launcher needs to use it."""

    def __init__(self, python: Path, folder: Path, sshd: Sshd) -> None:
        self.python = str(python)
        self.home = folder / "home"
        self.home.mkdir()
        (folder / "api").mkdir()
        argv = [self.python, "-P", str(SERVER), str(folder / "api"), str(sshd.port), str(sshd.folder / "user")]
        self._log = (folder / "log").open("wb")
        self._process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, env={**os.environ, **self.settings}
        )
        assert self._process.stdout is not None
        self.url = self._process.stdout.readline().decode().strip()
        assert self.url, (folder / "log").read_text()
        # ssh takes the home of the account, whatever HOME says: it is told where the names of nodes are.
        (folder / "config").write_text(f"Include {self.home}/.sky/generated/ssh/*\n")
        self.bin = folder / "bin"
        self.bin.mkdir()
        (self.bin / "sky").symlink_to(python.with_name("sky"))
        ssh = f'exec {shutil.which("ssh")} -F {folder}/config -i {sshd.folder}/user -o LogLevel=ERROR "$@"\n'
        (self.bin / "ssh").write_text(f"#!/bin/sh\n{ssh}")
        (self.bin / "ssh").chmod(0o755)

    @property
    def settings(self) -> dict[str, str]:
        """The environment of its programs."""
        return {"HOME": str(self.home), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}

    def job(self, hosts: int, resources: Any = None, **options: Any) -> SkyPilotJob:
        """A job with a mesh ``hosts``, with this interpreter."""
        return SkyPilotJob({"hosts": hosts}, resources, **{"python_exe": sys.executable, "idle": 60.0, **options})

    def asked(self, path: str) -> list[dict[str, Any]]:
        """The bodies of the requests for a path."""
        return [body for at, body in json.loads(self._get("/test/asked")) if at == path]

    def take(self, cluster: str) -> None:
        """Take a cluster away."""
        self._get(f"/test/take/{cluster}")

    def _get(self, path: str) -> bytes:
        with urllib.request.urlopen(self.url + path, timeout=30) as answer:
            return answer.read()

    def close(self) -> None:
        """End it."""
        self._process.communicate()
        self._log.close()


@pytest.fixture(scope="module")
def skypilot(sshd: Sshd, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SkyPilot]:
    """SkyPilot, with nothing in its home."""
    try:
        python = python_for("skypilot")
    except EnvironmentFailed as e:
        pytest.skip(str(e))
    found = SkyPilot(python, tmp_path_factory.mktemp("skypilot"), sshd)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**found.settings, "SKYPILOT_API_SERVER_ENDPOINT": found.url}.items():
            patch.setenv(name, value)
        patch.setenv("PATH", f"{found.bin}:{os.environ['PATH']}")
        assert client("", SkyLauncher.PATIENCE).ask("running")  # one process for all tests
        yield found
        close_clients()
    found.close()


if __name__ == "__main__":
    try:
        python_for("skypilot")
    except EnvironmentFailed as error:
        sys.exit(str(error))
