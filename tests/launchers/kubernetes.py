"""A real API server of Kubernetes with its etcd on loopback, and a kubelet that runs Pods as processes.

There are no controllers but those of ``controllers.py``, where a test wants them; quotas count up only.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from monarch_kernel.errors import LaunchError
from monarch_kernel.launchers.kubernetes.api import KubernetesApi
from tests.conftest import alive, wait_until
from tests.launchers.kubelet import Kubelet
from tests.ports import free_port

#: What ``apiserver.sh`` has built.
KEPT = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "monarch_kernel_tests/kubernetes")


class Cluster:
    """The daemons, and two users: an administrator, and one without rights."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._daemons: list[subprocess.Popen[bytes]] = []
        self._kubelet: Kubelet | None = None
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        etcd, peer, port = (free_port() for _ in range(3))
        tokens = {user: secrets.token_hex(16) for user in ("admin", "nobody")}
        folder = self.folder
        tokens_file = folder / "tokens.csv"
        tokens_file.touch(0o600)
        tokens_file.write_text(f"{tokens['admin']},admin,1,system:masters\n{tokens['nobody']},nobody,2\n")
        subprocess.run(["openssl", "genrsa", "-out", folder / "sa.key", "2048"], check=True, capture_output=True)
        self._daemon(
            "etcd",
            f"--data-dir={folder}/etcd",
            f"--listen-client-urls=http://127.0.0.1:{etcd}",
            f"--advertise-client-urls=http://127.0.0.1:{etcd}",
            f"--listen-peer-urls=http://127.0.0.1:{peer}",
            f"--initial-advertise-peer-urls=http://127.0.0.1:{peer}",
            f"--initial-cluster=default=http://127.0.0.1:{peer}",
            "--unsafe-no-fsync",
        )
        self._daemon(
            "kube-apiserver",
            f"--etcd-servers=http://127.0.0.1:{etcd}",
            "--bind-address=127.0.0.1",
            f"--secure-port={port}",
            "--insecure-port=0",
            "--allow-privileged",
            f"--cert-dir={folder}/certs",
            "--service-cluster-ip-range=10.96.0.0/16",
            f"--service-account-key-file={folder}/sa.key",
            f"--service-account-signing-key-file={folder}/sa.key",
            "--service-account-issuer=https://kubernetes.test",
            f"--token-auth-file={tokens_file}",
            "--authorization-mode=RBAC",
            "--disable-admission-plugins=ServiceAccount",
        )
        self.kubeconfig = folder / "kubeconfig"
        self.kubeconfig.touch(0o600)
        certs = folder / "certs"
        self.kubeconfig.write_text(
            f"""\
apiVersion: v1
kind: Config
clusters:
- {{name: test, cluster: {{server: "https://127.0.0.1:{port}", certificate-authority: {certs}/apiserver.crt}}}}
users: [{{name: admin, user: {{token: {tokens["admin"]}}}}}, {{name: nobody, user: {{token: {tokens["nobody"]}}}}}]
contexts:
- {{name: admin, context: {{cluster: test, user: admin}}}}
- {{name: nobody, context: {{cluster: test, user: nobody, namespace: small}}}}
current-context: admin
"""
        )
        wait_until((certs / "apiserver.crt").exists, "the API server has a certificate", 60)
        self.api = KubernetesApi(str(self.kubeconfig))
        wait_until(self._ready, "the API server answers", 60)
        self._kubelet = Kubelet(self.api, folder, certs / "apiserver.crt", certs / "apiserver.key")

    def _daemon(self, program: str, *arguments: str) -> None:
        with open(self.folder / f"{program}.log", "wb") as log:
            command = [KEPT / program, *arguments]
            self._daemons.append(subprocess.Popen(command, stdout=log, stderr=log, cwd=self.folder))

    def _ready(self) -> bool:
        for daemon in self._daemons:
            assert daemon.poll() is None, f"{daemon.args} has ended: see its log in {self.folder}"
        try:
            self.api.request("GET", "/api/v1/namespaces/default")
            return self.api.text("/readyz") == b"ok"
        except (LaunchError, OSError):
            return False

    @property
    def kubelet(self) -> Kubelet:
        """What runs Pods."""
        assert self._kubelet is not None
        return self._kubelet

    def pods(self, namespace: str = "default") -> list[dict[str, Any]]:
        """All Pods in a namespace."""
        return self.api.request("GET", f"/api/v1/namespaces/{namespace}/pods")["items"]

    def secrets(self, namespace: str = "default") -> list[str]:
        """The names of all Secrets in a namespace."""
        found = self.api.request("GET", f"/api/v1/namespaces/{namespace}/secrets")["items"]
        return [each["metadata"]["name"] for each in found]

    def close(self) -> None:
        """End all of it."""
        if self._kubelet is not None:
            self._kubelet.close()
            self.api.close()
        for daemon in reversed(self._daemons):
            daemon.terminate()
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
            assert not alive(daemon.pid)


_running: dict[str, Cluster] = {}


@pytest.fixture(scope="session", autouse=True)
def one_cluster() -> Iterator[None]:
    """Ends the cluster that the modules of a run have in common, if one of them has started it."""
    yield
    while _running:
        _, running = _running.popitem()
        running.close()
        assert not running.kubelet.failed


@pytest.fixture(scope="module")
def cluster(one_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster for the tests of a module, which ``KUBECONFIG`` names."""
    if missing := [name for name in ("etcd", "kube-apiserver") if not (KEPT / name).exists()]:
        pytest.skip(f"there is no {' and no '.join(missing)} (tests/launchers/apiserver.sh)")
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    pytest.importorskip("kubernetes", reason="the extra kubernetes is not installed")
    if not _running:
        folder = tmp_path_factory.mktemp("kubernetes")
        folder.chmod(0o700)
        _running["one"] = Cluster(folder)
    running = _running["one"]
    before = os.environ.get("KUBECONFIG")
    os.environ["KUBECONFIG"] = str(running.kubeconfig)
    try:
        yield running
    finally:
        if before is None:
            del os.environ["KUBECONFIG"]
        else:
            os.environ["KUBECONFIG"] = before
