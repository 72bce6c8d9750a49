"""Limits: the speed of the machine, its kernel and bare pyzmq, without any actor runtime.

Two processes (fork) in plain Python. On virtual machines, the CPU of a wake-up matters, so compare several rounds.
"""

from __future__ import annotations

import ctypes
import mmap
import multiprocessing
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import zmq

from bench.measure import QUICK, SIZES, bandwidth, emit, emit_memory, latency, rate, run, version

MESSAGE = b"hello w"


def child(body: Callable[..., object], *args: object) -> int:
    """Fork a process that runs body and exits; return its pid."""
    pid = os.fork()
    if not pid:
        try:
            body(*args)
        finally:
            os._exit(0)
    return pid


def end(*pids: int) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def echo(sock: socket.socket) -> None:
    while True:
        sock.send(sock.recv(100))


def pingpong() -> None:
    """Measure the round trip of a short message, by mechanism."""
    there, back = os.eventfd(0), os.eventfd(0)

    def answer() -> None:
        while True:
            os.eventfd_read(there)
            os.eventfd_write(back, 1)

    pid = child(answer)
    latency("py_eventfd", lambda: (os.eventfd_write(there, 1), os.eventfd_read(back)))
    end(pid)

    near, far = socket.socketpair()
    pid = child(echo, far)
    latency("py_unix", lambda: (near.send(MESSAGE), near.recv(100)))
    end(pid)

    p, q = multiprocessing.Pipe()

    def repeat() -> None:
        while True:
            q.send(q.recv())

    pid = child(repeat)
    latency("mp_pipe", lambda: (p.send("hello w"), p.recv()))
    end(pid)

    with tempfile.TemporaryDirectory() as folder:
        for name, url in (("ipc", f"ipc://{folder}/p"), ("tcp", f"tcp://127.0.0.1:{free_port()}")):
            zmq_pingpong(name, url)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def zmq_pingpong(name: str, url: str) -> None:
    """Measure a DEALER here and a ROUTER in a child that echoes."""

    def serve() -> None:
        router = zmq.Context().socket(zmq.ROUTER)
        router.setsockopt(zmq.SNDHWM, 0)  # at the high-water mark, a ROUTER drops messages
        router.bind(url)
        while True:
            router.send_multipart(router.recv_multipart())

    pid = child(serve)
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.linger = 0
    dealer.connect(url)

    def pipelined() -> None:
        for _ in range(1000):
            dealer.send(MESSAGE)
        for _ in range(1000):
            dealer.recv()

    def pickled() -> None:
        for i in range(1000):
            dealer.send(pickle.dumps((i, "hello", ("w",), {}), 5))
        for _ in range(1000):
            pickle.loads(dealer.recv())

    latency(f"zmq_{name}", lambda: (dealer.send(MESSAGE), dealer.recv()))
    rate(f"zmq_{name}_pipelined_per_s", pipelined, 1000)
    rate(f"zmq_{name}_pickled_pipelined_per_s", pickled, 1000)
    end(pid)
    context.destroy()


def fanout() -> None:
    """Measure one message to N and N answers: over pyzmq (ROUTER to DEALERs), and over Unix sockets with epoll."""
    for n in (8, 32):
        fanout_unix(n)
        with tempfile.TemporaryDirectory() as folder:
            fanout_zmq(n, f"ipc://{folder}/f")


def fanout_unix(n: int) -> None:
    pairs = [socket.socketpair() for _ in range(n)]
    pids = [child(echo, far) for _, far in pairs]
    poll, by_fd = select.epoll(), {near.fileno(): near for near, _ in pairs}
    for fd in by_fd:
        poll.register(fd, select.EPOLLIN)

    def go() -> None:
        for near, _ in pairs:
            near.send(MESSAGE)
        left = n
        while left:
            for fd, _ in poll.poll():
                by_fd[fd].recv(100)
                left -= 1

    latency(f"bcast{n}_unix", go)
    end(*pids)


def fanout_zmq(n: int, url: str) -> None:
    def work(i: int) -> None:
        dealer = zmq.Context().socket(zmq.DEALER)
        dealer.setsockopt(zmq.IDENTITY, b"%d" % i)
        dealer.connect(url)
        dealer.send(b"up")
        while True:
            dealer.send(dealer.recv())

    pids = [child(work, i) for i in range(n)]
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.linger = 0
    router.bind(url)
    ids = [router.recv_multipart()[0] for _ in pids]

    def go() -> None:
        for i in ids:
            router.send_multipart((i, MESSAGE))
        for _ in ids:
            router.recv_multipart()

    latency(f"bcast{n}", go)
    end(*pids)
    context.destroy()


def spawn() -> None:
    """Start N processes and receive one byte from each, by start method."""
    code = "import os,sys; os.write(int(sys.argv[1]), b'x'); sys.stdin.read()"
    ways = {
        "python_S": ["-S", "-E", "-c", code],
        "python": ["-c", code],
        "python_zmq": ["-c", f"import zmq\n{code}"],
    }
    for n in (8, 32):
        spawn_forks(n)
        for way, argv in ways.items():
            r, w = os.pipe()
            start = time.perf_counter()
            started = [
                subprocess.Popen([sys.executable, *argv, str(w)], pass_fds=(w,), stdin=subprocess.PIPE)
                for _ in range(n)
            ]
            hear(r, n)
            emit(f"spawn_{n}_{way}_s", round(time.perf_counter() - start, 4))
            if n == 8:
                emit_memory(f"rss_{way}_mb", [p.pid for p in started])
            for p in started:
                p.kill()
                p.communicate()
            os.close(r)
            os.close(w)


