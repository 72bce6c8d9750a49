"""Save and load sharded values with ``torch.distributed.checkpoint``: each rank writes and reads its parts."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from monarch_kernel.protocol.private_files import NotPrivateError, open_way, user_name
from monarch_kernel.runtime.tensor.rank import device
from monarch_kernel.runtime.tensor.rank.current_executor import here
from monarch_kernel.runtime.tensor.sharded.rank.layout import of_part
from monarch_kernel.runtime.tensor.sharded.rank.state import rules

#: The file in the folder for the controller's own state.
LOCAL = "controller.pt"
#: The files of a checkpoint. No other files are ever removed.
_FILES = re.compile(rf"\.metadata(\.tmp)?|__\d+_\d+\.distcp|{re.escape(LOCAL)}")

#: By name: the number of the value, and for values that may have been lost: placements, size, stride and dtype.
Names = dict[str, tuple[int, tuple[Any, ...] | None]]


def save(names: Names, folder: str, first: int) -> None:
    """Write values to a new folder that only this user can read.

    Args:
        first: the rank that creates the folder.
    """
    worker = here()
    values = {name: worker.value(number) for name, (number, _) in names.items()}
    if worker.rank == first:
        os.mkdir(folder, 0o700)
    torch.distributed.barrier()
    check(folder)
    dcp_save(values, checkpoint_id=folder)


def publish(folder: str, path: str, overwrite: bool) -> None:
    """Rename a finished checkpoint to its path.

    At any time, the path has the old checkpoint or the new one, never a mixture.
    """
    for name in os.listdir(folder):
        fd = os.open(os.path.join(folder, name), os.O_RDONLY)
        try:
            os.fchmod(fd, 0o600)
            os.fsync(fd)
        finally:
            os.close(fd)
    before = f"{folder}.before"
    replaced = False
    if overwrite and os.path.lexists(path):
        check_replaceable(path)
        os.rename(path, before)
        replaced = True
    try:
        os.rename(folder, path)
    except OSError:
        if replaced:
            os.rename(before, path)
        raise
    if replaced:
        discard(before)
    fd = os.open(os.path.dirname(path) or ".", os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def check_replaceable(folder: str) -> None:
    """Raise if a folder has more than a checkpoint, which replacing it would delete.

    Raises:
        FileExistsError: the folder has other files.
        NotPrivateError: another user could change the folder.
    """
    check(folder)
    with os.scandir(folder) as entries:
        foreign = [e.name for e in entries if not (_FILES.fullmatch(e.name) and e.is_file(follow_symlinks=False))]
    if foreign:
        raise FileExistsError(
            f"{folder} is not replaced: {min(foreign)} in it is no part of a checkpoint. Name another folder"
        )


def discard(folder: str) -> None:
    """Remove a complete or incomplete checkpoint. Other files stay, and the folder with them."""
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        for name in os.listdir(fd):
            about = os.stat(name, dir_fd=fd, follow_symlinks=False)
            if _FILES.fullmatch(name) and stat.S_ISREG(about.st_mode) and about.st_uid == os.geteuid():
                os.unlink(name, dir_fd=fd)
    finally:
        os.close(fd)
    with suppress(OSError):  # not empty
        os.rmdir(folder)


def load(names: Names, folder: str, key: Any) -> None:
    """Read values in place. Lost values are created again."""
    check(folder)
    worker, mesh = here(), rules().meshes[key]
    held = worker.store.values
    values: dict[str, Any] = {}
    for name, (number, layout) in names.items():
        value = held.get(number)
        if not isinstance(value, torch.Tensor):
            if layout is None:
                raise RuntimeError(f"{name} was lost, and how it was laid out is not known")
            value = held[number] = _empty(mesh, *layout)
        values[name] = value
    with torch.no_grad():
        dcp_load(values, checkpoint_id=folder)


def check(folder: str) -> None:
    """Check that no other user can write a checkpoint or change the path to it, because it is partly pickled.

    Raises:
        NotPrivateError: another user can do so.
        FileNotFoundError: there is no such folder.
    """
    fd = open_way(folder)
    try:
        for about, name in [(os.fstat(fd), folder)] + [
            (os.stat(os.path.join(folder, entry), follow_symlinks=False), os.path.join(folder, entry))
            for entry in os.listdir(folder)
        ]:
            if (
                about.st_uid != os.geteuid()
                or about.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
                or stat.S_ISLNK(about.st_mode)
            ):
                raise NotPrivateError(
                    f"checkpoint {name} could be changed by others (it belongs to {user_name(about.st_uid)}, mode "
                    f"{stat.S_IMODE(about.st_mode):o}), and it is partly pickled: it is not read. "
                    "Copy what you trust into a folder of your own"
                )
    finally:
        os.close(fd)


def _empty(
    mesh: Any, placements: Sequence[Placement], shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype
) -> DTensor:
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    size, _ = compute_local_shape_and_global_offset(torch.Size(shape), mesh, placements)
    local = torch.zeros(size, dtype=dtype, device=device.of_rank())
    return of_part(local, mesh, placements, shape, stride)
