"""What the server tells of kept meshes, and to whom."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tornado.httpclient import HTTPClientError, HTTPRequest
from tornado.ioloop import IOLoop
from tornado.websocket import websocket_connect

from monarch_kernel.meshes import keep, kept
from tests.conftest import alive, wait_until
from tests.kept.actors import Counter
from tests.kept.conftest import nothing_kept
from tests.server.conftest import JupyterServer

ROOT = Path(__file__).parents[2]


def make(name: str = "t") -> Any:
    host = keep(name)
    mesh = host.hosts.spawn_procs(per_host={"gpus": 2}, name=name)
    counters = mesh.spawn("counters", Counter, 10)
    counters.say.call("first\nsecond").get()
    return host


def test_listed_looked_at_read_and_stopped(jupyter_server: JupyterServer, kept_folder: str) -> None:
    assert jupyter_server.ask("kept") == (200, {"meshes": []})
    host = make()
    wait_until(lambda: kept() and kept()[0].meshes and kept()[0].meshes[0].alive == 2, "it is described")
    status, about = jupyter_server.ask("kept")
    (mesh,) = about["meshes"]
    assert status == 200
    assert mesh["name"] == "t" and mesh["held_by"] == os.getpid() and mesh["attach"] == "%mesh attach t"
    assert mesh["meshes"] == [{"name": "t", "sizes": {"gpus": 2}, "ranks": 2, "alive": 2}]
    status, about = jupyter_server.ask("kept/t")
    assert [(rank["rank"], rank["state"]) for rank in about["ranks"]] == [(0, "alive"), (1, "alive")]
    assert all(rank["pid"] and rank["rss_bytes"] > 1e6 for rank in about["ranks"])

    status, logs = jupyter_server.ask("kept/t/logs?rank=1&tail=1")
    assert (status, logs) == (200, {"logs": [{"mesh": "t", "rank": 1, "text": "second\n"}]})

    status, error = jupyter_server.ask("kept/t/stop", "POST")
    assert status == 409 and "was not ended: process" in error["message"]
    host.detach()
    pids = [rank["pid"] for rank in about["ranks"]]
    status, about = jupyter_server.ask("kept/t/stop", "POST", {"force": False})
    assert (status, about["name"]) == (200, "t")
    assert not any(map(alive, pids)) and nothing_kept(kept_folder)


def test_bad_requests_are_answered_in_words(jupyter_server: JupyterServer) -> None:
    for path in ("kept/no", "kept/no/logs"):
        assert jupyter_server.ask(path) == (404, {"message": "there is no kept mesh 'no' (there are: none)"})
    assert jupyter_server.ask("kept/no/stop", "POST", {})[0] == 404
    status, error = jupyter_server.ask("kept/no/stop", "POST", {"force": "yes"})
    assert status == 400 and "force" in error["message"]
    for query, word in (("tail=x", "tail"), ("tail=-1", "tail"), ("rank=x", "rank")):
        status, error = jupyter_server.ask(f"kept/no/logs?{query}")
        assert status == 400 and word in error["message"]
    for path in ("kept/..%2fx", "kept/a%2fb", f"kept/{'x' * 33}"):
        assert jupyter_server.ask(path)[0] == 404


def test_nothing_without_the_token(jupyter_server: JupyterServer) -> None:
    for token in ("", "wrong"):
        for path, method in (
            ("kept", "GET"),
            ("kept/t", "GET"),
            ("kept/t/logs", "GET"),
            ("kept/t/stop", "POST"),
            ("openapi.json", "GET"),
            ("kept/events", "GET"),
        ):
            assert jupyter_server.ask(path, method, token=token)[0] == 403, (path, token)


def test_a_keeper_that_does_not_answer(jupyter_server: JupyterServer) -> None:
    host = make()
    (info,) = kept()
    os.kill(info.pid, signal.SIGSTOP)
    try:
        status, error = jupyter_server.ask("kept/t")
        assert status == 503 and "does not answer" in error["message"]
        assert jupyter_server.ask("kept")[0] == 200
    finally:
        os.kill(info.pid, signal.SIGCONT)
    host.down()


def test_pages_hear_of_changes(jupyter_server: JupyterServer) -> None:
    address = jupyter_server.url.replace("http", "ws") + "/monarch-kernel/api/kept/events"
    allowed = HTTPRequest(address, headers={"Authorization": f"token {jupyter_server.token}"})

    async def until(page: Any, count: int) -> list[dict[str, Any]]:
        while True:
            told = json.loads(await page.read_message())
            if told["kind"] == "kept" and sum(len(mesh["meshes"]) for mesh in told["meshes"]) == count:
                return told["meshes"]

    async def run() -> None:
        try:
            await websocket_connect(address)
        except HTTPClientError as error:
            assert error.code == 403
        else:
            raise AssertionError("it was let in without a token")
        one, two = await websocket_connect(allowed), await websocket_connect(allowed)
        await until(one, 0)
        await until(two, 0)
        host = await IOLoop.current().run_in_executor(pool, make)
        (mesh,) = await until(one, 1)
        assert mesh["held_by"] == os.getpid()
        one.close()
        await until(two, 1)
        await IOLoop.current().run_in_executor(pool, host.down)
        await until(two, 0)
        two.close()

    with ThreadPoolExecutor(1) as pool:
        loop = IOLoop()
        loop.run_sync(run, timeout=60)
        loop.close()


def test_the_description_is_what_is_there(jupyter_server: JupyterServer) -> None:
    status, about = jupyter_server.ask("openapi.json")
    assert status == 200 and about["servers"] == [{"url": "/user/ann/monarch-kernel/api"}]
    program = """
from monarch_kernel.server.routes import handlers
print("\\n".join(pattern for pattern, _ in handlers("/")))
"""
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    patterns = [re.sub(r"\(\[.*\)", "{name}", each).removeprefix("/monarch-kernel/api") for each in told.split()]
    assert sorted(patterns) == sorted(about["paths"])


def test_it_loads_without_torch_or_a_runtime(jupyter_server: JupyterServer) -> None:
    jupyter_server.ask("kept")
    maps = Path(f"/proc/{jupyter_server.pid}/maps").read_text()
    assert "libtorch" not in maps
    assert "monarch_kernel.server | extension was successfully loaded" in jupyter_server.log.read_text()
    program = "import sys, monarch_kernel.server.routes; print([m for m in ('torch', 'ipykernel') if m in sys.modules])"
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    assert told.strip() == "[]"
