"""A JupyterHub with users of this machine, and its environment: ``python -m tests.hub.hub`` makes the latter."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from tornado.httpclient import HTTPRequest
from tornado.websocket import websocket_connect

from bench.environments import REQUIREMENTS, STATE, EnvironmentFailed, python_for
from tests.browser.lab import ROOT, serve_panel
from tests.conftest import alive, wait_until
from tests.ports import free_port
from tests.waiting import patience

#: What the proxy of JupyterHub is made of: package.json and package-lock.json.
PROXY = REQUIREMENTS / "hub"


def proxy_command() -> list[str]:
    """The command that starts JupyterHub's proxy, which is a program of node; it is installed when first needed.

    Raises EnvironmentFailed when it cannot be installed here.
    """
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        raise EnvironmentFailed("the proxy of JupyterHub needs node 20 or later, with npm")
    folder = STATE.resolve() / "envs" / "hub-proxy"  # npm does not find packages behind a link
    stamp = folder / ".installed"
    wanted = hashlib.sha256((PROXY / "package-lock.json").read_bytes()).hexdigest()
    if not stamp.exists() or stamp.read_text() != wanted:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(PROXY, folder)
        install = [npm, "--prefix", str(folder), "ci", "--ignore-scripts", "--no-audit", "--loglevel=error"]
        done = subprocess.run(install, capture_output=True, text=True)
        if done.returncode:
            said = [line.strip() for line in done.stderr.replace("npm error", "").splitlines() if line.strip()]
            why = " ".join(said[:2]) or f"exit status {done.returncode}"
            raise EnvironmentFailed(f"the proxy of JupyterHub could not be installed by npm: {why}")
        stamp.write_text(wanted)
    return [node, str(folder / "node_modules" / "configurable-http-proxy" / "bin" / "configurable-http-proxy")]


def seen_by_all(paths: Iterable[Path]) -> list[str]:
    """The beginning of a command line whose program sees these folders in places that every user may enter.

    A folder above them may be closed to other users, such as the home of root, in which an interpreter lies. In the
    file systems that the program sees, an empty folder takes the place of that one, and holds these alone.
    """
    closed: dict[Path, list[Path]] = {}
    for path in {each.resolve() for each in paths}:
        above = next((each for each in reversed(path.parents) if not each.stat().st_mode & 0o001), None)
        if above is not None:
            closed.setdefault(above, []).append(path)
    if not closed:
        return []
    lines = ["aside=$(mktemp -d)", "mount -t tmpfs none $aside"]
    for above, below in closed.items():
        kept = [(path, f"$aside/{number}") for number, path in enumerate(below)]
        lines += [f"mkdir {aside}; mount --bind '{path}' {aside}" for path, aside in kept]
        lines += [f"mount -t tmpfs -o mode=755 none '{above}'"]
        lines += [f"mkdir -p '{path}'; mount --move {aside} '{path}'; rmdir {aside}" for path, aside in kept]
    lines += ["umount $aside", "rmdir $aside", 'exec "$@"']
    return ["unshare", "--mount", "--propagation", "private", "sh", "-ec", "\n".join(lines), "sh"]


def ask(url: str, method: str = "GET", token: str = "", body: Any = None, bearer: str = "") -> tuple[int, str]:
    """A request: the status of the answer, and its text."""
    headers = {"Authorization": f"token {token}"} if token else {"Authorization": f"Bearer {bearer}"} if bearer else {}
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, method=method, data=data, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=patience(60)) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


class HubUser:
    """A user of a hub, and the server that the hub starts for the user.

    Attributes:
        name: the name for the hub.
        uid: the number for this machine.
        folder: the home, in whose `work` the notebooks are.
        url: the address of the server, below the hub's.
        token: of its pages: none, as they come in by their cookies.
        api_token: with which programs of this user come in; empty until `start`.
    """

    token = ""
    api_token = ""

    def __init__(self, hub: Hub, name: str, uid: int) -> None:
        self._hub = hub
        self.name = name
        self.uid = uid
        self.folder = hub.folder / "home" / name
        self.url = f"{hub.url}user/{name}/"
        (self.folder / "work").mkdir(mode=0o700, parents=True)
        for each in (self.folder, self.folder / "work"):
            os.chown(each, uid, uid)
        self.folder.chmod(0o700)

    def start(self) -> None:
        """Have the hub start the server, if it has not, and wait for it; get a token."""
        if not self.is_up():
            self._hub.api(f"users/{self.name}/server", "POST")
        wait_until(self.is_up, f"the server of {self.name} has started", 90)
        self.api_token = json.loads(self._hub.api(f"users/{self.name}/tokens", "POST"))["token"]

    def is_up(self) -> bool:
        """Whether the hub says that the server is there."""
        about = json.loads(self._hub.api(f"users/{self.name}"))
        return bool(about["servers"].get("", {}).get("ready"))

    def stop(self) -> None:
        """Have the hub end the server, and wait until it has ended."""
        self._hub.api(f"users/{self.name}/server", "DELETE")
        wait_until(lambda: not json.loads(self._hub.api(f"users/{self.name}"))["servers"], "the server has ended", 90)

    def write(self, name: str, text: str) -> None:
        """Write a file of this user into the folder of notebooks."""
        path = self.folder / "work" / name
        path.write_text(text)
        os.chown(path, self.uid, self.uid)

    def processes(self) -> set[int]:
        """All processes of this user."""
        found: set[int] = set()
        for entry in Path("/proc").iterdir():
            with suppress(OSError):
                if entry.name.isdigit() and entry.stat().st_uid == self.uid and alive(int(entry.name)):
                    found.add(int(entry.name))
        return found

    def run(self, *cells: str) -> list[str]:
        """Run cells in a kernel of this user, which then ends; what each has put out, as text."""
        kernel = json.loads(ask(f"{self.url}api/kernels", "POST", self.api_token, {"name": "monarch"})[1])["id"]
        address = f"{self.url.replace('http', 'ws', 1)}api/kernels/{kernel}/channels"
        request = HTTPRequest(address, headers={"Authorization": f"token {self.api_token}"})
        try:
            # The thread of the tests has the loop of the browser.
            with ThreadPoolExecutor(1) as pool:
                return pool.submit(asyncio.run, _run(request, cells)).result(patience(120))
        finally:
            ask(f"{self.url}api/kernels/{kernel}", "DELETE", self.api_token)


async def _run(request: HTTPRequest, cells: Iterable[str]) -> list[str]:
    socket = await websocket_connect(request)
    found = [await _output(socket, code) for code in cells]
    socket.close()
    return found


async def _output(socket: Any, code: str) -> str:
    number, said, replied, idle = uuid.uuid4().hex, [], False, False
    header = {"msg_id": number, "msg_type": "execute_request", "session": number, "username": "", "version": "5.3"}
    content = {"code": code, "silent": False, "store_history": True, "allow_stdin": False, "stop_on_error": True}
    message = {"header": header, "parent_header": {}, "metadata": {}, "content": content, "channel": "shell"}
    await socket.write_message(json.dumps(message))
    while not (replied and idle):
        told = json.loads(await asyncio.wait_for(socket.read_message(), patience(60)))
        if told["parent_header"].get("msg_id") != number:
            continue
        kind, content = told["header"]["msg_type"], told["content"]
        replied |= kind == "execute_reply"
        idle |= kind == "status" and content["execution_state"] == "idle"
        if kind == "error":
            said.append(f"{content['ename']}: {content['evalue']}")
        elif kind in ("stream", "display_data", "execute_result"):
            said.append(content.get("text") or content["data"].get("text/plain", ""))
    return "".join(said)


class Hub:
    """A JupyterHub of its own, whose users' servers run as other users of this machine. Only root can start it.

    The hub, its proxy and the servers run in `python`'s environment; the kernels in that of the tests.

    Args:
        python: the interpreter that has JupyterHub.
        names: of the users.

    Attributes:
        folder: its files; all users may enter it.
        url: its address, with the prefix under which all its pages are.
        password: of each user.
    """

    def __init__(self, python: Path, *names: str) -> None:
        self._python = python
        self._proxy = proxy_command()
        self.folder = Path(tempfile.mkdtemp(prefix="mk-hub-", dir="/tmp"))
        self.url = f"http://127.0.0.1:{free_port()}/jupyter/"
        self.password = secrets.token_hex(8)
        self._token = secrets.token_hex(16)
        self.folder.chmod(0o711)
        # No other user of this machine has these numbers: they are of this process.
        self.users = {name: HubUser(self, name, 100_000 + 10 * os.getpid() + at) for at, name in enumerate(names)}
        self._private = self.folder / "hub"

    def __enter__(self) -> Hub:
        shared = self.folder / "tmp"  # to these users, what /tmp is
        shared.mkdir()
        shared.chmod(0o1777)
        self._private.mkdir(mode=0o700)
        data, config = self.folder / "share" / "jupyter", self.folder / "config"
        serve_panel(data, config)
        page = {"page_config_data": {"buildAvailable": False, "buildCheck": False}}
        lab = {"expose_app_in_browser": True, "check_for_updates_class": "jupyterlab.NeverCheckForUpdate"}
        settings = {"ServerApp": {"tornado_settings": page}, "LabApp": lab}
        (config / "jupyter_server_config.json").write_text(json.dumps(settings))
        given = {
            "url": self.url,
            "hub_port": free_port(),
            "proxy_port": free_port(),
            "proxy": self._proxy,
            "server": [str(self._python), "-m", "jupyterhub.singleuser"],
            "token": self._token,
            "password": self.password,
            "users": {user.name: user.uid for user in self.users.values()},
            "homes": str(self.folder / "home"),
            "private": str(self._private),
            "environment": {
                "TMPDIR": str(shared),
                "JUPYTER_PATH": str(data),
                "JUPYTER_CONFIG_PATH": str(config),
                "JUPYTER_PREFER_ENV_PATH": "0",
                "PYTHONPATH": str(ROOT),
                "PYDEVD_DISABLE_FILE_VALIDATION": "1",
            },
        }
        kept = ("PATH", "LANG", "HOME", "TMPDIR")
        env = {name: value for name, value in os.environ.items() if name in kept}
        program = [str(self._python), "-m", "jupyterhub", "-f", str(Path(__file__).with_name("jupyterhub_config.py"))]
        node, proxy = map(Path, self._proxy)
        programs = [Path(sys.base_prefix), Path(sys.prefix), self._python.parents[1], node.resolve().parents[1], proxy]
        with (self._private / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [*seen_by_all([ROOT, *programs]), *program],
                env={**env, "MK_HUB": json.dumps(given)},
                cwd=self._private,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            wait_until(self._is_up, "the hub has started", 60)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_exc: object) -> None:
        self._end()

    def api(self, path: str, method: str = "GET") -> str:
        """A request of an administrator to the hub; the text of the answer."""
        status, text = ask(f"{self.url}hub/api/{path}", method, self._token)
        assert status < 300, f"{method} {path}: {status} {text}\n{self.log()}"
        return text

    def log(self) -> str:
        """What the hub, its proxy and the servers have written."""
        return (self._private / "log").read_text(errors="replace")

    def sign_in(self, page: Any, user: HubUser) -> None:
        """Sign in on the hub's own page, and wait for JupyterLab."""
        page.goto(f"{self.url}hub/login")
        page.locator("input[name=username]").fill(user.name)
        page.locator("input[name=password]").fill(self.password)
        page.locator("input[type=submit], button[type=submit]").first.click()
        page.wait_for_url(f"{user.url}lab*", timeout=1e3 * patience(90))

    def _is_up(self) -> bool:
        assert self._process.poll() is None, self.log()
        return "JupyterHub is now running" in self.log()

    def _end(self) -> None:
        self._process.send_signal(signal.SIGTERM)  # it ends its proxy and the servers
        try:
            self._process.wait(patience(30))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for user in self.users.values():
            for pid in user.processes():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            wait_until(lambda user=user: not user.processes(), f"all processes of {user.name} have ended")
        shutil.rmtree(self.folder)


if __name__ == "__main__":
    try:
        python_for("hub")
        proxy_command()
    except EnvironmentFailed as error:
        sys.exit(str(error))
