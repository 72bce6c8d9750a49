"""Jobs with telemetry, an admin server and forwarded ports, and what fails without them."""

import inspect
import json
import socket
import time
import urllib.error
import urllib.request

from monarch.actor import Actor, endpoint, this_host, this_proc
from monarch.job import JobTrait, LocalJob, MeshAdminConfig, PortForwarder, ProcessJob, SlurmJob, TelemetryConfig
from monarch.job.spmd import SPMDJob, StoreJob
from monarch.tools.mesh_spec import MeshSpec, ServerSpec
from report import raises, show

TABLES = [
    *("actors", "actor_status_events", "meshes", "metric_gauges", "metric_sums", "snapshots", "nodes", "children"),
    *("root_nodes", "host_nodes", "actor_executions", "active_handlers", "actor_failures"),
]
MEMBERS = [
    *("apply", "apply_id", "active", "can_run", "dump", "dumps", "enable_admin", "enable_telemetry", "kill"),
    *("profile", "state", "telemetry_query_client"),
]


class Quiet(Actor):
    @endpoint
    def nothing(self):
        return 1


def main():
    show("configs", TelemetryConfig(), MeshAdminConfig())
    for cls in (JobTrait, LocalJob, ProcessJob, SlurmJob, SPMDJob, StoreJob):
        show(cls.__name__, [name for name in MEMBERS if not hasattr(cls, name)])
    local = LocalJob()
    state = local.state(cached_path=None)
    show("without", state.query_engine_client, state.admin_url, state.telemetry_url, state.dashboard_url)
    raises("profile", RuntimeError, local.profile)
    raises("client", RuntimeError, local.telemetry_query_client)
    raises("no mesh", AttributeError, lambda: state.nothing)
    raises("keyword", TypeError, lambda: local.enable_telemetry(nothing=1))
    job = ProcessJob({"boxes": 1})
    config = TelemetryConfig(retention_secs=600, snapshot_interval_secs=0.5)
    show("chained", job.enable_admin() is job, job.enable_telemetry(config) is job)
    state = job.state(cached_path=None)
    state.boxes.spawn_procs({"p": 2}).spawn("quiet", Quiet).nothing.call().get()

    def rows(sql):
        return state.query_engine_client.query(sql, timeout=60)["rows"]

    wanted = "SELECT display_name FROM actors WHERE display_name LIKE '%quiet{%' ORDER BY rank"
    deadline = time.monotonic() + 60
    while len(rows(wanted)) < 2 and time.monotonic() < deadline:
        time.sleep(0.2)
    show("actors", ["Quiet quiet{" in row["display_name"] for row in rows(wanted)])
    events = "SELECT DISTINCT new_status FROM actor_status_events e JOIN actors a ON e.actor_id = a.id"
    found = {row["new_status"] for row in rows(f"{events} WHERE a.display_name LIKE '%quiet{{%'")}
    show("statuses", sorted(found & {"Created", "Initializing", "Idle"}))
    for table in TABLES:
        show(table, sorted(row["column_name"] for row in rows(f"DESCRIBE {table}")))
    listed = {row["table_name"] for row in rows("SHOW TABLES")}
    show("listed", sorted({*TABLES} - listed))
    try:
        rows("SELEC 1")
    except urllib.error.HTTPError as e:
        show("wrong", e.code)
    with urllib.request.urlopen(f"{state.admin_url}/v1/root", timeout=60) as answer:
        root = json.loads(answer.read())
    show("root", sorted(root), list(root["properties"]), root["parent"])
    show("client", type(job.telemetry_query_client()) is type(state.query_engine_client))
    job.kill()

    show("forward", list(inspect.signature(PortForwarder.forward._method).parameters)[1:])
    server = socket.create_server(("127.0.0.1", 0))
    with socket.create_server(("127.0.0.1", 0)) as other:
        free = other.getsockname()[1]
    procs = this_host().spawn_procs()
    forwarder = this_proc().spawn("forwarder", PortForwarder)
    address = f"127.0.0.1:{free}"
    show("forwarded", forwarder.forward.call_one(procs, server.getsockname()[1], procs, address).get())
    connection = socket.create_connection(("127.0.0.1", free), timeout=60)
    accepted, _ = server.accept()
    accepted.sendall(b"through")
    show(connection.recv(100))
    for each in (accepted, connection, server):
        each.close()
    forwarder.stop().get()

    spec = MeshSpec("a", 2, "h", 8, hostnames=["n1", "n2"])
    ready = ServerSpec("run", 3, [spec], "slurm")
    show("spec", ready.server_handle, ready.is_running, ready.host0("a"), spec.server_addrs("metatls", 5))
    raises("transport", ValueError, lambda: spec.server_addrs("ipc"))
    raises("no spec", ValueError, lambda: ready.host0("b"))


if __name__ == "__main__":
    main()
