"""A port of this machine that leads to a worker through a command, such as ``ssh -W``."""

from __future__ import annotations

import socket
import subprocess
import threading
from collections.abc import Sequence


class Tunnel:
    """Listens on a port of the loopback address, and starts the command for each connection, as its standard streams.

    What goes through it is encrypted and authenticated at both ends by the connection itself, as on any other way.

    Args:
        command: copies between its standard streams and the worker.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self._command = list(command)
        self._listener = socket.create_server(("127.0.0.1", 0))
        #: The port to connect to.
        self.port: int = self._listener.getsockname()[1]
        self._processes: list[subprocess.Popen[bytes]] = []
        self._lock = threading.Lock()
        self._closed = False
        threading.Thread(target=self._serve, name="tunnel", daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # it was closed
                return
            with connection, self._lock:
                if self._closed:
                    return
                self._processes = [process for process in self._processes if process.poll() is None]
                try:
                    process = subprocess.Popen(
                        self._command,
                        stdin=connection.fileno(),
                        stdout=connection.fileno(),
                        stderr=subprocess.DEVNULL,
                        start_new_session=True,  # Ctrl-C is for the program
                    )
                except OSError:  # the connection is closed, and its dial says so
                    continue
                self._processes.append(process)

    def close(self) -> None:
        """End all connections, and accept no more."""
        with self._lock:
            self._closed = True
            processes, self._processes = self._processes, []
        self._listener.shutdown(socket.SHUT_RDWR)  # ends accept(), which closing does not
        self._listener.close()
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait()
