"""What a controller tells the host agent that it starts."""

from __future__ import annotations

import msgspec

from monarch_kernel.protocol.messages import ProcRef


class AgentConfig(msgspec.Struct, array_like=True):
    """What the agent reads from its standard input, as MessagePack after its length in four bytes.

    That input is a socket which the controller keeps open; its end tells the agent that the controller has
    gone or wants it to end.
    """

    id: str
    run_dir: str
    host: str
    owner: ProcRef
    owner_pid: int
    lock_fd: int  # the run folder's lock, inherited
    python_path: str | None  # PYTHONPATH as the controller has it; the agent itself runs with another
    sys_path: list[str]
    descriptors: int  # how many a process of the user's may have open
