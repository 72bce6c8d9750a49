"""The rows of the table: the name of each metric, its limit, and the bar that it must meet."""

from __future__ import annotations

from dataclasses import dataclass

REFERENCE = "torchmonarch"


@dataclass(frozen=True)
class Row:
    """One metric. `limit` names the metric of the `limit` peer that it is compared with."""

    metric: str
    label: str
    limit: str | None = None
    bar: float | None = None  # ours / torchmonarch must not be above this (rates: not below)
    most: float | None = None  # ours must be below this
    of_limit: float | None = None  # ours / limit must be at least this
    detail: bool = False  # shown with --all only

    @property
    def more_is_better(self) -> bool:
        return self.metric.endswith(("_GBps", "_per_s", "_per_s_async"))


ROWS = [
    Row("call1_us", "one call, round trip (µs)", "py_unix_us", bar=0.15),
    Row("call1_p99_us", "  same, p99 (µs)", "py_unix_p99_us"),
    Row("call1_cpu_us", "  same, CPU of all processes (µs)", "py_unix_cpu_us"),
    Row("call1_async_us", "one call, async endpoint (µs)", "py_unix_us"),
    Row("call1_await_us", "one call, awaited (µs)", "py_unix_us"),
    Row("call1_await_async_us", "one call, both async (µs)", "py_unix_us", detail=True),
    Row("bcast8_us", "call on 8 (µs)", "bcast8_unix_us", bar=0.35),
    Row("bcast8_p99_us", "  same, p99 (µs)", "bcast8_unix_p99_us"),
    Row("bcast8_cpu_us", "  same, CPU of all processes (µs)", "bcast8_unix_cpu_us"),
    Row("bcast8_async_us", "call on 8, async endpoints (µs)", "bcast8_unix_us", detail=True),
    Row("bcast32_us", "call on 32 (µs)", "bcast32_unix_us", bar=0.22),
    Row("bcast32_p99_us", "  same, p99 (µs)", "bcast32_unix_p99_us"),
    Row("a2a_us", "actor to actor (µs)", "py_unix_us", bar=0.2),
    Row("a2a_p99_us", "  same, p99 (µs)", "py_unix_p99_us"),
    Row("pipelined_per_s", "1,000 in flight (calls/s)", "zmq_ipc_pipelined_per_s", bar=5),
    Row("pipelined_per_s_async", "1,000 in flight, async endpoint (calls/s)", detail=True),
    Row("cast8_per_s", "broadcast to 8, then a barrier (casts/s)"),
    Row("cast8_per_s_async", "broadcast to 8, async endpoints (casts/s)", detail=True),
    Row("spawn_8_s", "spawn 8 + first call (s)", "spawn_8_fork_s", bar=0.2),
    Row("spawn_8_again_s", "  same, a second mesh (s)", "spawn_8_fork_s", bar=0.2),
    Row("spawn_32_s", "spawn 32 + first call (s)", "spawn_32_fork_s", bar=0.1),
    Row("spawn_32_again_s", "  same, a second mesh (s)", "spawn_32_fork_s", bar=0.1),
    Row("stop_8_again_s", "stop 8 (s)"),
    Row("stop_32_again_s", "stop 32 (s)", detail=True),
    Row("uss_idle_mb", "idle rank, private (MB)", "uss_python_mb", most=5),
    Row("rss_idle_mb", "idle rank, resident (MB)", "rss_python_mb"),
    Row("pss_idle_mb", "idle rank, proportional share (MB)", "pss_python_mb"),
    Row("rss_torch_mb", "rank with torch imported, resident (MB)", detail=True),
    Row("rss_controller_mb", "controller, resident (MB)", detail=True),
    Row("threads_per_proc", "threads of a rank"),
    Row("import_s", "import in the controller (s)"),
    Row("payload_in_1KB_GBps", "argument 1 KB (GB/s)", detail=True),
    Row("payload_in_1MB_GBps", "argument 1 MB (GB/s)", "payload_in_1MB_shm_GBps", bar=10),
    Row("payload_in_64MB_GBps", "argument 64 MB (GB/s)", "payload_in_64MB_shm_GBps", bar=20),
    Row("payload_in_256MB_GBps", "argument 256 MB (GB/s)", "payload_in_256MB_shm_GBps"),
    Row("payload_held_1MB_GBps", "result 1 MB (GB/s)", "payload_in_1MB_shm_GBps", bar=10),
    Row("payload_held_64MB_GBps", "result 64 MB (GB/s)", "payload_in_64MB_shm_GBps", bar=20),
    Row("payload_held_256MB_GBps", "result 256 MB (GB/s)", "payload_in_256MB_shm_GBps", detail=True),
    Row("payload_out_1MB_GBps", "result 1 MB, made for the call (GB/s)", "payload_in_1MB_shm_GBps"),
    Row("payload_out_64MB_GBps", "result 64 MB, made for the call (GB/s)", "payload_in_64MB_shm_GBps"),
    Row("payload_out_256MB_GBps", "result 256 MB, made for the call (GB/s)", detail=True),
    Row("payload_in_torch_64MB_GBps", "torch tensor argument 64 MB (GB/s)", "payload_in_64MB_shm_GBps", bar=20),
    Row("payload_held_torch_64MB_GBps", "torch tensor result 64 MB (GB/s)", "payload_in_64MB_shm_GBps", bar=20),
    Row("payload_out_torch_64MB_GBps", "torch result 64 MB, made for the call (GB/s)", "payload_in_64MB_shm_GBps"),
    Row("cast_64MB_8_over_1", "argument 64 MB to 8 ranks / to one", most=1.5),
    Row("bulk_read_4KB_GBps", "read_into 4 KB (GB/s)", detail=True),
    Row("bulk_read_64MB_GBps", "read_into 64 MB (GB/s)", "bulk_memcpy_64MB_GBps", bar=10, of_limit=0.8),
    Row("bulk_write_64MB_GBps", "write_from 64 MB (GB/s)", "bulk_memcpy_64MB_GBps", bar=10, of_limit=0.8),
    Row("bulk_read_1GB_GBps", "read_into 1 GB (GB/s)", "bulk_memcpy_1GB_GBps", bar=10, of_limit=0.8),
    Row("bulk_write_1GB_GBps", "write_from 1 GB (GB/s)", "bulk_memcpy_1GB_GBps", bar=10, of_limit=0.8),
    Row("fail_pending_s", "SIGKILL until a pending call fails (s)", "fail_pidfd_s", most=0.01),
    Row("fail_idle_s", "SIGKILL until a new call fails (s)", "fail_pidfd_s"),
]

