"""Links over TCP, for gateways of different sites: TLS 1.3, with a certificate at both ends.

``dial`` creates a ``TcpLink`` to a ``Listener``, which creates its counterpart. Both are used like any ``Link``. Both
sides prove their keys in the handshake, and no data is delivered before that. A connection carries, in this order:

1. the TLS handshake. The dialling side finishes its part before the listener has checked its certificate;
2. a greeting each way (``greeting``). The listener's greeting accepts the key or gives the reason for its refusal. Only
   then is the link up, and sends its queued messages;
3. the frames of ``Link``, and beats (``heartbeat``), until one side says goodbye (``link.GracefulClose``).

A connection ends in one of these ways:

* ``close``: the queued messages are sent, followed by TLS's own goodbye. The other side handles all of them before it
  closes. A connection that ends without a goodbye counts as lost, because data may have been truncated.
* a process dies: its kernel ends the connection. A host that vanishes no longer acknowledges data, and a process that
  hangs sends no beats: ``heartbeat`` detects both.
* data is changed, dropped or repeated in transit: TLS numbers and authenticates its records, so the connection ends.
* a key is revoked: the link ends at both sides, with the reason.

An end is final: a lost connection is never restored automatically, because it is unknown which messages were lost.
"""

from monarch_kernel.runtime.node.tcp.dial import dial
from monarch_kernel.runtime.node.tcp.link import TcpLink
from monarch_kernel.runtime.node.tcp.listener import Listener

__all__ = ["Listener", "TcpLink", "dial"]
