"""The configuration that a controller passes to the host agent that it starts."""

from __future__ import annotations

import msgspec

from monarch_kernel.protocol.messages import ProcRef


class AgentConfig(msgspec.Struct, array_like=True):
    """The agent's configuration, read from its standard input: a length in four bytes, then MessagePack.

    Standard input is a socket that the controller keeps open. The socket closes when the controller dies or wants
    the agent to end.
    """

    id: str
    run_dir: str
    host: str
    owner: ProcRef
    owner_pid: int
    lock_fd: int  # the run folder's lock, inherited
    python_path: str | None  # the controller's PYTHONPATH; the agent itself runs with another
    sys_path: list[str]
    descriptors: int  # the number of descriptors that a user process may open
