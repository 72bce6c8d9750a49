"""A worker: the host agent of a host that any controller of the team may use.

It listens at a URL and serves any number of controllers, one after the other or at once. A controller's procs end when
that controller ends or requests it; the worker keeps running. A worker ends on SIGTERM or Ctrl-C (on the second one
without waiting for ranks to clean up), when a controller shuts it down, and when the process that started it ends.
"""

from __future__ import annotations

import functools
import logging
import os
import socket
import stat
import sys
import time
from collections.abc import Hashable

import msgspec

from monarch_kernel._version import __version__
from monarch_kernel.protocol.announcement import WorkerAnnouncement
from monarch_kernel.protocol.messages import Death, ProcRef, Shutdown, SpawnProcs, StopProcs
from monarch_kernel.protocol.private_files import remove_socket, user_name
from monarch_kernel.protocol.serialize import Body
from monarch_kernel.protocol.worker_addresses import worker_address
from monarch_kernel.runtime.host import cleanup, forkserver
from monarch_kernel.runtime.host.agent import ORPHAN_GRACE, Agent
from monarch_kernel.runtime.host.devices import devices_here
from monarch_kernel.runtime.host.worker_start import WorkerConfig, announce
from monarch_kernel.runtime.node import coredumps
from monarch_kernel.runtime.node.audit import Audit
from monarch_kernel.runtime.node.interfaces import PeerLink
from monarch_kernel.runtime.node.link import listens
from monarch_kernel.runtime.node.node import Node

log = logging.getLogger(__name__)


#: How long before the end of its walltime a worker ends its ranks cleanly (seconds).
WALLTIME_MARGIN = 5.0


