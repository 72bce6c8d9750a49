"""Send requests to the API server of a Kubernetes cluster, configured by a kubeconfig or a Pod's service account.

The package ``kubernetes`` (the extra of that name) reads the configuration: certificates, tokens that are renewed,
commands that print credentials, proxies. Requests and answers are plain JSON here, so objects of any version of
Kubernetes pass through unchanged.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import os
import socket
import ssl
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import msgspec

from monarch_kernel.launchers.base import LaunchError

#: The file in which a Pod finds the namespace of its account.
_OWN_NAMESPACE = "/var/run/secrets/kubernetes.io/serviceaccount/namespace"
_OWN_HOST = "KUBERNETES_SERVICE_HOST"
#: A value instead of a kubeconfig file: the service account of this Pod.
IN_CLUSTER = "in-cluster"
#: A prefix instead of a kubeconfig file: a configuration that this program has created, followed by its API server.
_IN_MEMORY = "in-memory:"
#: These configurations, by that value. They hold credentials, so they are never written to a file.
_kept: dict[str, object] = {}


class ApiRefusedError(LaunchError):
    """The API server answered with an error, and the message quotes it.

    Args:
        status: the HTTP status, such as 403.
        reason: a word, such as "Forbidden".
        said: the message of the server.
    """

    def __init__(self, status: int, reason: str, said: str) -> None:
        self.status = status
        self.reason = reason
        self.said = said
        super().__init__(f"Kubernetes answered {status} {reason}: {said}")


class KubernetesApi:
    """The API server of one context of a kubeconfig, or of the cluster that this process runs in.

    Args:
        kubeconfig: a file; "": the one that ``KUBECONFIG`` names, else ``~/.kube/config``, else the account of this
            Pod. ``IN_CLUSTER`` and results of ``keep`` denote configurations without a file.
        context: a context of that file; "": its current one.
        patience: the time limit for an answer (seconds).
        settings: a kept ``kubernetes.client.Configuration`` with which to connect; None: the current one of that name.

    Raises:
        LaunchError: the package ``kubernetes`` is missing, or the configuration does not exist.
    """

    def __init__(
        self, kubeconfig: str = "", context: str = "", patience: float = 30.0, settings: object = None
    ) -> None:
        try:
            # imported by name, because type checkers also run where it is not installed
            client, config, self._http = map(
                importlib.import_module, ("kubernetes.client", "kubernetes.config", "urllib3")
            )
        except ImportError as e:
            raise LaunchError(
                f"hosts from Kubernetes need the package kubernetes ({e}): pip install 'monarch_kernel[kubernetes]'"
            ) from e
        self._patience = patience
        self._lock = threading.Lock()
        file = kubeconfig or _kubeconfig()
        #: Whether it was found through the account of this Pod, so that this process is in the network of the cluster.
        self.is_own = False
        try:
            if file and not is_file(file) and context:
                raise LaunchError(f"context={context!r} names no context: only a kubeconfig file has contexts")
            if file.startswith(_IN_MEMORY):
                settings = settings or kept(file)
                if settings is None:
                    raise LaunchError(
                        f"the configuration for {file.removeprefix(_IN_MEMORY)} was in the memory of the program that "
                        "applied this job: give it again with KubeConfig.from_config(), or end the job with kubectl "
                        "(docs/kubernetes.md)"
                    )
                self.context, self.namespace = "", "default"
                self._client = client.ApiClient(settings)
            elif is_file(file):
                contexts, current = config.list_kube_config_contexts(file)
                named = {each["name"]: each for each in contexts}
                if context and context not in named:
                    raise LaunchError(f"{file} has no context {context!r} (it has: {', '.join(named) or 'none'})")
                chosen = named[context] if context else current
                self.context = str(chosen["name"])
                self.namespace = str(chosen["context"].get("namespace") or "default")
                self._client = config.new_client_from_config(file, self.context, persist_config=False)
            elif in_cluster():
                self.context, self.namespace = "", _own_namespace()
                self.is_own = True
                settings = client.Configuration()
                config.load_incluster_config(client_configuration=settings)
                self._client = client.ApiClient(settings)
            elif file:
                raise LaunchError(
                    "this program runs in no Pod, so it has no service account: name a file with KubeConfig.from_path()"
                )
            else:
                raise LaunchError(
                    "there is no Kubernetes here: no KUBECONFIG, no ~/.kube/config, and this is no Pod; name a file "
                    "with kubeconfig="
                )
        except (config.ConfigException, OSError, KeyError, TypeError) as e:
            raise LaunchError(f"the configuration for Kubernetes ({file or 'of this Pod'}) cannot be used: {e}") from e

    @property
    def settings(self) -> object:
        """Its ``kubernetes.client.Configuration``."""
        return self._client.configuration

    def request(
        self,
        method: str,
        path: str,
        body: Mapping[str, object] | None = None,
        *,
        kind: str = "application/json",
        accept: str = "application/json, */*",
        **query: str | int,
    ) -> Any:
        """Send a request, and decode the answer.

        Args:
            method: the HTTP method.
            path: such as ``/api/v1/namespaces/default/pods``.
            body: an object, or a patch.
            kind: the media type of the body.
            accept: the media type of the answer.
            query: the parameters.

        Raises:
            ApiRefusedError: the answer is an error.
            ConnectionError: there is no answer.
        """
        answer = self._ask(method, path, body, kind, accept, query)
        return msgspec.json.decode(answer) if answer else {}

    def text(self, path: str, **query: str | int) -> bytes:
        """Send a request whose answer is text."""
        return self._ask("GET", path, None, "", "application/json, */*", query)

    def _ask(
        self,
        method: str,
        path: str,
        body: Mapping[str, object] | None,
        kind: str,
        accept: str,
        query: Mapping[str, str | int],
    ) -> bytes:
        settings = self._client.configuration
        headers = {"Accept": accept, "User-Agent": "monarch_kernel", **self._authorization()}
        if body is not None:
            headers["Content-Type"] = kind
        url = settings.host.rstrip("/") + path + (f"?{urlencode(query)}" if query else "")
        try:
            answer = self._client.rest_client.pool_manager.request(
                method,
                url,
                body=None if body is None else msgspec.json.encode(body),
                headers=headers,
                timeout=self._http.Timeout(connect=min(5.0, self._patience), read=self._patience),
                retries=False,
                redirect=False,
            )
        except self._http.exceptions.HTTPError as e:
            raise ConnectionError(f"the API server of Kubernetes at {settings.host} does not answer: {e}") from e
        if answer.status >= 300:
            raise _refusal(answer.status, answer.data)
        return answer.data

    def websocket(self, path: str, **query: str | int) -> Any:
        """Open a WebSocket of the package ``kubernetes``, for protocols with channels.

        Raises:
            ApiRefusedError: the API server, or the kubelet behind it, rejects the request.
            ConnectionError: there is no answer.
        """
        settings = self._client.configuration
        url = f"{settings.host.rstrip('/')}{path}?{urlencode(query)}"
        try:
            return importlib.import_module("kubernetes.stream.ws_client").create_websocket(
                settings,
                url.replace("http", "ws", 1),
                {"sec-websocket-protocol": "v4.channel.k8s.io", **self._authorization()},
            )
        except Exception as e:  # the exceptions of the underlying package have no common type
            if status := getattr(e, "status_code", 0):
                raise _refusal(status, getattr(e, "resp_body", None) or b"") from None
            raise ConnectionError(f"the API server of Kubernetes at {settings.host} does not answer: {e}") from e

    def _authorization(self) -> dict[str, str]:
        settings = self._client.configuration
        with self._lock:  # this may renew a token
            token = settings.get_api_key_with_prefix("BearerToken", alias="authorization")
        if token:
            return {"authorization": token}
        return {"authorization": settings.get_basic_auth_token()} if settings.username else {}

    def close(self) -> None:
        """Close its connections."""
        self._client.rest_client.pool_manager.clear()


def keep(settings: Any) -> str:
    """Keep a ``kubernetes.client.Configuration`` in this process. It replaces an earlier one for the same API server.

    Returns:
        The value that denotes it as a ``kubeconfig``, in any process.
    """
    name = f"{_IN_MEMORY}{settings.host}"
    _kept[name] = settings
    return name


def kept(kubeconfig: str) -> Any:
    """Return the configuration that this process keeps under a name; None: it keeps none."""
    return _kept.get(kubeconfig)


def is_file(kubeconfig: str) -> bool:
    """Return whether it is a file, rather than the account of this Pod or a configuration in memory."""
    return bool(kubeconfig) and kubeconfig != IN_CLUSTER and not kubeconfig.startswith(_IN_MEMORY)


def in_cluster() -> bool:
    """Return whether this process runs in a Pod that may send requests to the API server."""
    return bool(os.environ.get(_OWN_HOST)) and os.path.exists(_OWN_NAMESPACE)


def configured() -> bool:
    """Return whether a default cluster is configured."""
    return bool(_kubeconfig()) or in_cluster()


def _kubeconfig() -> str:
    """Return the files that kubectl would read; "" if there is none."""
    given = os.environ.get("KUBECONFIG", "")
    usual = os.path.expanduser("~/.kube/config")
    return given or (usual if os.path.exists(usual) else "")


def _own_namespace() -> str:
    with open(_OWN_NAMESPACE) as file:
        return file.read().strip() or "default"


def _refusal(status: int, data: bytes) -> ApiRefusedError:
    try:
        said = msgspec.json.decode(data)
        return ApiRefusedError(status, said.get("reason") or "", said.get("message") or "it said nothing")
    except (msgspec.DecodeError, UnicodeDecodeError, AttributeError):
        return ApiRefusedError(status, "", data.decode(errors="replace").strip()[:500] or "it said nothing")


# ``KubeConfig``: the configuration with which a program connects to a cluster, with Monarch's names.


@dataclass
class KubeConfig:
    """The configuration of a connection to the API server of a cluster; like Monarch's class of this name.

    Without arguments, it is the service account of the Pod in which the program runs. If both arguments are given, the
    file is used.

    Args:
        local: a kubeconfig file, whose current context is used.
        remote: a ``kubernetes.client.Configuration`` that the program has created.
    """

    local: str | os.PathLike[str] | None = None
    remote: Any = None

    @classmethod
    def from_path(cls, path: str | os.PathLike[str]) -> KubeConfig:
        """Use a kubeconfig file; ``~`` is the home folder."""
        return cls(local=Path(path).expanduser())

    @classmethod
    def from_config(cls, config: object) -> KubeConfig:
        """Use a ``kubernetes.client.Configuration``, which stays in the memory of this program."""
        return cls(remote=config)

    @property
    def out_of_cluster(self) -> bool:
        """Whether it is something other than the service account of this Pod."""
        return self.local is not None or self.remote is not None

    def load(self) -> None:
        """Make it the default of the package ``kubernetes`` in this process. A ``KubernetesJob`` does not need that.

        Raises:
            LaunchError: it cannot be used, or the package is not installed.
            ValueError: ``remote`` is not a configuration.
        """
        api = KubernetesApi(self.text())
        try:
            importlib.import_module("kubernetes.client").Configuration.set_default(api.settings)
        finally:
            api.close()

    def text(self) -> str:
        """Return the argument ``kubeconfig`` of ``KubernetesLauncher``: a path, or a word if there is no file.

        Raises:
            ValueError: ``remote`` is not a configuration.
        """
        if self.local is not None:
            return os.path.abspath(os.path.expanduser(os.fspath(self.local)))
        if self.remote is None:
            return IN_CLUSTER
        if not isinstance(getattr(self.remote, "host", None), str):
            raise ValueError(
                f"{self.remote!r} is no kubernetes.client.Configuration: for a kubeconfig file, use "
                "KubeConfig.from_path(PATH)"
            )
        return keep(self.remote)


def kubeconfig_text(given: str | os.PathLike[str] | KubeConfig | None) -> str:
    """Convert the argument ``kubeconfig`` of ``KubernetesJob`` to that of ``KubernetesLauncher``.

    Raises:
        ValueError: it is neither a file nor a ``KubeConfig``.
    """
    if given is None:
        return ""
    if isinstance(given, KubeConfig):
        return given.text()
    if not isinstance(given, str | os.PathLike):
        raise ValueError(f"kubeconfig={given!r} is no configuration: name a kubeconfig file, or use KubeConfig")
    return os.fspath(given)


# Connect to ports of Pods through the API server, for programs outside the network of the Pods.
#
# The connections are those of ``kubectl port-forward``, made by the package ``kubernetes``: a WebSocket leads to the
# API server, which passes it on to the kubelet, which connects to the loopback address of the Pod.

log = logging.getLogger(__name__)

_PIECE = 1 << 18
#: The time limit for a connection to end (seconds).
_CLOSE_TIME = 5.0
_FORBIDDEN = 403


class PodForward:
    """A connection to a port of a Pod.

    Args:
        api: the API server of its cluster.
        namespace, pod, port: the address of the port.

    Raises:
        ApiRefusedError: the API server, or the kubelet of the Pod, rejects the connection.
        ConnectionError: there is no answer.
    """

    def __init__(self, api: KubernetesApi, namespace: str, pod: str, port: int) -> None:
        websocket = api.websocket(f"/api/v1/namespaces/{namespace}/pods/{pod}/portforward", ports=port)
        self._way: Any = _quiet_port_forward()(websocket, [port])
        self._port = port
        self.socket: socket.socket = self._way.socket(port)

    @property
    def error(self) -> str:
        """Return the kubelet's reason for a failed connection."""
        return self._way.error(self._port) or ""

    def close(self) -> None:
        """End the connection. The package's thread must see the end first: it reports a lost reader as an error."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_WR)
            self.socket.settimeout(_CLOSE_TIME)
            while self.socket.recv(_PIECE):
                pass
        self.socket.close()


@functools.cache
def _quiet_port_forward() -> type[Any]:
    """Return a subclass of the package's class that prints nothing when a connection breaks, and closes its sockets."""
    base = importlib.import_module("kubernetes.stream.ws_client").PortForward

    class QuietPortForward(base):
        def _proxy(self) -> None:
            try:
                super()._proxy()
            except Exception as e:  # the exceptions of the underlying package have no common type
                log.debug("a connection through the API server of Kubernetes broke: %s", e)
            finally:
                self.websocket.shutdown()
                for port in self.local_ports.values():
                    port.python.close()

    return QuietPortForward


