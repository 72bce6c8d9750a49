"""The nodes of a cluster under test: schedules Pods onto one node, and runs each as processes of this machine.

It does what a scheduler and a kubelet do as far as an API server can tell: it binds Pods, or says why it cannot; has
their variables and Secrets at hand; runs their command at an address of their own, 127.0.1.N; serves their logs;
tells how they have ended; and ends those that are deleted.
"""

from __future__ import annotations

import base64
import contextlib
import datetime
import http.server
import os
import re
import signal
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlparse

from monarch_kernel.launchers.kubernetes_api import ApiRefusedError, KubernetesApi

NODE = "n1"
GPU = "nvidia.com/gpu"
PATCH = "application/merge-patch+json"
PERIOD = 0.05


@dataclass
class Running:
    """The container of a Pod."""

    process: subprocess.Popen[bytes]
    log: Path
    ip: str
    started: str
    restarts: int = 0
    deadline: float = 0.0


class Kubelet:
    """Runs until ``close``.

    Args:
        api: as an administrator.
        folder: for logs and Secrets.
        cert, key: files, for the logs.
        gpus: of its node.
    """

    def __init__(self, api: KubernetesApi, folder: Path, cert: Path, key: Path, gpus: int = 2) -> None:
        self._api = api
        self._folder = folder
        self._gpus = gpus
        self._pods: dict[str, Running] = {}
        self._count = 0
        self._over = threading.Event()
        self.failed: list[str] = []
        self._server = self._serve(cert, key)
        addresses = [{"type": "InternalIP", "address": "127.0.0.1"}]
        has = {"cpu": "8", "memory": "8Gi", "pods": "110", GPU: str(gpus)}
        port = {"kubeletEndpoint": {"Port": self._server.server_address[1]}}
        node = {
            "metadata": {"name": NODE, "labels": {"kubernetes.io/hostname": NODE}},
            "status": {"addresses": addresses, "capacity": has, "allocatable": has, "daemonEndpoints": port},
        }
        api.request("POST", "/api/v1/nodes", node)
        self._threads = [
            threading.Thread(target=self._run, name="kubelet"),
            threading.Thread(target=self._server.serve_forever, args=(0.05,), name="kubelet-logs"),
        ]
        for thread in self._threads:
            thread.start()

    def evict(self, namespace: str, name: str, message: str) -> None:
        """End a Pod as a node does that is short of memory."""
        pod = self._api.request("GET", f"/api/v1/namespaces/{namespace}/pods/{name}")
        running = self._pods.pop(pod["metadata"]["uid"])
        _kill(running)
        self._patch(pod, {"phase": "Failed", "reason": "Evicted", "message": message})

    def close(self) -> None:
        """End its threads and all Pods."""
        self._over.set()
        self._server.shutdown()
        self._server.server_close()
        for thread in self._threads:
            thread.join()
        for running in self._pods.values():
            _kill(running)

    # -- Pods -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._over.wait(PERIOD):
            try:
                pods = self._api.request("GET", "/api/v1/pods")["items"]
                for pod in pods:
                    with contextlib.suppress(ApiRefusedError):  # it was changed or deleted meanwhile
                        self._step(pod, pods)
            except ConnectionError as e:
                if not self._over.is_set():
                    self.failed.append(str(e))

    def _step(self, pod: dict[str, Any], pods: list[dict[str, Any]]) -> None:
        meta, spec, status = pod["metadata"], pod["spec"], pod.get("status", {})
        running = self._pods.get(meta["uid"])
        if meta.get("deletionTimestamp"):
            self._end(pod, running)
        elif status.get("phase") in ("Failed", "Succeeded"):
            return
        elif not spec.get("nodeName"):
            self._schedule(pod, pods)
        elif running is None:
            self._start(pod)
        elif running.process.poll() is not None:
            self._ended(pod, running)

    def _schedule(self, pod: dict[str, Any], pods: list[dict[str, Any]]) -> None:
        taken = sum(_gpus(each) for each in pods if each["spec"].get("nodeName") and _lives(each))
        why = ""
        if pod["spec"].get("nodeSelector", {}).items() - {("kubernetes.io/hostname", NODE)}:
            why = "1 node(s) didn't match node selector."
        elif taken + _gpus(pod) > self._gpus:
            why = f"1 Insufficient {GPU}."
        if why:
            message = f"0/1 nodes are available: {why}"
            if message not in str(pod.get("status", {}).get("conditions", "")):
                said = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
                self._patch(pod, {"conditions": [said]})
            return
        target = {"apiVersion": "v1", "kind": "Node", "name": NODE}
        body = {"metadata": {"name": pod["metadata"]["name"]}, "target": target}
        self._api.request("POST", f"{_path(pod)}/binding", body)

    def _start(self, pod: dict[str, Any], restarts: int = 0) -> None:
        container = pod["spec"]["containers"][0]
        if container["image"].startswith("missing/"):
            if not pod.get("status", {}).get("containerStatuses"):
                why = f'Back-off pulling image "{container["image"]}": manifest unknown'
                waiting = {"waiting": {"reason": "ImagePullBackOff", "message": why}}
                self._patch(pod, {"containerStatuses": [self._container(pod, waiting)]})
            return
        self._count += 1
        ip = f"127.0.1.{self._count}"
        folder = self._folder / pod["metadata"]["uid"]
        folder.mkdir(mode=0o700, exist_ok=True)
        log = folder / f"{restarts}.log"
        variables = self._variables(pod, container, ip)
        argv = [*container["command"], *container.get("args", [])]
        argv = [re.sub(r"\$\((\w+)\)", lambda m: variables.get(m[1], m[0]), word) for word in argv]
        for at, to in self._secrets(pod, container, folder):
            argv = [word.replace(at, to) for word in argv]
        with open(log, "wb") as out:
            process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                cwd=folder,
                env={
                    "PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', '/usr/bin:/bin')}",
                    "HOME": str(folder),
                    **variables,
                },
                start_new_session=True,
            )
        running = Running(process, log, ip, _now(), restarts)
        self._pods[pod["metadata"]["uid"]] = running
        state = {"running": {"startedAt": running.started}}
        self._patch(
            pod,
            {
                "phase": "Running",
                "podIP": ip,
                "podIPs": [{"ip": ip}],
                "startTime": running.started,
                "containerStatuses": [self._container(pod, state, running)],
            },
        )

    def _variables(self, pod: dict[str, Any], container: dict[str, Any], ip: str) -> dict[str, str]:
        found: dict[str, str] = {}
        for source in container.get("envFrom", []):
            found |= self._secret(pod, source["secretRef"]["name"])
        for each in container.get("env", []):
            origin = each.get("valueFrom", {})
            if "fieldRef" in origin:
                found[each["name"]] = ip
            elif "secretKeyRef" in origin:
                found[each["name"]] = self._secret(pod, origin["secretKeyRef"]["name"])[origin["secretKeyRef"]["key"]]
            else:
                found[each["name"]] = each.get("value", "")
        return found

    def _secret(self, pod: dict[str, Any], name: str) -> dict[str, str]:
        path = f"/api/v1/namespaces/{pod['metadata']['namespace']}/secrets/{name}"
        data = self._api.request("GET", path)["data"]
        return {key: base64.b64decode(value).decode() for key, value in data.items()}

    def _secrets(self, pod: dict[str, Any], container: dict[str, Any], folder: Path) -> Iterator[tuple[str, str]]:
        """Writes the Secrets that are mounted; where they should be, and where they are."""
        mounts = {each["name"]: each["mountPath"] for each in container.get("volumeMounts", [])}
        for volume in pod["spec"].get("volumes", []):
            if (source := volume.get("secret")) is None or volume["name"] not in mounts:
                continue
            data = self._secret(pod, source["secretName"])
            (folder / volume["name"]).mkdir(exist_ok=True)
            for item in source["items"]:
                path = folder / volume["name"] / item["path"]
                path.write_text(data[item["key"]])
                path.chmod(source["defaultMode"])
            yield mounts[volume["name"]], str(folder / volume["name"])

    def _ended(self, pod: dict[str, Any], running: Running) -> None:
        code = running.process.returncode
        code = 128 - code if code < 0 else code
        if pod["spec"]["restartPolicy"] == "Always":
            self._start(pod, running.restarts + 1)
            return
        state = {
            "terminated": {
                "exitCode": code,
                "reason": "Error" if code else "Completed",
                "message": running.log.read_text(errors="replace")[-2048:] if code else "",
                "containerID": f"process://{running.process.pid}",
                "startedAt": running.started,
                "finishedAt": _now(),
            }
        }
        phase = "Failed" if code else "Succeeded"
        self._patch(pod, {"phase": phase, "containerStatuses": [self._container(pod, state, running)]})

    def _end(self, pod: dict[str, Any], running: Running | None) -> None:
        if running is not None and running.process.poll() is None:
            grace = pod["metadata"].get("deletionGracePeriodSeconds", 30)
            if not running.deadline:
                running.deadline = time.monotonic() + grace
                os.killpg(running.process.pid, signal.SIGTERM)
            elif time.monotonic() > running.deadline:
                _kill(running)
            return
        self._pods.pop(pod["metadata"]["uid"], None)
        body = {"gracePeriodSeconds": 0, "preconditions": {"uid": pod["metadata"]["uid"]}}
        self._api.request("DELETE", _path(pod), body)

    def _container(self, pod: dict[str, Any], state: dict[str, Any], running: Running | None = None) -> dict[str, Any]:
        container = pod["spec"]["containers"][0]
        return {
            "name": container["name"],
            "image": container["image"],
            "imageID": "",
            "ready": "running" in state,
            "restartCount": 0 if running is None else running.restarts,
            "containerID": "" if running is None else f"process://{running.process.pid}",
            "state": state,
        }

    def _patch(self, pod: dict[str, Any], status: dict[str, Any]) -> None:
        self._api.request("PATCH", f"{_path(pod)}/status", {"status": status}, kind=PATCH)

    # -- logs -----------------------------------------------------------------------------------------

    def _serve(self, cert: Path, key: Path) -> http.server.ThreadingHTTPServer:
        """A server for the API server, which asks nobody else who reads logs; they have no secrets."""
        kubelet = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                asked = urlparse(self.path)
                data = kubelet._log(asked.path.split("/"), {k: v[0] for k, v in parse_qs(asked.query).items()})
                self.send_response(404 if data is None else 200)
                self.send_header("Content-Length", str(len(data or b"")))
                self.end_headers()
                self.wfile.write(data or b"")

            def log_message(self, *args: object) -> None:
                pass

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(cert, key)
        server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
        return server

    def _log(self, path: list[str], query: dict[str, str]) -> bytes | None:
        namespace, name = path[2:4]
        pod = self._api.request("GET", f"/api/v1/namespaces/{namespace}/pods/{name}")
        running = self._pods.get(pod["metadata"]["uid"])
        if running is None:
            return None
        data = running.log.read_bytes()
        if "tailLines" in query:
            data = b"".join(data.splitlines(keepends=True)[-int(query["tailLines"]) :])
        return data[: int(query.get("limitBytes", len(data)))]


def _path(pod: dict[str, Any]) -> str:
    return f"/api/v1/namespaces/{pod['metadata']['namespace']}/pods/{pod['metadata']['name']}"


def _gpus(pod: dict[str, Any]) -> int:
    return sum(int(each.get("resources", {}).get("limits", {}).get(GPU, 0)) for each in pod["spec"]["containers"])


def _lives(pod: dict[str, Any]) -> bool:
    return pod.get("status", {}).get("phase") not in ("Failed", "Succeeded")


def _kill(running: Running) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(running.process.pid, signal.SIGKILL)
    running.process.wait()


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
