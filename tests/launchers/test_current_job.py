"""The job of a folder, commands on hosts, and ids of workers, by the names of ``monarch.job``."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest

from monarch_kernel import job
from monarch_kernel.actor import ActorError, Point, this_host, this_proc
from monarch_kernel.tools import commands, mesh_spec
from monarch_kernel.tools.config import Workspace, defaults
from tests.ports import free_port

JOB = "from monarch_kernel.job import LocalJob\njob = LocalJob(('boxes',))\ndef made(): return job\n"


def test_the_job_of_a_folder_and_commands_on_its_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "jobs_of_test.py").write_text(JOB)
    with pytest.raises(FileNotFoundError, match="set_current_job"):
        job.load_current_job()
    job.set_current_job("jobs_of_test.nothing")
    with pytest.raises(ValueError, match="defines no 'nothing'"):
        job.load_current_job()
    job.set_current_job("jobs_of_test.made")
    assert isinstance(commands.load_current_job(), job.LocalJob)
    hosts = job.hosts_from_config("boxes")
    words = ["sh", "-c", "echo $COLOUR $MONARCH_RANK_gpus; exit $MONARCH_RANK_gpus"]
    assert job.exec_command(hosts, words, {"COLOUR": "green"}, output_dir="out", per_host={"gpus": 2}).get(60) == 1
    assert [(tmp_path / "out" / f"{rank}.log").read_text() for rank in range(2)] == ["green 0\n", "green 1\n"]
    assert job.exec_command(this_host(), ["echo", "here"], rank=0).get(60) == 0
    assert "here\n" in capfd.readouterr().out
    with pytest.raises(IndexError, match="rank 1 is out of range"):
        job.exec_command(this_host(), ["true"], rank=1)


def test_ports_are_forwarded_from_rank_to_rank() -> None:
    servers = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    free = [free_port(), free_port()]
    ports = [server.getsockname()[1] for server in servers]
    here, there = (this_host().spawn_procs({"p": 2}, name=name) for name in ("here", "there"))
    forwarder = this_proc().spawn("forwarder", job.PortForwarder)

    def port_of(point: Point) -> int:
        return ports[point.rank]

    forwarder.forward.call_one(there, port_of, here, lambda point: f"127.0.0.1:{free[point.rank]}").get()
    connections = [socket.create_connection(("127.0.0.1", port), timeout=30) for port in free]
    for number, (server, connection) in enumerate(zip(servers, connections, strict=True)):
        accepted, _ = server.accept()
        with accepted:
            connection.sendall(b"asked")
            assert accepted.recv(100) == b"asked"
            accepted.sendall(b"answered by %d" % number)
        assert connection.recv(100) == b"answered by %d" % number
    for address, port, said in (("127.0.0.1:0", 1, "1 through 65535"), ("0.0.0.0:8080", 1, "this user alone")):
        with pytest.raises(ActorError, match=said):
            forwarder.forward.call_one(there, port, here, address).get()
    with pytest.raises(ActorError, match="of one shape"):
        forwarder.forward.call_one(there, 1, here.slice(p=slice(0, 1)), "127.0.0.1:1").get()
    with pytest.raises(ActorError, match="cannot be had"):
        forwarder.forward.call_one(there, 1, here, f"127.0.0.1:{ports[0]}").get()
    forwarder.stop().get()
    for connection in connections:
        connection.close()
    for port in free:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=30)
    for server in servers:
        server.close()
    for procs in (here, there):
        procs.stop().get()


def test_ids_of_workers_travel_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = [job.new_service_proc_id() for _ in range(2)]
    text = job.serialize_service_proc_ids(ids)
    assert json.loads(text) == [str(each) for each in ids]
    assert job.deserialize_service_proc_ids(text) == ids
    assert job.ranked_service_proc_id_from_env() is None
    monkeypatch.setenv(job.SERVICE_PROC_IDS_ENV, text)
    monkeypatch.setenv(job.SERVICE_PROC_RANK_ENV, "1")
    assert job.ranked_service_proc_id_from_env() == ids[1]
    assert job.service_proc_addrs(["tcp://a:1", "tcp://b:1"], ids) == [f"{ids[0]}@tcp://a:1", f"{ids[1]}@tcp://b:1"]
    assert job.service_proc_addr("tcp://a:1", None) == "tcp://a:1"
    with pytest.raises(ValueError, match="got 1 worker addresses and 2"):
        job.service_proc_addrs(["tcp://a:1"], ids)


def test_meshes_are_added_to_a_slurm_job_before_it_is_applied() -> None:
    made = job.SlurmJob({"a": 1})
    made.add_mesh("b", 2)
    assert dict(made.meshes) == {"a": 1, "b": 2}
    with pytest.raises(ValueError, match="must be a whole number of at least 1"):
        made.add_mesh("c", 0)
    made.share_node(tasks_per_node=2, gpus_per_task=4, partition="shared")
    assert made._launcher.options()["exclusive"] is False
    assert (made._resources.gpus, made._resources.options["partition"]) == (8, "shared")
    made.apply_id = "applied"
    for late in (lambda: made.add_mesh("d", 1), lambda: made.share_node(1, 1, "p")):
        with pytest.raises(RuntimeError, match="comes too late"):
            late()


def test_a_workspace_is_merged_into_a_folder(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    workspace = Workspace({tmp_path / "one": "a", tmp_path / "two": "below/two"})
    workspace.merge(tmp_path / "out")
    assert [(tmp_path / "out" / path).read_text() for path in ("a/file", "below/two/file")] == ["one", "two"]
    role = SimpleNamespace(env={"PYTHONPATH": "/mine"})
    workspace.set_env_vars(SimpleNamespace(roles=[role]))
    root = role.env["WORKSPACE_DIR"]
    assert role.env["PYTHONPATH"].split(":") == ["/mine", f"{root}/a", f"{root}/below/two"]


def test_specs_of_meshes_as_torchx_keeps_them() -> None:
    spec = mesh_spec.MeshSpec("trainers", 2, "gpu.large", 8, hostnames=["node1", "node2"])
    server = mesh_spec.ServerSpec("run", 3, [spec], "slurm")
    assert server.is_running and server.host0("trainers") == "node1" and server.server_handle == "slurm:///run"
    assert server.to_json()["meshes"]["trainers"]["hosts"] == 2 and server.to_json()["state"] == "RUNNING"
    assert spec.server_addrs("metatls", 5) == ["metatls!node1:5", "metatls!node2:5"]
    assert mesh_spec.MeshSpec("here", 1, hostnames=["localhost"]).server_addrs()[0].endswith(":26600")
    with pytest.raises(ValueError, match="Unsupported transport: ipc"):
        spec.server_addrs("ipc")
    with pytest.raises(ValueError, match="'other' not found"):
        server.host0("other")
    with pytest.raises(RuntimeError, match="is PENDING"):
        mesh_spec.ServerSpec("run", 2, [spec], "slurm").host0("trainers")
    with pytest.raises(AssertionError, match="NAME:NUM_HOSTS:HOST_TYPE"):
        mesh_spec.mesh_spec_from_str("trainers:2")
    role = SimpleNamespace(name="trainers", num_replicas=4, port_map={"mesh": 5}, image="an image")
    app = SimpleNamespace(roles=[role], metadata=dict[str, str]())
    mesh_spec.tag_as_metadata(spec, app)
    found = mesh_spec.mesh_spec_from_metadata(app, "trainers")
    assert found == mesh_spec.MeshSpec("trainers", 4, "gpu.large", 8, port=5, image="an image")
    assert mesh_spec.mesh_spec_from_metadata(app, "other") is None
    with pytest.raises(NotImplementedError, match="no default component_fn"):
        defaults.component_fn("slurm")
