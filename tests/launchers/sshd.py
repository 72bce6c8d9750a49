"""A real sshd on the loopback address, with keys and a configuration of its own for the client."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.conftest import wait_until
from tests.launchers.engines import CannotRunError
from tests.ports import free_port
from tests.waiting import listens

SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin")


class Sshd:
    """The daemon. ``command`` is an ssh for which the names ``node*`` are this machine, ``jumped*`` are reached through
    it as a jump host, and ``kept*`` by a connection that ssh keeps for further ones (ControlMaster).

    Args:
        folder: an empty one for all that belongs to it.
        enter: runs it elsewhere, with the command as its last arguments.
    """

    def __init__(self, folder: Path, enter: Sequence[str] = ()) -> None:
        self.folder = folder
        self.masters = tempfile.mkdtemp(prefix="ssh-")  # paths of sockets are short
        for key in ("host", "user"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / key], check=True)
        self.port = free_port()
        (folder / "authorized").write_text((folder / "user.pub").read_text())
        (folder / "sshd_config").write_text(
            f"ListenAddress 127.0.0.1:{self.port}\nHostKey {folder}/host\nAuthorizedKeysFile {folder}/authorized\n"
            f"PidFile none\nUsePAM no\nPasswordAuthentication no\nStrictModes no\nPermitRootLogin yes\n"
            "MaxStartups 200\n"
            # In a shell below another one, bash does not run this user's start file at each login, which may take long.
            "SetEnv SHLVL=1\n"
        )
        public = " ".join((folder / "host.pub").read_text().split()[:2])
        (folder / "known").write_text(f"[127.0.0.1]:{self.port} {public}\n")
        (folder / "config").write_text(
            f"Host node* jumped* kept*\n  HostName 127.0.0.1\n  Port {self.port}\nHost jumped*\n  ProxyJump node0\n"
            f"Host kept*\n  ControlMaster auto\n  ControlPath {self.masters}/%n\n  ControlPersist 600\n"
            f"Host closed\n  HostName 127.0.0.1\n  Port 1\n"
            f"Host *\n  IdentityFile {folder}/user\n  IdentitiesOnly yes\n  UserKnownHostsFile {folder}/known\n"
            "  StrictHostKeyChecking yes\n  BatchMode yes\n"
        )
        self.command = ("ssh", "-F", str(folder / "config"))
        os.makedirs("/run/sshd", exist_ok=True)
        assert SSHD is not None
        self._log = (folder / "log").open("ab")
        self._process = subprocess.Popen([*enter, SSHD, "-D", "-e", "-f", folder / "sshd_config"], stderr=self._log)
        wait_until(self._listens, "sshd listens")

    def _listens(self) -> bool:
        assert self._process.poll() is None, (self.folder / "log").read_text()
        return listens(self.port)

    @property
    def pid(self) -> int:
        """The daemon's process."""
        return self._process.pid

    def drop_connections(self) -> None:
        """End the connections that there are, as a network that is lost does."""
        for child in psutil.Process(self.pid).children():
            child.kill()

    def close(self) -> None:
        """End it."""
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(30)
        self._log.close()
        shutil.rmtree(self.masters)


@contextmanager
def running(folder: Path, enter: Sequence[str] = ()) -> Generator[Sshd]:
    """An sshd of this machine; the arguments are those of ``Sshd``.

    Raises:
        CannotRunError: it is not installed, or this user cannot run it here.
    """
    if SSHD is None or shutil.which("ssh") is None:
        raise CannotRunError("openssh-server and openssh-client are not installed (tests/prepare.sh)")
    if os.getuid() != 0:
        raise CannotRunError("only root can run an sshd of its own here")
    daemon = Sshd(folder, enter)
    try:
        yield daemon
    finally:
        daemon.close()


@pytest.fixture(scope="module")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    """An sshd for the tests of a module."""
    try:
        with running(tmp_path_factory.mktemp("sshd")) as daemon:
            yield daemon
    except CannotRunError as why:
        pytest.skip(str(why))
