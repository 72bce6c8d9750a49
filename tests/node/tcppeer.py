"""A process at the other end of a link over TCP: ``python tcppeer.py listen|dial KEY_FILE URL``.

It prints a line when it listens, or is connected. What it does with a message says the ``proc`` in its header.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import Any

from monarch_kernel.protocol.keys import load_keys
from monarch_kernel.protocol.messages import ProcStarted, encode
from monarch_kernel.runtime.node.audit import Audit
from monarch_kernel.runtime.node.poller import Poller
from monarch_kernel.runtime.node.tcp import Listener, dial

#: Whether it says of itself that only something that is wrong with it makes it silent.
STEADY = not os.environ.get("PEER_RUNS_USER_CODE")


class Peer:
    """Echoes, and does what it is told."""

    def __init__(self) -> None:
        self.poller = Poller(background=False)
        self.ended = False
        self.listener: Listener | None = None

    def on_message(self, link: Any, message: Any, body: Any) -> None:
        what = message.proc
        if what == "fork":
            reading, writing = os.pipe()
            child = os.fork()
            if not child:
                os.write(writing, b"here")
                signal.pause()
                os._exit(0)
            os.read(reading, 4)
            link.send(encode(ProcStarted("forked", child)))
        elif what == "die":  # in order, as quickly as can be
            link.send(encode(ProcStarted("farewell", 0)), bytes(body))
            link.close()
            if self.listener is not None:
                self.listener.close()
            self.poller.close()
            os._exit(0)
        elif what == "compute":  # in C, without letting go of the interpreter's lock
            ctypes.PyDLL(None).usleep(message.pid)
            link.send(encode(message))
        elif what == "leave":  # the interpreter ends, with all links open
            self.ended = True
        else:
            link.send(encode(message), bytes(body))

    def on_close(self, link: Any) -> None:
        if self.listener is None:
            self.ended = True

    def run(self, role: str, keys: Any, url: str) -> None:
        if role == "listen":
            self.listener = Listener(
                self.poller,
                url,
                keys,
                self.on_message,
                self.on_close,
                lambda link: print("link", flush=True),
                Audit(self.poller),
                STEADY,
            )
            print(self.listener.url, flush=True)
        else:
            link = dial(self.poller, url, keys, self.on_message, self.on_close, 20, STEADY)
            link.send(encode(ProcStarted("here", os.getpid())))
        self.poller.run(lambda: self.ended)


def fork_and_exit(keys: Any) -> None:
    """A fork with a listener of its own, that ends like any interpreter; then the process itself."""
    poller = Poller(background=False)
    listener = Listener(poller, "tcp://127.0.0.1:0", keys, print, print, print, Audit(poller))
    child = os.fork()
    if not child:
        again = Poller(background=False)
        Listener(again, "tcp://127.0.0.1:0", keys, print, print, print, Audit(again)).close()
        again.close()
        return
    _, status = os.waitpid(child, 0)
    listener.close()
    poller.close()
    sys.exit(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    if sys.argv[1] == "fork-and-exit":
        fork_and_exit(load_keys(sys.argv[2]))
    else:
        Peer().run(sys.argv[1], load_keys(sys.argv[2]), sys.argv[3])
