"""Connections to ports of Pods through the API server, for programs outside the network of the Pods.

They are those of ``kubectl port-forward``, made by the package ``kubernetes``: a WebSocket to the API server, which
passes it on to the kubelet, which connects to the loopback address of the Pod.
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
#: How long the end of a connection may take (seconds).
_CLOSE_TIME = 5.0
_FORBIDDEN = 403


class PodForward:
    """A connection to a port of a Pod.

    Args:
        api: of its cluster.
        namespace, pod, port: where.

    Raises:
        ApiRefusedError: the API server, or the kubelet of the Pod, refuses.
        ConnectionError: there is no answer.
    """

    def __init__(self, api: KubernetesApi, namespace: str, pod: str, port: int) -> None:
        websocket = api.websocket(f"/api/v1/namespaces/{namespace}/pods/{pod}/portforward", ports=port)
        self._way: Any = _quiet_port_forward()(websocket, [port])
        self._port = port
        self.socket: socket.socket = self._way.socket(port)

    @property
    def error(self) -> str:
        """The kubelet's reason for a failed connection."""
        return self._way.error(self._port) or ""

    def close(self) -> None:
        """End it. The package's own thread has to see the end first: it takes a lost reader for an error."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_WR)
            self.socket.settimeout(_CLOSE_TIME)
            while self.socket.recv(_PIECE):
                pass
        self.socket.close()


@functools.cache
def _quiet_port_forward() -> type[Any]:
    """The class of the package ``kubernetes``. When a connection breaks, it closes what it has, and prints nothing."""
    base: Any = importlib.import_module("kubernetes.stream.ws_client").PortForward

    class QuietPortForward(base):
        def _proxy(self) -> None:
            try:
                super()._proxy()
            except Exception as e:  # what the package below raises is of no common kind
                log.debug("a connection through the API server of Kubernetes broke: %s", e)
            finally:
                self.websocket.shutdown()
                for port in self.local_ports.values():
                    port.python.close()

    return QuietPortForward


class PodWay:
    """Carries a connection to a port of a Pod; see ``TunnelWay``.

    Args:
        forward: makes the way there.
        connection: of this machine.
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
            self._here.close()  # so its dial ends, and is repeated
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
        """Carry what comes from there, and end both at its end."""
        with contextlib.suppress(OSError):
            while data := there.recv(_PIECE):
                try:
                    self._here.sendall(data)
                except OSError:
                    continue  # to its end: see PodForward.close
        self.end()

    def over(self) -> bool:
        """See ``TunnelWay``."""
        return self._ended

    def end(self) -> None:
        """See ``TunnelWay``."""
        with contextlib.suppress(OSError):
            self._here.shutdown(socket.SHUT_RDWR)

    def wait(self) -> None:
        """See ``TunnelWay``. An API server that does not answer is not waited for longer."""
        self._thread.join(2 * _CLOSE_TIME)


def check_way(api: KubernetesApi, namespace: str, pod: str, port: int, patience: float) -> None:
    """See that a worker can be reached through the API server.

    Raises:
        LaunchError: it cannot; the message has the words of the API server or of the kubelet.
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
        # A worker answers, if only to refuse; or the kubelet says why there is no connection.
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
    """What a client of TLS says first."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    said = ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), said, server_hostname="worker").do_handshake()
    return said.read()