class PodWay:
    """Forwards a connection to a port of a Pod; see ``TunnelWay``.

    Args:
        forward: opens the connection to the Pod.
        connection: the local connection.
    """

    def __init__(self, forward: Callable[[], PodForward], connection: socket.socket) -> None:
        self._forward = forward
        self._here = connection.dup()
        self._ended = False
        self._thread = threading.Thread(target=self._carry, name="pod-tunnel", daemon=True)
        self._thread.start()

    def _carry(self) -> None:
        try:
            there = self._forward()
        except (LaunchError, OSError) as e:
            log.debug("%s", e)
            self._here.close()  # the connection attempt therefore ends, and is repeated
            self._ended = True
            return
        back = threading.Thread(target=self._back, args=(there.socket,), name="pod-tunnel-back", daemon=True)
        back.start()
        with contextlib.suppress(OSError):
            while data := self._here.recv(_PIECE):
                there.socket.sendall(data)
        with contextlib.suppress(OSError):
            there.socket.shutdown(socket.SHUT_WR)
        back.join()
        there.close()
        self._here.close()
        self._ended = True

    def _back(self, there: socket.socket) -> None:
        """Forward data from the Pod, and end both connections when it ends."""
        with contextlib.suppress(OSError):
            while data := there.recv(_PIECE):
                try:
                    self._here.sendall(data)
                except OSError:
                    continue  # continue to the end: see PodForward.close
        self.end()

    def over(self) -> bool:
        """See ``TunnelWay``."""
        return self._ended

    def end(self) -> None:
        """See ``TunnelWay``."""
        with contextlib.suppress(OSError):
            self._here.shutdown(socket.SHUT_RDWR)

    def wait(self) -> None:
        """See ``TunnelWay``. The wait for an API server that does not answer is limited."""
        self._thread.join(2 * _CLOSE_TIME)


