"""Ids of workers, which a launcher passes to them in the environment. The names are those of ``monarch.job``."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence

from monarch_kernel.actor import ProcId, Uid

SERVICE_PROC_IDS_ENV = "MONARCH_SERVICE_PROC_IDS"
"""The variable with the ids of a launcher's workers, as ``serialize_service_proc_ids`` writes them."""
SERVICE_PROC_RANK_ENV = "MONARCH_SERVICE_PROC_RANK"
"""The variable with the position of one worker among them."""


def new_service_proc_id() -> ProcId:
    """Create a new id of a worker."""
    return ProcId(Uid.instance("service"))


def serialize_service_proc_ids(proc_ids: Sequence[ProcId]) -> str:
    """Encode ids of workers as JSON, for an environment variable."""
    return json.dumps([str(proc_id) for proc_id in proc_ids])


def deserialize_service_proc_ids(serialized: str) -> list[ProcId]:
    """Decode the ids that ``serialize_service_proc_ids`` wrote.

    Raises:
        ValueError: the text is not such JSON.
    """
    return [ProcId.from_string(text) for text in json.loads(serialized)]


def ranked_service_proc_id_from_env(*, rank_env: str = SERVICE_PROC_RANK_ENV) -> ProcId | None:
    """Return this worker's id among those in the environment; None if there are none.

    Args:
        rank_env: the variable with this worker's position.

    Raises:
        IndexError: there are fewer ids.
        ValueError: a variable is invalid.
    """
    ids, rank = os.environ.get(SERVICE_PROC_IDS_ENV), os.environ.get(rank_env)
    return None if ids is None or rank is None else deserialize_service_proc_ids(ids)[int(rank)]


def service_proc_addr(address: str, proc_id: ProcId | None) -> str:
    """Prefix the address of a worker with its id, as ``attach_to_workers`` accepts it."""
    return address if proc_id is None else f"{proc_id}@{address}"


def service_proc_addrs(addresses: Sequence[str], proc_ids: Sequence[ProcId] | None) -> list[str]:
    """Prefix the addresses of workers with their ids.

    Raises:
        ValueError: the numbers of ids and addresses differ.
    """
    if proc_ids is None:
        return list(addresses)
    if len(addresses) != len(proc_ids):
        raise ValueError(f"got {len(addresses)} worker addresses and {len(proc_ids)} service ProcIds")
    return [service_proc_addr(address, proc_id) for address, proc_id in zip(addresses, proc_ids, strict=True)]