class WorkerAgent(Agent):
    """An agent that belongs to no controller.

    Args:
        config: its settings.
        server: the agent's end of the fork server's socket.
        server_pid: the fork server's pid.

    Raises:
        ValueError: no key can be read, or the address is invalid.
    """

    def __init__(self, config: WorkerConfig, server: socket.socket, server_pid: int) -> None:
        self._config = config
        self._start_options = start = config.start
        self._address = worker_address(start.address)
        remote = self._address.listen.startswith("tcp://")
        host = start.name or self._address.name or socket.gethostname()
        # A peer that connects over TCP may be on another machine, so it cannot share anything of this site.
        node = Node(config.id, "agent", config.run_dir, host, background=False, site=config.id if remote else None)
        super().__init__(node, server, server_pid)
        if remote:
            from monarch_kernel.protocol.keys import keys_in, load_keys

            coredumps.give_up(for_good=True)  # the fork server, and so each rank, keeps the user's limit
            if start.key:
                node.keys = keys_in(start.key, start.key_from, start.allow)
            else:
                node.keys = load_keys(start.key_file, start.allow)
            node.audit = _audit(node, start.audit)
            log.info("uses %s", node.keys.described)
        self._own_gateway = (node.ref.gateway, "")
        self._near: dict[str, ProcRef] = {}  # controllers of this site
        self._cwd = os.getcwd()
        self._leaving = ""
        self._signals = 0
        self._users: set[str] = set()
        self._use = 0  # counts the changes between used and unused
        self._to_sweep: set[str] = set()  # controllers whose leftover processes are killed after their last proc here
        node.on_hello.append(self._on_attached)

    # -- life -------------------------------------------------------------------------------

    def _begin(self) -> None:
        if self._address.listen.startswith("ipc://"):
            _remove_dead_socket(self._address.listen.removeprefix("ipc://"))
        try:
            url = self._node.listen_at(self._address.listen, self._address.advertised)
        except OSError as e:
            if self._address.listen in str(e):
                raise
            raise OSError(f"cannot listen at {self._address.listen}: {e.strerror or e}") from e
        start = self._start_options
        if start.lifeline >= 0:
            self._poller.register(start.lifeline, self._on_lifeline)
        self._before_ready()
        said = f"monarch-kernel worker {self._node.ref.host} listens at {url}"
        if start.quiet:
            log.info("%s", said)
        else:
            print(said, flush=True)
        announce(start, self._announcement(url))
        if start.ends_at:
            left = max(0.0, start.ends_at - WALLTIME_MARGIN - time.time())
            self._poller.call_later(left, self._on_walltime)
        self._note_use()

    def _announcement(self, url: str) -> WorkerAnnouncement:
        devices = devices_here()
        return WorkerAnnouncement(
            monarch_kernel=__version__,
            url=url,
            host=self._node.ref.host,
            pid=os.getpid(),
            id=self._node.id,
            python=".".join(map(str, sys.version_info[:3])),
            devices=None if devices is None else devices.names,
            ends_at=self._start_options.ends_at,
        )

    def _on_walltime(self) -> None:
        if not self._leaving:
            log.info("ending: its walltime is over in %g s", WALLTIME_MARGIN)
            self._leave("the walltime of its host is over")

    def _before_ready(self) -> None:
        """Prepare the worker before it announces that it listens."""

    def _between_steps(self) -> bool:
        if self._signals > 1:
            return True
        if self._signals and not self._leaving:
            self._leave("its worker was told to end")
        return super()._between_steps()

    def _on_sigterm(self, signum: int, frame: object) -> None:
        self._signals += 1
        self._poller.wake()

    def _on_lifeline(self, _events: int) -> None:
        self._poller.unregister(self._start_options.lifeline)
        self._signals += 1

    def _leave(self, why: str) -> None:
        self._leaving = why
        self._withdraw("")
        self._shut_down(why, ORPHAN_GRACE, lambda: None)

    def _is_used(self) -> bool:
        """Return whether there is a controller."""
        return bool(self._users)

    def _note_use(self) -> None:
        """Restart the idle limit if the worker is unused. Called when a controller connects or leaves."""
        self._use = use = self._use + 1

        def forgotten() -> None:
            if use == self._use and not self._leaving:
                log.info("ending: no controller for %g s", self._start_options.idle)
                self._leave("no controller has come for longer than its idle limit")

        idle = self._start_options.idle
        if idle and not self._is_used():
            self._poller.call_later(idle, forgotten)

    def _on_shutdown(self, link: PeerLink, message: Shutdown, body: Body) -> None:
        self._withdraw(link.peer)
        super()._on_shutdown(link, message, body)

    def _withdraw(self, wanted_by: str) -> None:
        """Make the end of each proc a failure for its owner, unless ``wanted_by`` requested it."""
        for proc in self._living(self._procs):
            proc.withdrawn = not proc.belongs_to(wanted_by)

    def _clean_up(self) -> None:
        super()._clean_up()
        cleanup.remove_inherited_run_dir(self._node.run_dir, self._config.lock_fd)

    # -- its controllers ----------------------------------------------------------------------

    def _on_attached(self, link: PeerLink) -> None:
        ref = self._node.refs[link.peer]
        if ref.agent != ref.id:
            return
        log.info("%s of %s has connected", ref.id, ref.host)
        if ref.is_controller and ref.id not in self._users:
            self._users.add(ref.id)
            self._note_use()
        if ref.site == self._node.ref.site and ref.gateway == ref.id:
            self._near[ref.id] = ref
            self._choose_gateway()

    def _choose_gateway(self) -> None:
        """Choose the controller through which other sites reach this worker, as its ranks, if it has no TCP address."""
        node = self._node
        last = list(self._near.values())[-1:]
        name, address = (last[0].gateway, last[0].gateway_address) if last else self._own_gateway
        node.ref = node.refs[node.id] = msgspec.structs.replace(node.ref, gateway=name, gateway_address=address)

    def _on_spawn(self, link: PeerLink, message: SpawnProcs, body: Body) -> None:
        self._mark(message)
        super()._on_spawn(link, message, body)

    def _mark(self, message: SpawnProcs) -> None:
        """Mark the processes of these procs with their controller."""
        message.env[cleanup.ROOT_MARKER] = message.root.id

    def _template_scope(self, message: SpawnProcs) -> Hashable:
        return tuple(message.sys_path)  # each controller has its own

    def _place(self, message: SpawnProcs) -> tuple[str, list[str]]:
        """Return the controller's folders that exist here, followed by this worker's own."""
        cwd = message.cwd if os.path.isdir(message.cwd) else self._cwd
        wanted = [entry or cwd for entry in message.sys_path]
        return cwd, list(dict.fromkeys([*filter(os.path.exists, wanted), *sys.path]))

    def _ref_of(self, proc: str, address: str, message: SpawnProcs) -> ProcRef:
        ref = super()._ref_of(proc, address, message)
        for near in (message.root, message.owner):
            if near.site == ref.site:  # on this machine, hence reached through its controller's gateway
                return msgspec.structs.replace(ref, gateway=near.gateway, gateway_address=near.gateway_address)
        return ref

    def _must_preload(self, failed: forkserver.TemplateFailed | None) -> bool:
        return failed is None  # ranks on this host may not need a module that is missing here

    def _on_peer_dead(self, peer: str, death: Death) -> None:
        super()._on_peer_dead(peer, death)
        self._placements.pop(peer, None)
        if peer in self._users:
            self._users.discard(peer)
            self._note_use()
        if self._near.pop(peer, None) is not None:
            self._choose_gateway()
        theirs = [proc.id for proc in self._procs.values() if proc.root == peer]
        if theirs:
            log.info("%s is gone (%s), and with it its %d procs here", peer, death.cause, len(theirs))
            self._answer_when_gone(theirs, True, functools.partial(self._forget, peer, theirs))

    def _forget(self, controller: str, procs: list[str]) -> None:
        """Drop the state of a dead controller's procs, which are all gone, and kill what they have left behind."""
        node = self._node
        for name in procs:
            proc = self._procs.pop(name, None)  # the controller may have returned and left again
            for output in proc.logs.values() if proc is not None else ():
                output.remove()
            for known in (node.refs, node.deaths, node.pids):  # a worker may serve for months
                known.pop(name, None)
        self._dead = [proc for proc in self._dead if proc.id in self._procs]
        if not self._living(self._procs):
            self._retire_templates(0)
        self._sweep(controller)

    def _stopped(self, link: PeerLink, message: StopProcs) -> None:
        if message.procs is None:
            self._sweep(link.peer)
        elif message.rest:
            self._sweep_when_gone(link.peer)
        super()._stopped(link, message)

    def _sweep_when_gone(self, controller: str) -> None:
        """Sweep when the controller has no living procs here: their programs have the same marker as leftovers."""
        living = [proc.id for proc in self._procs.values() if proc.root == controller and proc.exit is None]
        if not living:
            self._sweep(controller)
        elif controller not in self._to_sweep:

            def look_again() -> None:
                self._to_sweep.discard(controller)
                self._sweep_when_gone(controller)

            self._to_sweep.add(controller)
            self._answer_when_gone(living, True, look_again)

    def _sweep(self, controller: str) -> None:
        """Kill processes that ranks of a controller have left behind in other sessions."""
        cleanup.kill_run(controller, cleanup.ROOT_MARKER)
        if all(proc.exit is not None and proc.belongs_to(controller) for proc in self._procs.values()):
            cleanup.kill_adopted(self._base_pid)  # then forks without a marker can only be its own


def _audit(node: Node, path: str) -> Audit:
    try:
        return Audit(node.poller, path)
    except OSError as e:
        raise OSError(f"cannot write to the audit file {path}: {e.strerror or e}") from e


def _remove_dead_socket(path: str) -> None:
    """Remove the socket that a killed worker of this user has left.

    Raises:
        OSError: the path has something else, which is kept.
    """
    try:
        about = os.lstat(path)
    except OSError:
        return  # the path is free, or listening reports the error
    if not stat.S_ISSOCK(about.st_mode):
        raise OSError(
            f"cannot listen at ipc://{path}: there is a file that is not a socket, and it stays: name another path"
        )
    if about.st_uid != os.geteuid():
        raise OSError(
            f"cannot listen at ipc://{path}: the socket there belongs to {user_name(about.st_uid)}: name a path in a "
            "folder that only you can write to, such as $XDG_RUNTIME_DIR"
        )
    if listens(path):
        raise OSError(f"cannot listen at ipc://{path}: another process listens there")
    remove_socket(path, (about.st_dev, about.st_ino))
