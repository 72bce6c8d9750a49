"""Connect to ports of Pods through the API server, for programs outside the network of the Pods.

The connections are those of ``kubectl port-forward``, made by the package ``kubernetes``: a WebSocket leads to the API
server, which passes it on to the kubelet, which connects to the loopback address of the Pod.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import socket
import ssl
import threading
from collections.abc import Callable
from typing import Any

from monarch_kernel.launchers.base import LaunchError
from monarch_kernel.launchers.kubernetes.api import ApiRefusedError, KubernetesApi

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
    base: Any = importlib.import_module("kubernetes.stream.ws_client").PortForward

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