#: Limits without a corresponding metric, for the second table.
LIMITS = {
    "py_eventfd_us": "eventfd ping-pong (µs)",
    "py_unix_us": "Unix socket ping-pong (µs)",
    "mp_pipe_us": "multiprocessing.Pipe ping-pong (µs)",
    "zmq_ipc_us": "pyzmq ipc ping-pong (µs)",
    "zmq_tcp_us": "pyzmq tcp loopback ping-pong (µs)",
    "zmq_ipc_pipelined_per_s": "pyzmq ipc, 1,000 in flight (messages/s)",
    "zmq_ipc_pickled_pipelined_per_s": "  same, pickled (messages/s)",
    "bcast8_unix_us": "fan-out to 8 over Unix sockets and back (µs)",
    "bcast8_us": "fan-out to 8 over pyzmq ipc and back (µs)",
    "bcast32_unix_us": "fan-out to 32 over Unix sockets and back (µs)",
    "spawn_8_fork_s": "fork 8 (s)",
    "spawn_8_python_s": "start 8 interpreters (s)",
    "spawn_32_fork_s": "fork 32 (s)",
    "rss_python_mb": "bare interpreter, resident (MB)",
    "bulk_memcpy_64MB_GBps": "memcpy 64 MB (GB/s)",
    "bulk_memcpy_fresh_64MB_GBps": "memcpy 64 MB into fresh pages (GB/s)",
    "bulk_process_vm_readv_64MB_GBps": "process_vm_readv 64 MB (GB/s)",
    "bulk_unix_64MB_GBps": "Unix socket stream 64 MB (GB/s)",
    "payload_in_64MB_shm_GBps": "64 MB through a shared segment and an answer (GB/s)",
    "fail_pidfd_s": "SIGKILL until the pidfd is readable (s)",
    "fail_socket_eof_s": "SIGKILL until the socket ends (s)",
}

#: group -> the peers that have it, in the order in which they run.
GROUPS = ["calls", "spawn8", "spawn32", "rss", "payload", "bulk", "fail"]
LIMIT_GROUPS = {
    "calls": ["pingpong", "fanout"],
    "spawn8": ["spawn"],
    "spawn32": ["spawn"],
    "rss": ["spawn"],
    "payload": ["payload"],
    "bulk": ["bulk"],
    "fail": ["fail"],
}


def mark(less: float | None, more: float | None) -> str:
    """Return whether a bar is met: the first value may not exceed the second. "?": one was not measured."""
    if less is None or more is None:
        return "?"
    return "ok" if less <= more else "MISS"
