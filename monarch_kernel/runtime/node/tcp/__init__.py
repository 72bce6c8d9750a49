"""Links over TCP, for gateways of different sites: TLS 1.3, with a certificate at both ends.

``dial`` makes a ``TcpLink``, which is used like any ``Link``, to a ``Listener``, which makes its counterpart. Both
sides prove their keys in the handshake, and nothing that comes before is handed on. What crosses, in this order:

1. the handshake of TLS. The dialling side has done its part of it before the listener has judged its certificate;
2. a greeting each way (``greeting``). The listener's says that the key is accepted, or why not: then only is the link
   up, and what was queued is sent;
3. the frames of ``Link``, and beats (``heartbeat``), until one side says goodbye (``graceful_close``).

What ends a connection, and how each side learns of it:

* ``close``: what was queued goes out with TLS's own goodbye behind it. The other side handles all of it before it
  closes. A connection that ends without a goodbye counts as lost, as something may have been cut off.
* a process that dies: its kernel ends the connection. A host that vanishes acknowledges nothing any more, and a process
  that stands still sends no beats: ``heartbeat`` notices both.
* a change, a gap, a repetition on the way: TLS numbers its records and authenticates each, so the connection ends.
* a key that is revoked: the link ends at both sides, with the reason.

An end is final: a lost connection is never made again automatically, as it is unknown what was lost with it.
"""

from monarch_kernel.runtime.node.tcp.dial import dial
from monarch_kernel.runtime.node.tcp.link import TcpLink
from monarch_kernel.runtime.node.tcp.listener import Listener

__all__ = ["Listener", "TcpLink", "dial"]
