"""The host agent of one controller, on the controller's own host.

It ends when its controller dies, closes its link or requests it, on SIGTERM, and when its fork server dies.
"""

from __future__ import annotations

import os
import select
import socket
import time

from monarch_kernel.protocol.messages import Death
from monarch_kernel.runtime.host import cleanup
from monarch_kernel.runtime.host.agent import Agent
from monarch_kernel.runtime.host.start_command import AgentConfig
from monarch_kernel.runtime.node.node import Node

#: A controller that closes its links without a farewell is dead, or dies within this time (seconds).
_FAREWELL = 5.0
#: How long an agent that fails checks whether its controller dies at the same time (seconds).
_LINGER = 1.0


class OwnedAgent(Agent):
    """An agent that lives and dies with its controller.

    Args:
        config: the controller's settings.
        server: the agent's end of the fork server's socket.
        server_pid: the fork server's pid.
        controller: a pidfd of the controller.
    """

    def __init__(self, config: AgentConfig, server: socket.socket, server_pid: int, controller: int) -> None:
        owner = config.owner
        node = Node(config.id, "agent", config.run_dir, config.host, background=False, site=owner.site, gateway=owner)
        super().__init__(node, server, server_pid)
        self._config = config
        self._owner = owner
        self._controller = controller

    def _begin(self) -> None:
        self._poller.register(0, self._on_lifeline)
        # A fork of the controller may hold its sockets open; the pidfd reports its death even then.
        self._poller.register(self._controller, self._on_controller_dead)
        self._node.learn(self._owner)
        self._node.link_to(self._owner.id)

    def _on_lifeline(self, _events: int) -> None:
        self._poller.unregister(0)
        self._end("the controller closed its end")

    def _on_controller_dead(self, _events: int) -> None:
        self._poller.unregister(self._controller)
        self._end("the controller has died")

    def _on_peer_dead(self, peer: str, death: Death) -> None:
        if peer == self._owner.id:
            self._end("the controller's link was closed")
        else:
            super()._on_peer_dead(peer, death)

    def _clean_up(self) -> None:
        super()._clean_up()
        if self._controller_died(_FAREWELL if self._code == 0 else _LINGER):
            cleanup.remove_inherited_run_dir(self._node.run_dir, self._config.lock_fd)

    def _controller_died(self, timeout: float) -> bool:
        """Return whether the controller ended without a farewell; then only this process can remove the run folder."""
        deadline = time.monotonic() + timeout
        waiting = [0, self._controller]
        while (left := deadline - time.monotonic()) > 0:
            ready = select.select(waiting, [], [], left)[0]
            if self._controller in ready:
                return True
            if 0 in ready:
                if os.read(0, 1):
                    return False
                waiting = [self._controller]  # a dying process closes its descriptors before its pidfd reports the exit
        return False
