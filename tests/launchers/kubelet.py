"""The nodes of a cluster under test: schedules Pods onto one node, and runs each as processes of this machine.

It does what a scheduler and a kubelet do as far as an API server can tell: it binds Pods, or says why it cannot; has
their variables and Secrets at hand; runs their command at an address of their own, 127.0.1.N; serves their logs, and
connections to their ports; tells how they have ended; and ends those that are deleted.

All Pods are in one network namespace, in which nothing can listen at every address of one Pod: "0.0.0.0" in a command
becomes the address of the Pod, and only then something is at its loopback address, where forwarded ports end.
"""

from __future__ import annotations

import base64
import contextlib
import datetime
import http.client
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from monarch_kernel.launchers.kubernetes.api import ApiRefusedError, KubernetesApi
from tests.launchers.kubelet_server import KubeletServer

NODE = "n1"
GPU = "nvidia.com/gpu"
PATCH = "application/merge-patch+json"
PERIOD = 0.05
#: How long a container waits before its second start anew (seconds); a real one waits for 10.
BACK_OFF = 1.0
#: Addresses that lead nowhere from this machine, as those of Pods from outside of their network (RFC 5737).
OUTSIDE = "192.0.2"


class Watch:
    """Tells when objects change, as the API server tells of it, so that nobody lists them all the time.

    Args:
        api: as an administrator.
        paths: of kinds, such as ``/api/v1/pods``.
    """

    def __init__(self, api: KubernetesApi, *paths: str) -> None:
        self._api = api
        self._changed = threading.Event()
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._sockets: dict[str, socket.socket] = {}
        self._threads = [threading.Thread(target=self._run, args=(path,), name=f"watch-{path}") for path in paths]
        for thread in self._threads:
            thread.start()

    def changed(self) -> bool:
        """Whether something may have changed since this was asked last."""
        if not self._changed.is_set():
            return False
        self._changed.clear()  # before its objects are listed, so that no change is missed
        return True

    def again(self) -> None:
        """Have the next ``changed`` be true."""
        self._changed.set()

    def close(self) -> None:
        """End its threads and connections."""
        with self._lock:
            self._over.set()
            for each in self._sockets.values():
                with contextlib.suppress(OSError):  # the server has ended it
                    # Not as one of TLS, which would lose its state while a thread reads.
                    socket.socket.shutdown(each, socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()

    def _run(self, path: str) -> None:
        while not self._over.wait(PERIOD):
            # An API server that does not answer is a matter of those who list, as they do until there is a watch.
            with contextlib.suppress(OSError, http.client.HTTPException):
                self._follow(path)
            self.again()

    def _follow(self, path: str) -> None:
        """Until the connection ends."""
        settings = self._api.settings
        address = urlsplit(settings.host)
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        tls.load_verify_locations(settings.ssl_ca_cert)
        connection = http.client.HTTPSConnection(str(address.hostname), address.port, context=tls)
        try:
            connection.connect()
            with self._lock:
                if self._over.is_set():
                    return
                self._sockets[path] = connection.sock
            token = settings.get_api_key_with_prefix("BearerToken", alias="authorization")
            connection.request("GET", f"{path}?watch=true", headers={"Authorization": token})
            answer = connection.getresponse()
            while answer.status == 200 and answer.readline():  # first, all that is there
                self.again()
        finally:
            with self._lock:
                self._sockets.pop(path, None)
            connection.close()


@dataclass
class Running:
    """The container of a Pod."""

    process: subprocess.Popen[bytes]
    log: Path
    ip: str
    localhost: str
    started: str
    restarts: int = 0
    deadline: float = 0.0
    again: float = 0.0
    is_over: bool = False

    def needs_a_look(self) -> bool:
        """Whether something is to be done that no change of its Pod tells of."""
        return not self.is_over and (self.process.poll() is not None or bool(self.deadline))


class Kubelet:
    """Runs until ``close``.

    Args:
        api: as an administrator.
        folder: for logs and Secrets.
        cert, key: files, for what it serves.
        gpus: of its node.
    """

    def __init__(self, api: KubernetesApi, folder: Path, cert: Path, key: Path, gpus: int = 2) -> None:
        self._api = api
        self._folder = folder
        self._gpus = gpus
        self._pods: dict[str, Running] = {}
        self._count = 0
        self._over = threading.Event()
        self._turn = threading.Lock()
        self.failed: list[str] = []
        #: Whether Pods that start have addresses to which nothing here can connect.
        self.apart = False
        self._server = KubeletServer(cert, key, self._log, self._localhost)
        addresses = [{"type": "InternalIP", "address": "127.0.0.1"}]
        has = {"cpu": "8", "memory": "8Gi", "pods": "110", GPU: str(gpus)}
        port = {"kubeletEndpoint": {"Port": self._server.port}}
        node = {
            "metadata": {"name": NODE, "labels": {"kubernetes.io/hostname": NODE}},
            "status": {"addresses": addresses, "capacity": has, "allocatable": has, "daemonEndpoints": port},
        }
        api.request("POST", "/api/v1/nodes", node)
        self._watch = Watch(api, "/api/v1/pods")
        self._thread = threading.Thread(target=self._run, name="kubelet")
        self._thread.start()

    def evict(self, namespace: str, name: str, message: str) -> None:
        """End a Pod as a node does that is short of memory."""
        with self._turn:
            pod = self._api.request("GET", f"/api/v1/namespaces/{namespace}/pods/{name}")
            _kill(self._pods.pop(pod["metadata"]["uid"]))
            self._patch(pod, {"phase": "Failed", "reason": "Evicted", "message": message})

    def close(self) -> None:
        """End its threads and all Pods."""
        self._over.set()
        self._thread.join()
        self._watch.close()
        self._server.close()
        for running in self._pods.values():
            _kill(running)

    # -- Pods -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._over.wait(PERIOD):
            try:
                with self._turn:
                    if self._watch.changed() or any(each.needs_a_look() for each in self._pods.values()):
                        self._look()
            except ConnectionError as e:
                self._watch.again()
                if not self._over.is_set():
                    self.failed.append(str(e))

    def _look(self) -> None:
        pods = self._api.request("GET", "/api/v1/pods")["items"]
        for pod in pods:
            try:
                self._step(pod, pods)
            except ApiRefusedError:  # it was changed or deleted meanwhile
                self._watch.again()

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

    def _start(self, pod: dict[str, Any], restarts: int = 0, last: dict[str, Any] | None = None) -> None:
        container = pod["spec"]["containers"][0]
        if container["image"].startswith("missing/"):
            if not pod.get("status", {}).get("containerStatuses"):
                why = f'Back-off pulling image "{container["image"]}": manifest unknown'
                waiting = {"waiting": {"reason": "ImagePullBackOff", "message": why}}
                self._patch(pod, {"containerStatuses": [self._container(pod, waiting)]})
            return
        self._count += 1
        own = f"127.0.1.{self._count}"
        ip = f"{OUTSIDE}.{self._count}" if self.apart else own
        folder = self._folder / pod["metadata"]["uid"]
        folder.mkdir(mode=0o700, exist_ok=True)
        log = folder / f"{restarts}.log"
        variables = self._variables(pod, container, ip)
        argv = [*container["command"], *container.get("args", [])]
        argv = [_expanded(word, variables) for word in argv]
        for at, to in self._secrets(pod, container, folder):
            argv = [word.replace(at, to) for word in argv]
        everywhere = any("0.0.0.0" in word for word in argv)
        argv = [word.replace("0.0.0.0", own) for word in argv]
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
        running = Running(process, log, ip, own if everywhere else "", _now(), restarts)
        self._pods[pod["metadata"]["uid"]] = running
        state = {"running": {"startedAt": running.started}}
        self._patch(
            pod,
            {
                "phase": "Running",
                "podIP": ip,
                "podIPs": [{"ip": ip}],
                "startTime": running.started,
                "containerStatuses": [self._container(pod, state, running) | {"lastState": last or {}}],
            },
        )

    def _variables(self, pod: dict[str, Any], container: dict[str, Any], ip: str) -> dict[str, str]:
        found: dict[str, str] = {}
        for source in container.get("envFrom", []):
            found |= self._secret(pod, source["secretRef"]["name"])
        for each in container.get("env", []):
            origin = each.get("valueFrom", {})
            if "fieldRef" in origin:
                known = {"status.podIP": ip, "metadata.name": pod["metadata"]["name"]}
                found[each["name"]] = known[origin["fieldRef"]["fieldPath"]]
            elif "secretKeyRef" in origin:
                found[each["name"]] = self._secret(pod, origin["secretKeyRef"]["name"])[origin["secretKeyRef"]["key"]]
            else:
                found[each["name"]] = _expanded(each.get("value", ""), found)
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
        if pod["spec"]["restartPolicy"] == "Always":
            if not running.again:
                # At once at first, and then later each time.
                running.again = time.monotonic() + (BACK_OFF * 2 ** (running.restarts - 1) if running.restarts else 0)
                why = {"reason": "CrashLoopBackOff", "message": "back-off restarting failed container"}
                status = self._container(pod, {"waiting": why}, running) | {"lastState": state}
                self._patch(pod, {"containerStatuses": [status]})
            if time.monotonic() >= running.again:
                self._start(pod, running.restarts + 1, state)
            return
        phase = "Failed" if code else "Succeeded"
        self._patch(pod, {"phase": phase, "containerStatuses": [self._container(pod, state, running)]})
        running.is_over = True

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

    # -- what it serves -------------------------------------------------------------------------------

    def _running(self, namespace: str, name: str) -> Running | None:
        pod = self._api.request("GET", f"/api/v1/namespaces/{namespace}/pods/{name}")
        return self._pods.get(pod["metadata"]["uid"])

    def _localhost(self, namespace: str, name: str) -> str:
        running = self._running(namespace, name)
        return "" if running is None else running.localhost

    def _log(self, namespace: str, name: str, query: dict[str, str]) -> bytes | None:
        running = self._running(namespace, name)
        if running is None:
            return None
        log = running.log.with_name(f"{running.restarts - 1}.log") if "previous" in query else running.log
        data = log.read_bytes()
        if "tailLines" in query:
            data = b"".join(data.splitlines(keepends=True)[-int(query["tailLines"]) :])
        return data[: int(query.get("limitBytes", len(data)))]


def _expanded(text: str, variables: dict[str, str]) -> str:
    return re.sub(r"\$\((\w+)\)", lambda m: variables.get(m[1], m[0]), text)


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
