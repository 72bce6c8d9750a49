"""Metrics: what they count, their forms, and who may read them."""

from __future__ import annotations

import http.client
import os
import queue
import signal
import socket
import stat
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from monarch_kernel.runtime.actor.tracing import call_hooks
from monarch_kernel.watch import Metrics, MetricsEndpoint
from monarch_kernel.watch.metrics import BOUNDS, MOST, MOST_ENDPOINTS, OTHERS, Counters, families
from monarch_kernel.watch.model import Delta, FailureView, HostView, MeshView, RankState, RankView, Snapshot
from tests.actor.conftest import Procs
from tests.conftest import wait_until
from tests.watch.actors import Worker


def delta(*ranks: RankView, failures: tuple[FailureView, ...] = (), gone: tuple[str, ...] = ()) -> Delta:
    """A change of some ranks of mesh "m" on host "h"."""
    return Delta(
        0,
        1,
        0.0,
        {"k": MeshView("k", "m", ("gpus",), (2,))},
        {"a": HostView("a", "h")},
        {(view.mesh, view.rank): view for view in ranks},
        {},
        gone,
        (),
        failures,
    )


def rank(number: int, proc: str, calls: int, state: RankState = RankState.IDLE) -> RankView:
    """A rank of it."""
    return RankView("k", number, "a", proc, state=state, calls=calls, failures=1, sent=10 * calls)


def test_counts_go_on_when_ranks_are_replaced() -> None:
    counters = Counters()
    counters.note(delta(rank(0, "p.0", 5), rank(1, "p.1", 7)))
    counters.note(delta(rank(0, "p.0", 6)))
    assert counters.sums["calls"] == {("m", "h"): 13} and counters.sums["sent_bytes"] == {("m", "h"): 130}
    counters.note(delta(rank(1, "p.1", 7, RankState.DEAD), failures=(FailureView(1, 0.0, "k", (1,), "death", "x"),)))
    counters.note(delta(rank(1, "p.9", 2)))  # healed; its counts begin again
    counters.note(delta(rank(1, "p.9", 1)))  # an actor has ended, and took its counts along
    assert counters.sums["calls"] == {("m", "h"): 16} and counters.heals == {"m": 1}
    assert counters.events == {("m", "death"): 1}
    counters.note(delta(gone=("k",)))
    assert counters.sums["calls"] == {("m", "h"): 16}


def test_latencies_are_bounded() -> None:
    counters = Counters()
    for number in range(MOST_ENDPOINTS + 50):
        counters.observe(f"a.e{number}", 0.003)
    found = dict(counters.latencies())
    assert len(found) == MOST_ENDPOINTS + 1 and sum(found[OTHERS][0]) == 50
    counters.observe("a.e0", 1e9)
    counters.observe("a.e0", 0.0001)
    counts, total = dict(counters.latencies())["a.e0"]
    assert counts[0] == counts[BOUNDS.index(0.005)] == counts[-1] == 1 and total > 1e9


def test_a_label_with_anything_in_it_is_valid_text(monkeypatch: pytest.MonkeyPatch) -> None:
    name = 'a "mesh"\\\n{x="1"} \u2603'
    mesh = MeshView("k", name, ("gpus",), (1,), hang="it hangs")
    view = Snapshot(1, 0.0, {"k": mesh}, {}, {"k": (rank(0, "p.0", 5, RankState.DEAD),)}, ())
    metrics = Metrics()
    monkeypatch.setattr(metrics, "families", lambda: tuple(families(view, Counters())))
    read = {family.name: family for family in text_string_to_metric_families(metrics.text().decode())}
    dead = [each for each in read["monarch_ranks"].samples if each.value]
    assert [each.labels for each in dead] == [{"mesh": name, "host": "a", "state": "dead"}]
    assert read["monarch_hung"].samples[0].value == 1


