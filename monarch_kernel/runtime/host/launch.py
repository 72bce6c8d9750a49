"""Create a controller's run folder and start its host agent."""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import signal
import socket
import sys
import threading

import msgspec

from monarch_kernel import logs, programs
from monarch_kernel.protocol.messages import Death, DeathKind, ProcRef
from monarch_kernel.runtime.host import cleanup
from monarch_kernel.runtime.host.start_command import AgentConfig, describe_exit, interpreter_command
from monarch_kernel.runtime.node import coredumps, descriptors
from monarch_kernel.runtime.node.node import Node

log = logs.logger(__name__)

#: The descriptor of the run folder's lock in the agent.
_LOCK_FD = 3

_run_dirs: dict[str, cleanup.RunDir] = {}
_lock = threading.Lock()


def new_run_dir() -> str:
    """Create a run folder of this process (mode 0700), and clean up after dead controllers of this user."""
    run_dir = cleanup.make_run_dir()
    with _lock:
        if not _run_dirs:
            atexit.register(_remove_run_dirs, os.getpid())
        _run_dirs[run_dir.path] = run_dir
    return run_dir.path


def remove_run_dir(path: str) -> None:
    """Remove a run folder of this process."""
    with _lock:
        run_dir = _run_dirs.pop(path, None)
    if run_dir is not None:
        run_dir.remove()


def _remove_run_dirs(pid: int) -> None:
    if os.getpid() == pid:  # not in a fork, whose exit handlers are its parent's
        for path in list(_run_dirs):
            remove_run_dir(path)


class AgentProcess:
    """The host agent of this controller, running or starting."""

    def __init__(self, node: Node, ref: ProcRef, pid: int, lifeline: socket.socket) -> None:
        self.ref = ref
        self.pid = pid
        self._node = node
        self._lifeline = lifeline
        self._closing = False
        self._ended = threading.Lock()
        self._status: int | None = None  # its exit code, or minus the signal
        self._pidfd = os.pidfd_open(pid)
        node.poller.register(self._pidfd, self._on_exit)

    def _on_exit(self, _events: int) -> None:
        self._node.poller.unregister(self._pidfd)
        status = self._reap()
        if self._closing:
            return
        self._lifeline.close()
        if status == 0:
            kind, cause = DeathKind.STOPPED, "the host agent was shut down"
        else:
            kind, cause = DeathKind.AGENT_EXITED, f"the host agent {describe_exit(status)}"
        death = Death.of(kind, cause, self.ref.id, self.ref.host, self.pid, self._last_words())
        self._node.declare_dead(self.ref.id, death)
        self._node._agent_dead(self.ref.id, self.ref)

    def _last_words(self) -> str:
        try:
            with open(os.path.join(self._node.run_dir, "agent.log"), "rb") as file:
                return file.read()[-4000:].decode("utf-8", "replace").strip()
        except OSError:
            return ""

    def _reap(self, timeout: float | None = None) -> int:
        """Wait for its end; return its exit code, or minus the signal.

        Raises:
            TimeoutError: it is still running.
        """
        with self._ended:
            if self._status is None:
                poll = select.poll()
                poll.register(self._pidfd, select.POLLIN)
                if not poll.poll(None if timeout is None else timeout * 1e3):
                    raise TimeoutError
                try:
                    self._status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
                except ChildProcessError:  # the program reaps all its children, and has taken the status
                    self._status = 0
                os.close(self._pidfd)
                if self._status != 0:
                    # Its fork server cleans up after it, unless the fork server was killed at the same time.
                    cleanup.kill_run(self.ref.id, cleanup.AGENT_MARKER)
            return self._status

    def close(self, timeout: float = 5.0) -> None:
        """End the agent and with it every rank, and remove the run folder; called when the node closes."""
        self._closing = True
        try:
            self._lifeline.send(b"\0")  # the farewell, so that this process removes the run folder
        except OSError:
            pass
        self._lifeline.close()
        try:
            self._reap(timeout)
        except TimeoutError:
            log.warning("the host agent (pid %d) did not end within %g s and was killed", self.pid, timeout)
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            self._reap()
        remove_run_dir(self._node.run_dir)


def launch_local_agent(node: Node) -> AgentProcess:
    """Start this host's agent for the controller that owns ``node``, without waiting for it.

    The agent connects to ``node``. Messages sent to it before that are queued. If it dies, ``node`` declares it and all
    its procs dead.

    Raises:
        OSError: the process could not be started.
    """
    agent_id = f"agent-{os.urandom(4).hex()}"
    address = os.path.join(node.run_dir, agent_id + ".sock")
    near = node.ref
    ref = ProcRef(agent_id, address, near.host, agent_id, address, near.site, near.gateway, near.gateway_address)
    run_dir = _run_dirs[node.run_dir]
    python_path = os.environ.get("PYTHONPATH")
    env = {
        **os.environ,
        cleanup.MARKER: cleanup.run_name(node.run_dir),
        cleanup.AGENT_MARKER: agent_id,
        "PYTHONPATH": os.pathsep.join(filter(None, (programs.ROOT, python_path))),
    }
    path = [entry or os.getcwd() for entry in sys.path]  # "" would refer to the agent's own folder
    config = AgentConfig(
        agent_id,
        node.run_dir,
        node.ref.host,
        node.ref,
        os.getpid(),
        _LOCK_FD,
        python_path,
        path,
        descriptors.users_limit(),
    )
    lifeline, far_end = socket.socketpair()
    node.expect(ref)
    try:
        with far_end, open(os.path.join(node.run_dir, "agent.log"), "ab") as output, coredumps.users_limit():
            pid = programs.spawn(
                interpreter_command("monarch_kernel.runtime.host.__main__"),
                env,
                {0: far_end.fileno(), 1: output.fileno(), 2: output.fileno(), _LOCK_FD: run_dir.lock_fd},
                new_session=True,
            )
    except OSError:
        lifeline.close()
        raise
    data = msgspec.msgpack.encode(config)
    try:
        lifeline.sendall(len(data).to_bytes(4, "little") + data)
    except OSError:
        pass  # it is already dead, which `AgentProcess` detects
    agent = AgentProcess(node, ref, pid, lifeline)
    node.poller.start_background()
    return agent
