"""`logs`: the output of ranks that their host agents have kept."""

from __future__ import annotations

from typing import Any

import msgspec

from monarch_kernel.protocol.messages import GetLogs, LogText
from monarch_kernel.protocol.output_records import plain_text
from monarch_kernel.runtime.mesh.valuemesh import ValueMesh


def logs(mesh: Any, ranks: Any = None, tail: int | None = None) -> ValueMesh[str]:
    """The output of the ranks of a proc mesh (or slice) that their host agents have kept.

    Args:
        ranks: positions in the mesh; None for all.
        tail: return only this many lines from the end of each rank's output.
    """
    target = mesh._target()
    wanted = set(range(len(target.procs))) if ranks is None else set(ranks)
    asked = {ref.id for rank, ref in enumerate(target.procs) if rank in wanted}

    def question(call: int, procs: list[str]) -> GetLogs:
        return GetLogs(call, [proc for proc in procs if proc in asked], tail or 0)

    replies = mesh._ask_agents(question, "logs").get(30)
    texts: dict[str, str] = {}
    for reply in replies:
        for entry in msgspec.msgpack.decode(reply, type=list[LogText]):
            text = plain_text([(1, entry.stdout), (2, entry.stderr)])
            if entry.dropped:
                text = f"[the first {entry.dropped} bytes are gone: the log keeps only the newest output]\n" + text
            if tail:
                text = "".join(text.splitlines(keepends=True)[-tail:])
            texts[entry.proc] = text
    return ValueMesh(
        target.extent,
        [texts.get(ref.id, "") if rank in wanted else "" for rank, ref in enumerate(target.procs)],
    )