def test_metrics_of_real_ranks(procs: Procs, faults: queue.Queue[Any]) -> None:
    metrics = Metrics()
    assert metrics.families() == ()
    mesh = procs(2)
    workers = mesh.spawn("worker", Worker)
    workers.work.call().get()
    table = repr(metrics.once())
    assert "monarch_ranks" in table and "state=idle" in table and not metrics.is_on and call_hooks.sending is None
    metrics.start()
    try:
        for _ in range(10):
            workers.work.call().get()

        def read() -> dict[tuple[str, ...], float]:
            text = metrics.text().decode()
            return {
                (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
                for family in text_string_to_metric_families(text)
                for sample in family.samples
            }

        host = os.uname().nodename
        counted = ("monarch_calls_total", host, mesh.name)
        wait_until(lambda: read().get(counted) == 22, "all calls were counted")
        idle = ("monarch_ranks", host, mesh.name, "idle")
        wait_until(lambda: read().get(idle) == 2, "both ranks are reported as idle")
        found = read()
        assert found["monarch_rank_memory_bytes", host, mesh.name] > 1e6
        assert found["monarch_call_seconds_count", "worker.work"] == 10
        assert found["monarch_call_seconds_bucket", "worker.work", "+Inf"] == 10
        assert 0 < found["monarch_call_seconds_sum", "worker.work"] < 60
        assert "10 calls, mean" in repr(metrics.table())
        pid = mesh.status().get().get(1).pid
        assert pid
        os.kill(pid, signal.SIGKILL)
        faults.get(timeout=30)
        wait_until(lambda: read().get(("monarch_failures_total", "death", mesh.name)) == 1, "the death was counted")
        assert read()["monarch_ranks", host, mesh.name, "dead"] == 1
        mesh.heal().get()
        wait_until(lambda: read().get(("monarch_heals_total", mesh.name)) == 1, "the heal was counted")
    finally:
        metrics.stop()
    assert call_hooks.sending is None and metrics.families() == ()


@pytest.fixture
def endpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MetricsEndpoint]:
    """An endpoint whose token is in a folder of the test."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    served = MetricsEndpoint(lambda: b"m 1\n")
    yield served
    served.close()


def get(endpoint: MetricsEndpoint, path: str, **headers: str) -> tuple[int, bytes]:
    """The answer to a request."""
    connection = http.client.HTTPConnection("127.0.0.1", endpoint.port, timeout=30)
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, body


def test_only_who_has_the_token_reads_metrics(endpoint: MetricsEndpoint) -> None:
    token = Path(endpoint.token_file).read_text()
    assert stat.S_IMODE(os.stat(endpoint.token_file).st_mode) == 0o600
    assert endpoint.token_file in endpoint.scrape_config and str(endpoint.port) in endpoint.scrape_config
    assert get(endpoint, "/metrics", Authorization=f"Bearer {token}") == (200, b"m 1\n")
    assert get(endpoint, "/other", Authorization=f"Bearer {token}")[0] == 404
    for wrong in ("", "Bearer ", f"Bearer {token}x", token, f"Basic {token}", "Bearer \xff"):
        status, body = get(endpoint, "/metrics", Authorization=wrong)
        assert status == 401 and b"m 1" not in body
    again = MetricsEndpoint(lambda: b"")
    try:
        assert get(again, "/metrics", Authorization=f"Bearer {token}")[0] == 200  # it stays the same
        with pytest.raises(OSError, match="in use"):
            MetricsEndpoint(lambda: b"", again.port)
    finally:
        again.close()


def test_clients_that_drip_keep_nobody_out(endpoint: MetricsEndpoint) -> None:
    """Each byte of theirs comes in time, and the request never ends."""
    token = Path(endpoint.token_file).read_text()
    over = threading.Event()
    with ExitStack() as connected:
        drips: list[socket.socket] = []
        for _ in range(3 * MOST):
            drips.append(connected.enter_context(socket.create_connection(("127.0.0.1", endpoint.port), timeout=30)))
            drips[-1].sendall(b"GET /metrics HTTP/1.0\r\n")

        def drip() -> None:
            while not over.wait(0.05):
                for sock in drips:
                    with suppress(OSError):
                        sock.sendall(b"x")

        dripping = threading.Thread(target=drip)
        dripping.start()
        try:
            for _ in range(5):
                assert get(endpoint, "/metrics", Authorization=f"Bearer {token}") == (200, b"m 1\n")
            for sock in drips:  # each is hung up on, though it goes on all the while
                with suppress(ConnectionError):
                    assert sock.recv(100) == b""
        finally:
            over.set()
            dripping.join()


def test_a_token_that_others_could_have_written_is_refused(endpoint: MetricsEndpoint) -> None:
    os.chmod(endpoint.token_file, 0o666)
    with pytest.raises(PermissionError, match="other users may write to"):
        MetricsEndpoint(lambda: b"")
    os.unlink(endpoint.token_file)
    os.symlink("/etc/hostname", endpoint.token_file)
    with pytest.raises(PermissionError, match="is a link"):
        MetricsEndpoint(lambda: b"")
