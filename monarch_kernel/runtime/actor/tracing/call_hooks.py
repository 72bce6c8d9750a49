"""Hooks in calls where traces and spans begin and end. They are off by default, and cost one test for None.

Caller and actor import this module, and it imports neither; ``call_records`` has the code, and installs it here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from monarch_kernel.protocol.messages import Call
    from monarch_kernel.runtime.actor.calls.target import Target
    from monarch_kernel.runtime.actor.execution.async_instance import AsyncActorInstance
    from monarch_kernel.runtime.actor.execution.instance import ActorInstance
    from monarch_kernel.runtime.actor.wire_types import Body, MessageLink


class SentCall(Protocol):
    """A call that is being sent.

    Attributes:
        trace: the ``trace`` of its messages.
    """

    trace: str

    def sent(self) -> None:
        """Record that all messages are sent, and that no answer will arrive."""
        ...


#: Begins the record of a call: takes its label, its target, and the future of its answers (None: there is none).
sending: Callable[[str, Target, object], SentCall] | None = None


#: Handles a call as ``ActorInstance`` does, and records it; ``call_records`` sets it, and the next two.
handle: Callable[[ActorInstance, MessageLink, Call, Body], BaseException | None]
#: The same for an async actor.
handle_async: Callable[[AsyncActorInstance, MessageLink, Call, Body], Coroutine[object, object, BaseException | None]]
#: Records that the call that is being handled raises this error.
failed: Callable[[BaseException], None]
