"""``KubeConfig``: the configuration with which a program connects to a cluster, with Monarch's names."""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from monarch_kernel.launchers.kubernetes import api as kubernetes_api


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
    def from_config(cls, config: Any) -> KubeConfig:
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
        api = kubernetes_api.KubernetesApi(self.text())
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
            return kubernetes_api.IN_CLUSTER
        if not isinstance(getattr(self.remote, "host", None), str):
            raise ValueError(
                f"{self.remote!r} is no kubernetes.client.Configuration: for a kubeconfig file, use "
                "KubeConfig.from_path(PATH)"
            )
        return kubernetes_api.keep(self.remote)


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