def check_way(api: KubernetesApi, namespace: str, pod: str, port: int, patience: float) -> None:
    """Check that a worker can be reached through the API server.

    Raises:
        LaunchError: it cannot; the message quotes the API server or the kubelet.
    """
    where = f"port {port} of the Pod {pod} through the API server of Kubernetes"
    try:
        forward = PodForward(api, namespace, pod, port)
    except ApiRefusedError as e:
        advice = "see that the Pod runs"
        if e.status == _FORBIDDEN:
            advice = "you need the right to create and get pods/portforward, as docs/kubernetes.md shows"
        raise LaunchError(f"there is no way to {where}: {e.said}; {advice}") from None
    try:
        forward.socket.settimeout(patience)
        forward.socket.sendall(_hello())
        # A worker answers, if only with an error; otherwise, the kubelet reports why there is no connection.
        answer = forward.socket.recv(1)
    except TimeoutError:
        raise LaunchError(f"there is no answer at {where} within {patience:g} s: see that its worker lives") from None
    except OSError as e:
        raise LaunchError(f"there is no way to {where}: {e}") from e
    finally:
        forward.close()
    if not answer:
        raise LaunchError(
            f"there is no way to {where}: {forward.error or 'the connection was closed'}; a worker that is "
            "reached so listens at the loopback address, too (--listen tcp://$(POD_IP):PORT@tcp://0.0.0.0:PORT)"
        )


def _hello() -> bytes:
    """Return the first message of a TLS client."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    said = ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), said, server_hostname="worker").do_handshake()
    return said.read()