def spawn_forks(n: int) -> None:
    r, w = os.pipe()
    start = time.perf_counter()
    pids = [child(lambda: (os.write(w, b"x"), time.sleep(99))) for _ in range(n)]
    hear(r, n)
    emit(f"spawn_{n}_fork_s", round(time.perf_counter() - start, 4))
    if n == 8:
        emit_memory("rss_fork_mb", pids)
    end(*pids)


def hear(fd: int, n: int) -> None:
    while n > 0:
        n -= len(os.read(fd, n))


def payload() -> None:
    """Send an array to another process, with a short answer: over zmq ipc, and through a shared segment."""
    with tempfile.TemporaryDirectory() as folder:
        url = f"ipc://{folder}/c"
        segments = {n: mmap.mmap(-1, n) for n in SIZES.values()}

        def sink() -> None:
            router = zmq.Context().socket(zmq.ROUTER)
            router.bind(url)
            while True:
                who, kind, body = router.recv_multipart(copy=False)
                data: Any = segments[int(body.bytes)] if kind.bytes == b"shm" else body.buffer
                router.send_multipart((who, b"%d" % np.frombuffer(data, np.uint8).nbytes))

        pid = child(sink)
        context = zmq.Context()
        dealer = context.socket(zmq.DEALER)
        dealer.linger = 0
        dealer.connect(url)
        for size, n in SIZES.items():
            x = np.ones(n, np.uint8)
            shared = np.frombuffer(segments[n], np.uint8)

            def put(x: Any = x, shared: Any = shared, n: int = n) -> None:
                shared[:] = x
                dealer.send_multipart((b"shm", b"%d" % n))
                dealer.recv()

            def send(x: Any = x) -> None:
                dealer.send_multipart((b"in", x), copy=False)
                dealer.recv()

            bandwidth(f"payload_in_{size}_zmq", n, send)
            bandwidth(f"payload_in_{size}_shm", n, put)
        end(pid)
        context.destroy()


class IoVec(ctypes.Structure):
    """`struct iovec`."""

    _fields_ = [("base", ctypes.c_void_p), ("len", ctypes.c_size_t)]


def bulk() -> None:
    """Move 64 MB (memcpy: also 1 GB): memcpy, another process's memory, a Unix socket stream."""
    size, n = "64MB", SIZES["64MB"]
    p, q = multiprocessing.Pipe()

    def hold() -> None:
        held = np.ones(n, np.uint8)
        q.send(held.ctypes.data)
        time.sleep(999)

    pid = child(hold)
    address = p.recv()
    x, y = np.ones(n, np.uint8), np.ones(n, np.uint8)  # created after the fork: nothing is copied on write
    bandwidth(f"bulk_memcpy_{size}", n, lambda: np.copyto(y, x))
    bandwidth(f"bulk_memcpy_fresh_{size}", n, lambda: x.copy())
    if not QUICK:
        huge, other = np.ones(1 << 30, np.uint8), np.ones(1 << 30, np.uint8)
        bandwidth("bulk_memcpy_1GB", 1 << 30, lambda: np.copyto(other, huge))
        del huge, other
    libc = ctypes.CDLL(None, use_errno=True)
    for name in ("process_vm_readv", "process_vm_writev"):
        transfer = getattr(libc, name)
        transfer.restype = ctypes.c_ssize_t

        def go(transfer: Any = transfer, name: str = name) -> None:
            at = 0
            while at < n:
                here, there = IoVec(y.ctypes.data + at, n - at), IoVec(address + at, n - at)
                done = transfer(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
                if done < 0:
                    raise OSError(ctypes.get_errno(), name)
                at += done

        bandwidth(f"bulk_{name}_{size}", n, go)
    end(pid)

    near, far = socket.socketpair()

    def receive() -> None:
        into = np.empty(n, np.uint8).data
        while True:
            at = 0
            while at < n:
                at += far.recv_into(into[at:])
            far.send(b"x")

    pid = child(receive)
    bandwidth(f"bulk_unix_{size}", n, lambda: (near.sendall(x.data), near.recv(1)))
    end(pid)


def fail() -> None:
    """SIGKILL a child: the seconds until the parent notices, by mechanism; the median of five."""

    def by_pidfd() -> float:
        pid = child(time.sleep, 99)
        fd = os.pidfd_open(pid)
        start = time.perf_counter()
        os.kill(pid, signal.SIGKILL)
        select.select([fd], [], [])
        known = time.perf_counter() - start
        os.close(fd)
        os.waitpid(pid, 0)
        return known

    def by_end_of_file() -> float:
        near, far = socket.socketpair()
        pid = child(lambda: (near.close(), far.send(b"x"), time.sleep(99)))
        far.close()
        near.recv(1)
        start = time.perf_counter()
        os.kill(pid, signal.SIGKILL)
        near.recv(1)
        known = time.perf_counter() - start
        os.waitpid(pid, 0)
        return known

    for how, once in (("pidfd", by_pidfd), ("socket_eof", by_end_of_file)):
        emit(f"fail_{how}_s", round(sorted(once() for _ in range(5))[2], 6))


if __name__ == "__main__":
    version(
        pyzmq=zmq.__version__,
        libzmq=zmq.zmq_version(),
        numpy=np.__version__,
        Linux=Path("/proc/sys/kernel/osrelease").read_text().strip(),
    )
    run(
        {
            "pingpong": pingpong,
            "fanout": fanout,
            "spawn": spawn,
            "payload": payload,
            "bulk": bulk,
            "fail": fail,
        }
    )
