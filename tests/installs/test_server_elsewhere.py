"""A Jupyter server whose environment is not that of the kernel: its page has the panel, kept meshes and live views."""

from __future__ import annotations

import json
import queue
import re
import secrets
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.blocking.client import BlockingKernelClient

from monarch_kernel import __version__
from tests.installs.conftest import Environment, clean, install, uv
from tests.waiting import end_jupyter, jupyter_url, patience, wait_until

SAYS_HELLO = "%mesh up --procs 1\nimport sys, monarch_kernel\nprint(sys.prefix)"


class Page:
    """What a page asks of a running server."""

    def __init__(self, url: str, token: str, log: Path) -> None:
        self.url = url
        self.log = log
        self._headers = {"Authorization": f"token {token}"}

    def get(self, path: str, body: Any = None) -> str:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data=data, headers=self._headers)
        with urllib.request.urlopen(request, timeout=patience(30)) as reply:
            return reply.read().decode()

    def extensions(self) -> set[str]:
        """The names of the extensions that the page loads."""
        config = re.search(
            r'<script id="jupyter-config-data" type="application/json">(.*?)</script>', self.get("lab"), re.S
        )
        assert config is not None
        return {each["name"] for each in json.loads(config[1])["federated_extensions"]}


@contextmanager
def serving(python: Path, home: Path) -> Iterator[Page]:
    """JupyterLab of an environment, for a user with this home."""
    home.mkdir(exist_ok=True)
    token, log, runtime = secrets.token_hex(8), home / "server.log", home / "runtime"
    env = clean(HOME=str(home), JUPYTER_TOKEN=token, JUPYTER_RUNTIME_DIR=str(runtime))
    command = [
        *(str(python), "-m", "jupyterlab", "--no-browser", "--allow-root", "--ServerApp.port=0"),
        *("--ServerApp.ip=127.0.0.1", f"--ServerApp.root_dir={home}"),
    ]
    with log.open("wb") as file:
        server = subprocess.Popen(
            command, env=env, cwd=home, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
        )
    try:
        yield Page(jupyter_url(server, runtime, log), token, log)
    finally:
        end_jupyter(server)


def is_ready(client: BlockingKernelClient) -> bool:
    """Ask a kernel. `wait_for_ready` would take one that loads for long for a dead one."""
    client.kernel_info()
    try:
        client.get_shell_msg(timeout=5)
        client.get_iopub_msg(timeout=0.5)
    except queue.Empty:
        return False
    return True


def printed(page: Page, runtime: Path, code: str) -> str:
    """What a cell prints in a new kernel of the server, the Monarch one."""
    kernel = json.loads(page.get("api/kernels", {"name": "monarch"}))["id"]
    client = BlockingKernelClient(connection_file=str(runtime / f"kernel-{kernel}.json"))
    wait_until((runtime / f"kernel-{kernel}.json").exists, "the server has started the kernel")
    client.load_connection_file()
    client.start_channels()
    said: list[str] = []
    try:
        wait_until(lambda: is_ready(client), "the kernel answers, and its output is heard", 90)
        reply = client.execute_interactive(
            code,
            timeout=patience(60),
            output_hook=lambda message: said.append(message["content"].get("text", "")),
        )
        assert reply["content"]["status"] == "ok", reply
    finally:
        client.stop_channels()
    return "".join(said)


def doctor(python: Path, home: Path, *words: str) -> tuple[int, dict[str, dict[str, Any]]]:
    """The exit status of `monarch-kernel doctor` of an environment, and its parts."""
    command = [str(python.parent / "monarch-kernel"), "doctor", *words, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=clean(HOME=str(home)), cwd=home)
    return done.returncode, {part["name"]: part for part in json.loads(done.stdout)["parts"]}


def monarch_kernel(python: Path, home: Path, *words: str) -> None:
    """Run a command of an environment."""
    subprocess.run([str(python.parent / "monarch-kernel"), *words], check=True, timeout=60, env=clean(HOME=str(home)))


def listed(python: Path, home: Path, module: str) -> str:
    command = [str(python), "-m", module, "list"]
    env = clean(HOME=str(home), NO_COLOR="1")
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True, env=env)
    return done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_wheel_without_its_dependencies_serves_the_page(
    wheel: Path, environment: Environment, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    server = environment()
    install(server, "jupyterlab")
    install(server, "--no-deps", wheel)

    # Jupyter's own tools find both parts.
    panel = next(line for line in listed(server, home, "jupyterlab.labextensions").splitlines() if "monarch-" in line)
    assert f"v{__version__.replace('.dev', '-dev')}" in panel and "enabled" in panel and "OK" in panel
    extensions = listed(server, home, "jupyter_server.extension.serverextension").splitlines()
    assert "enabled" in next(line for line in extensions if "monarch_kernel.server" in line)

    # The panel is there; what is missing is named, and the server says it in one line and goes on.
    status, parts = doctor(server, home, "server")
    assert status == 1
    assert {name: part["state"] for name, part in parts.items()} == {
        "kernelspec": "broken",
        "jupyter": "ok",
        "panel": "ok",
        "server-extension": "broken",
        "widget-manager": "missing",
    }
    with serving(server, home) as page:
        assert "monarch-kernel-lab" in page.extensions()
        (said,) = [
            line for line in page.log.read_text().splitlines() if "monarch_kernel.server" in line and "lacks" in line
        ]
        assert "'monarch-kernel doctor server' says how to add it" in said
        assert "Traceback" not in page.log.read_text()

    # Each command that it prints is run as it is; afterwards, nothing is missing.
    for name in ("server-extension", "widget-manager"):
        program, *words = parts[name]["command"].split()
        assert program == "uv" and str(server) in words
        uv(*words)
    # The kernelspec of the wheel would hide that of the kernel's own environment.
    assert parts["kernelspec"]["command"] == "monarch-kernel uninstall --sys-prefix"
    monarch_kernel(server, home, "uninstall", "--sys-prefix")
    status, parts = doctor(server, home, "server")
    assert (status, [name for name, part in parts.items() if part["state"] != "ok"]) == (1, ["kernelspec"])

    # The kernel has an environment of its own, and comes to the server by the user's folder.
    kernel = environment()
    install(kernel, wheel)
    status, parts = doctor(kernel, home)
    assert (status, parts["panel"]["state"]) == (0, "elsewhere")
    assert parts["kernelspec"]["command"] == "monarch-kernel install --user"
    monarch_kernel(kernel, home, "install", "--user")
    assert doctor(server, home, "server")[0] == 0
    with serving(server, home) as page:
        assert {"monarch-kernel-lab", "anywidget", "@jupyter-widgets/jupyterlab-manager"} <= page.extensions()
        assert json.loads(page.get("monarch-kernel/api/kept"))["meshes"] == []
        assert printed(page, home / "runtime", SAYS_HELLO).endswith(f"{kernel.parent.parent}\n")
