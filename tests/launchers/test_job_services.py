"""Telemetry, admin server and dashboard of jobs."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from monarch_kernel.actor import Actor, endpoint, this_host
from monarch_kernel.job import LocalJob, MeshAdminConfig, ProcessJob, TelemetryConfig
from tests.conftest import wait_until
from tests.otheruser import OtherUser
from tests.otheruser import other_user as other_user


class Quiet(Actor):
    """Does nothing much."""

    @endpoint
    def nothing(self) -> None:
        """Returns."""


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs are written down in the working folder."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def job() -> Iterator[LocalJob]:
    """A job with telemetry and a dashboard."""
    made = LocalJob().enable_telemetry(TelemetryConfig(include_dashboard=True, dashboard_port=0))
    yield made
    made.kill()


def got(url: str, **headers: str) -> bytes:
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=30) as answer:
        return bytes(answer.read())


def test_telemetry_answers_with_the_tables_of_monarch(job: LocalJob) -> None:
    state = job.state(cached_path=None)
    procs = state.hosts.spawn_procs({"p": 2}, name="telemetry")
    procs.spawn("quiet", Quiet).nothing.call().get()
    client = state.query_engine_client
    assert client is not None

    def rows(sql: str) -> list[dict[str, Any]]:
        return client.query(sql)["rows"]

    actors = "SELECT a.rank, a.display_name, m.given_name, m.class FROM actors a JOIN meshes m ON a.mesh_id = m.id"
    wait_until(lambda: len(rows(f"{actors} WHERE m.given_name = 'quiet'")) == 2, "both actors are known")
    found = rows(f"{actors} WHERE m.given_name = 'quiet' ORDER BY a.rank")
    assert [row["rank"] for row in found] == [0, 1]
    assert found[1]["display_name"].endswith("quiet{'p': 1/2}>") and found[1]["class"].endswith("Quiet")
    events = "SELECT new_status, COUNT(*) AS n FROM actor_status_events e JOIN actors a ON e.actor_id = a.id "

    def counts() -> dict[str, int]:
        return {row["new_status"]: row["n"] for row in rows(f"{events} GROUP BY new_status")}

    wait_until(lambda: counts().get("Idle", 0) >= 2, "both were seen idle")
    assert counts()["Created"] == 2
    assert rows("SELECT COUNT(*) AS n FROM proc_nodes JOIN nodes USING (node_id)") == [{"n": 2}]
    every = "SELECT COUNT(*) AS n FROM actor_status_events WHERE reason IS NULL"
    wait_until(lambda: rows(every)[0]["n"] >= 6, "the events of all actors are there")
    described = {row["column_name"] for row in rows("DESCRIBE actors")}
    assert described == {"id", "timestamp_us", "mesh_id", "rank", "full_name", "display_name"}
    for row in rows("SHOW TABLES"):
        assert isinstance(rows(f"SELECT * FROM {row['table_name']} LIMIT 1"), list)
    wait_until(lambda: rows("SELECT MAX(sum_i64) AS n FROM metric_sums WHERE name = 'rank.calls'")[0]["n"], "counted")
    with pytest.raises(urllib.error.HTTPError, match="400.*syntax error") as error:
        rows("SELEC 1")
    error.value.close()
    with pytest.raises(urllib.error.HTTPError, match="job.profile") as error:
        rows("SELECT * FROM messages")
    error.value.close()
    procs.stop().get()
    wait_until(lambda: rows(f"{events} WHERE new_status = 'Stopped' GROUP BY new_status"), "its end is seen")


def test_the_admin_server_walks_from_the_root(job: LocalJob) -> None:
    state = job.state(cached_path=None)
    procs = state.hosts.spawn_procs({"p": 1}, name="walked")
    procs.spawn("quiet", Quiet).nothing.call().get()
    url = state.admin_url

    def node(identity: str) -> dict[str, Any]:
        return json.loads(got(f"{url}/v1/{quote(identity, safe='')}"))

    def chain() -> list[dict[str, Any]]:
        found = [node("root")]
        while found[-1]["children"]:
            found.append(node(found[-1]["children"][-1]))
        return found

    wait_until(lambda: len(chain()) == 4, "root, host, proc and actor are there")
    root, host, proc, actor = chain()
    assert [next(iter(each["properties"])) for each in (root, host, proc, actor)] == ["Root", "Host", "Proc", "Actor"]
    assert actor["parent"] == proc["identity"] and actor["properties"]["Actor"]["actor_type"].endswith("Quiet")
    assert b"quiet" in got(f"{url}/v1/tree")
    assert b"walked" in got(f"{state.dashboard_url}/") and b"/v1/query" in got(f"{url}/SKILL.md")
    procs.stop().get()


def test_pages_and_other_users_get_nothing(job: LocalJob, request: pytest.FixtureRequest) -> None:
    url = str(job.state(cached_path=None).admin_url)
    for path, headers, code in (
        ("/v1/root", {"Host": "evil.example"}, 403),
        ("/v1/nothing", {}, 404),
    ):
        with pytest.raises(urllib.error.HTTPError) as error:
            got(url + path, **headers)
        assert error.value.code == code
        error.value.close()
    asked = urllib.request.Request(f"{url}/v1/query", b'{"sql": "SELECT 1"}', {"Content-Type": "text/plain"})
    with pytest.raises(urllib.error.HTTPError) as error:
        urllib.request.urlopen(asked, timeout=30)
    assert error.value.code == 415
    error.value.close()
    other: OtherUser = request.getfixturevalue("other_user")
    port = int(url.rpartition(":")[2])
    said = other.run(
        f"""
        connection = socket.create_connection(("127.0.0.1", {port}))
        try:
            connection.sendall(b"GET /v1/root HTTP/1.1\\r\\nHost: 127.0.0.1\\r\\n\\r\\n")
            print(len(connection.recv(100)))
        except ConnectionError:
            print(0)
        """
    )
    assert said.strip() == "0"


def test_another_program_of_the_folder_asks_the_same_telemetry() -> None:
    job = ProcessJob({"boxes": 1}).enable_telemetry()
    try:
        job.state()
        code = (
            "from monarch_kernel.job import job_load, DEFAULT_JOB_PATH\n"
            "print(job_load(DEFAULT_JOB_PATH).telemetry_query_client().query('SELECT num_hosts FROM root_nodes'))"
        )
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
        assert "{'rows': [{'num_hosts': " in run.stdout, run.stderr
        job._services.stop()
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
        assert "enable_telemetry() before" in run.stderr
    finally:
        job.kill()


def test_a_block_is_profiled(job: LocalJob, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"requires distributed telemetry; call job\.enable_telemetry\(\) before"):
        job.profile()
    state = job.state(cached_path=None)
    procs = this_host().spawn_procs({"p": 1}, name="profiled")
    quiet = procs.spawn("quiet", Quiet)
    ready: list[object] = []
    with job.profile(on_trace_ready=ready.append) as profiled:
        quiet.nothing.call().get()
        with pytest.raises(RuntimeError, match="before the end"):
            profiled.export_perfetto_trace()
        with pytest.raises(urllib.error.HTTPError, match="is on: end it first") as error:
            assert state.query_engine_client is not None
            state.query_engine_client.profile(1)
        error.value.close()
    file = profiled.export_perfetto_trace(tmp_path / "sub" / "trace.json")
    assert ready == [profiled] and profiled.path == file
    assert any(event.get("name") == "quiet.nothing" for event in json.loads(file.read_text())["traceEvents"])
    procs.stop().get()


def test_without_telemetry_there_is_none(caplog: pytest.LogCaptureFixture) -> None:
    job = LocalJob()
    state = job.state(cached_path=None)
    assert (state.query_engine_client, state.admin_url, state.telemetry_url, state.dashboard_url) == (None,) * 4
    with pytest.raises(RuntimeError, match="no distributed telemetry"):
        job.telemetry_query_client()
    job.kill()
    with pytest.raises(RuntimeError, match="not active"):
        job.telemetry_query_client()
    with pytest.raises(ValueError, match="has no port"):
        LocalJob().enable_admin(admin_addr="localhost").state(cached_path=None)
    job = LocalJob().enable_admin(MeshAdminConfig("[::]:0"))
    state = job.state(cached_path=None)
    assert "for this user's programs alone" in caplog.text
    assert state.query_engine_client is None and state.admin_url is not None
    with pytest.raises(urllib.error.HTTPError, match="403|400|404|415") as error:
        got(f"{state.admin_url}/v1/query")
    error.value.close()
    job.kill()
