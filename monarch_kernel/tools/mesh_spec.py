"""Describe the meshes of a TorchX server, with the names of ``monarch.tools.mesh_spec``."""

from __future__ import annotations

import enum
import socket
from dataclasses import dataclass, field
from typing import Any

from monarch_kernel.tools.network import get_sockaddr

__all__ = ["MeshSpec", "ServerSpec", "mesh_spec_from_metadata", "mesh_spec_from_str", "tag_as_metadata"]

_UNSET = "__UNSET__"
_TAG = "monarch/meshes/{}/{}"


class AppState(enum.IntEnum):
    """The states of TorchX, with the same values."""

    UNSUBMITTED = 0
    SUBMITTED = 1
    PENDING = 2
    RUNNING = 3
    SUCCEEDED = 4
    FAILED = 5
    CANCELLED = 6
    UNKNOWN = 7


@dataclass
class MeshSpec:
    """The hosts of one mesh.

    Attributes:
        name: the name of the mesh.
        num_hosts: the number of hosts.
        host_type: a named resource of TorchX.
        gpus: the GPUs of each host; -1: unknown.
        transport: "tcp" or "metatls".
        port: the port at which workers listen.
        hostnames: the names of the hosts, once they are known.
        state: the state of the job.
        image: the image of its containers.
    """

    name: str
    num_hosts: int
    host_type: str = _UNSET
    gpus: int = -1
    transport: str = "tcp"
    port: int = 26600
    hostnames: list[str] = field(default_factory=list[str])
    state: int = AppState.UNSUBMITTED
    image: str = _UNSET

    def server_addrs(self, transport: str | None = None, port: int | None = None) -> list[str]:
        """Return the addresses of its hosts: ``tcp!10.0.0.1:26600``.

        Raises:
            RuntimeError: a host has no address.
            ValueError: the transport is unknown.
        """
        transport, port = transport or self.transport, port or self.port
        if transport == "tcp":
            return [f"tcp!{get_sockaddr(socket.getfqdn(name), port)}" for name in self.hostnames]
        if transport == "metatls":
            return [f"metatls!{name}:{port}" for name in self.hostnames]
        raise ValueError(f"Unsupported transport: {transport}. Must be one of: 'tcp' or 'metatls'")


@dataclass
class ServerSpec:
    """A job of TorchX with its meshes.

    Attributes:
        name: the name of the job.
        state: its state in TorchX.
        meshes: its meshes of hosts.
        scheduler: the name of its scheduler.
        namespace: its namespace at the scheduler.
        ui_url: the URL of its page.
        metadata: the metadata of the job.
    """

    name: str
    state: int
    meshes: list[MeshSpec]
    scheduler: str
    namespace: str = ""
    ui_url: str | None = None
    metadata: dict[str, str] = field(default_factory=dict[str, str])

    @property
    def server_handle(self) -> str:
        """The identifier of the job: ``slurm:///123``."""
        return f"{self.scheduler}://{self.namespace}/{self.name}"

    @property
    def is_running(self) -> bool:
        """Whether its state is RUNNING."""
        return self.state == AppState.RUNNING

    def host0(self, mesh_name: str) -> str:
        """Return the first host of a mesh.

        Raises:
            RuntimeError: the job is not running, or has no hosts.
            ValueError: the mesh does not exist.
        """
        mesh = self.get_mesh_spec(mesh_name)
        if not self.is_running:
            raise RuntimeError(f"{self.server_handle} is {AppState(self.state).name}: wait until it is RUNNING")
        if not mesh.hostnames:
            raise RuntimeError(f"{self.server_handle} does not have any hosts")
        return mesh.hostnames[0]

    def get_mesh_spec(self, mesh_name: str) -> MeshSpec:
        """Return a mesh by its name.

        Raises:
            ValueError: the mesh does not exist.
        """
        for mesh in self.meshes:
            if mesh.name == mesh_name:
                return mesh
        raise ValueError(f"Mesh: {mesh_name!r} not found in job: {self.name}. Try one of: {self.get_mesh_names()}")

    def get_mesh_names(self) -> list[str]:
        """Return the names of its meshes."""
        return [mesh.name for mesh in self.meshes]

    def to_json(self) -> dict[str, object]:
        """Return the server as plain data."""
        meshes = {
            mesh.name: {
                "host_type": mesh.host_type,
                "hosts": mesh.num_hosts,
                "gpus": mesh.gpus,
                "hostnames": mesh.hostnames,
            }
            for mesh in self.meshes
        }
        state = AppState(self.state).name
        return {"name": self.name, "server_handle": self.server_handle, "state": state, "meshes": meshes}


def mesh_spec_from_str(mesh_spec_str: str) -> MeshSpec:
    """Parse a mesh ``NAME:NUM_HOSTS:HOST_TYPE``: ``trainer:8:gpu.medium``. The type is a named resource of TorchX.

    Raises:
        AssertionError: the text does not have this form (Monarch's error).
        ImportError: TorchX is not installed.
        KeyError: TorchX has no such type.
    """
    parts = mesh_spec_str.split(":")
    if len(parts) != 3:
        raise AssertionError(f"`{mesh_spec_str}` is not of the form 'NAME:NUM_HOSTS:HOST_TYPE'")
    import importlib

    specs = importlib.import_module("torchx.specs")
    name, hosts, kind = parts
    gpus = specs.resource(h=kind).gpu
    return MeshSpec(name, int(hosts), kind, gpus)


def tag_as_metadata(mesh_spec: MeshSpec, appdef: Any) -> None:
    """Write a mesh to the metadata of an ``AppDef`` of TorchX."""
    for what in ("host_type", "gpus", "transport"):
        appdef.metadata[_TAG.format(mesh_spec.name, what)] = str(getattr(mesh_spec, what))


def mesh_spec_from_metadata(appdef: Any, mesh_name: str) -> MeshSpec | None:
    """Return the mesh that `tag_as_metadata` wrote, with the replicas of its role; None without such a role."""
    role = next((role for role in appdef.roles if role.name == mesh_name), None)
    if role is None:
        return None
    tags = {what: appdef.metadata.get(_TAG.format(mesh_name, what)) for what in ("host_type", "gpus", "transport")}
    return MeshSpec(
        mesh_name,
        role.num_replicas,
        tags["host_type"] or _UNSET,
        int(tags["gpus"] or -1),
        tags["transport"] or "tcp",
        role.port_map.get("mesh", MeshSpec.port),
        image=role.image,
    )
