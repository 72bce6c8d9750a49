"""Record what a rank computes in a few training steps, as summaries in a folder of plain data, and read it back.

`record` subscribes to the observer of this process and writes one JSON object per tensor to `rank_00003.jsonl`, in
program order. Each line is written at once, so the file of a rank that dies is readable up to its last full line.
`Recording` reads the folder. A full disk, or any other error of the recording, ends it with a warning; training
continues.
"""

from __future__ import annotations

import json
import math
import os
import re
import socket
import sys
import threading
import time
import warnings
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import msgspec
import torch
from torch import distributed, nn
from torch.multiprocessing.reductions import StorageWeakRef

from monarch_kernel.actor import context
from monarch_kernel.debugger.source_locations import shown_file
from monarch_kernel.introspection import running_here
from monarch_kernel.numerics.mesh_summaries import MeshSummaries, RankSummaries, is_on_mesh, mesh_name
from monarch_kernel.numerics.observer import (
    ModuleCall,
    ModuleGradient,
    NamedParameter,
    ParameterGradient,
    StepLocation,
    Subscriber,
    Topic,
    cell_files,
    named_buffers,
    observer,
)
from monarch_kernel.numerics.summaries import (
    Placement,
    Placements,
    Split,
    Summary,
    generator_summaries,
    hash_of,
    local_of,
    perturbed,
    summarize,
)
from monarch_kernel.private_files import PrivateFolder, written_whole

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from monarch_kernel.numerics.collectives import Collective
    from monarch_kernel.numerics.operations import TorchOperation

FORMAT = 2
#: Recordings of format 1 have no settings and states of optimizers.
_READABLE = (1, FORMAT)
WHAT = ("modules", "optimizer", "collectives", "ops")
#: The most bytes of parameters that are copied before a step, to summarize how they move. Others have no `update`.
UPDATE_BYTES = 1 << 30
#: Requests to ranks of a mesh after which their answers are fetched, within a step.
MESH_REQUESTS = 10_000
#: Bytes of kept tensors (`full`) after which they are written to a file.
PART_BYTES = 1 << 28

_TOPICS: dict[str, frozenset[Topic]] = {
    "modules": frozenset(("modules",)),
    "optimizer": frozenset(("gradients", "optimizer")),
    "collectives": frozenset(("collectives",)),
    # Compiled modules are recorded at their edges.
    "ops": frozenset(("operations", "modules")),
}
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_DESCRIPTION = "recording.json"
#: Files with tensors that stay open while a recording is read: opening one reads the names of all its tensors.
_OPEN_FILES = 16

Phase = Literal["forward", "backward", "reduction", "optimizer"]
Kind = Literal[
    "input",
    "output",
    "grad_input",
    "grad_output",
    "gradient",
    "reduced_gradient",
    "parameter",
    "update",
    "buffer",
    "collective",
    "generator",
    "operation",
    "optimizer_state",
]


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor that a rank recorded.

    Attributes:
        step: the index of the step within the recording.
        micro: the index of the forward (of gradients of parameters: the backward) within the step.
        call: the index of the module's call within that forward.
        phase: the part of the step.
        kind: what the tensor is. `gradient` is a parameter's own gradient of one backward; `reduced_gradient` the one
            that the optimizer uses; `parameter` its value before the first step and after each step; `update` how far
            the step moved it; `optimizer_state` what the optimizer has of it before the first step (with `full`).
        name: the qualified name of the module, parameter or buffer; of a collective, its operation; of a random
            generator, its device or library.
        tensor: which tensor of the module's inputs or outputs; of an operation, its label (see
            `operations.TorchOperation`) and which of its tensors, such as "aten.addmm#0:input.mat1".
        rank: the rank.
        sequence: the index of the entry among those of its rank, in program order.
        line: the line of user code, such as "train.py:42".
        shape, dtype, sum_of_squares, maximum, nonfinite, hash, projection: see `Summary`.
        placement: the part of the global tensor; None if unknown or whole.
        full: where the tensor itself is kept; "" if it is not.
        op: of a collective, its reduction.
        group: of a collective, the global ranks of its group.
    """

    step: int
    micro: int
    call: int
    phase: Phase
    kind: Kind
    name: str
    tensor: str
    rank: int
    sequence: int
    line: str
    shape: tuple[int, ...]
    dtype: str
    sum_of_squares: float
    maximum: float
    nonfinite: int
    hash: str
    projection: float
    placement: Placement | None = None
    full: str = ""
    op: str = ""
    group: tuple[int, ...] = ()

    @property
    def norm(self) -> float:
        """The norm of its finite elements."""
        return math.sqrt(self.sum_of_squares)

    def to_json(self) -> bytes:
        """Format it as one line of JSON."""
        data: dict[str, Any] = {key: getattr(self, key) for key in _KEYS}
        for key in ("sum_of_squares", "maximum", "projection"):
            if not math.isfinite(data[key]):
                data[key] = str(data[key])
        data["placement"] = None if self.placement is None else self.placement.to_dict()
        for key in ("full", "op", "group"):
            if value := getattr(self, key):
                data[key] = value
        return msgspec.json.encode(data)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Entry:
        """Read a line. Raises KeyError, TypeError or ValueError if it is no entry."""
        values = {each.name: data[each.name] for each in fields(cls) if each.name in data}
        file, _, number = str(data["line"]).rpartition(":")
        values["line"] = f"{shown_file(file)}:{number}" if file else ""
        values["shape"] = tuple(data["shape"])
        values["group"] = tuple(data.get("group", ()))
        placement = data.get("placement")
        values["placement"] = None if placement is None else Placement.from_dict(placement)
        for key in ("sum_of_squares", "maximum", "projection"):
            values[key] = float(data[key])
        return cls(**values)


_KEYS = tuple(each.name for each in fields(Entry) if each.name not in ("placement", "full", "op", "group"))


def data_folder(kind: str) -> str:
    """Return the folder of this user's "recordings" or "captures"."""
    base = os.environ.get("XDG_DATA_HOME", "")
    if not os.path.isabs(base):  # the XDG specification requires ignoring such a setting
        base = os.path.expanduser("~/.local/share")
    return os.path.join(base, "monarch_kernel", kind)


def recordings_folder() -> str:
    """Return the folder of this user's recordings."""
    return data_folder("recordings")


def folder_of(name: str, folder: str | os.PathLike[str] | None = None) -> str:
    """Return the folder of a recording. Raises ValueError if the name does not suit a folder."""
    if folder is not None:
        return os.path.abspath(os.path.expanduser(os.fspath(folder)))
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"{name!r} is no name of a recording: use letters, digits, '.', '_' and '-', or name a folder with folder="
        )
    return os.path.join(recordings_folder(), name)


# -- reading -----------------------------------------------------------------------------------------


@dataclass(eq=False, repr=False)
class Recording:
    """A recording on disk.

    Attributes:
        folder: its folder.
        name: its name.
        description: what `recording.json` says: `torch`, `device`, `world_size`, `steps`, `what`, `created`.
        ranks: the ranks that have written a file.
        ends: why each rank ended: "done", "stopped", or an error; "" if its file just ends (it runs, or it died).
    """

    folder: Path
    name: str
    description: dict[str, Any]
    ranks: tuple[int, ...]
    ends: dict[int, str] = field(default_factory=dict[int, str])
    _entries: list[Entry] | None = None
    _open_files: dict[str, tuple[frozenset[str], Any]] = field(default_factory=dict[str, tuple[frozenset[str], Any]])

    def __repr__(self) -> str:
        steps = f"{self.steps} step{'s' * (self.steps != 1)}"
        ranks = f"{len(self.ranks)} rank{'s' * (len(self.ranks) != 1)}"
        return "\n".join([f"Recording {self.name}: {steps} of {ranks}, in {self.folder}", *self.notes])

    @classmethod
    def open(cls, name: str | os.PathLike[str]) -> Recording:
        """Open a recording by its name, or its folder.

        Raises:
            FileNotFoundError: there is none; the message lists those that there are.
            ValueError: it was written in a format that this version cannot read, or a file is damaged.
        """
        path = Path(name).expanduser()
        if not (path / _DESCRIPTION).is_file():
            if path.parent == Path() and _NAME.fullmatch(str(name)):
                path = Path(folder_of(str(name)))
            if not (path / _DESCRIPTION).is_file():
                raise FileNotFoundError(f"there is no recording {str(name)!r} ({path}){_others()}")
        try:
            description = json.loads((path / _DESCRIPTION).read_text())
            version = description["format"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path / _DESCRIPTION} is damaged: {error}") from None
        if version not in _READABLE:
            raise ValueError(
                f"{path} has format {version}; this version of monarch_kernel reads formats up to {FORMAT}"
            )
        world = int(description["world_size"])
        ranks = sorted(int(file.stem[5:]) for file in path.glob("rank_*.jsonl") if file.stem[5:].isdigit())
        found = cls(path, str(description["name"]), description, tuple(rank for rank in ranks if rank < world))
        for rank in found.ranks:
            found.ends[rank] = found._end(rank)
        return found

    @property
    def steps(self) -> int:
        """The number of steps with entries."""
        return 1 + max((entry.step for entry in self.entries()), default=-1)

    @property
    def world_size(self) -> int:
        """The number of ranks of the recorded job."""
        return int(self.description["world_size"])

    @property
    def finished(self) -> bool:
        """Whether every rank of the job has recorded what it was asked to, or was told to stop."""
        return len(self.ranks) == self.world_size and all(end in ("done", "stopped") for end in self.ends.values())

    @property
    def notes(self) -> list[str]:
        """What is missing: ranks without a file, and ranks whose file ends early, each in a sentence."""
        missing = sorted(set(range(self.world_size)) - set(self.ranks))
        notes = [f"rank {rank} has recorded nothing" for rank in missing]
        for rank, end in self.ends.items():
            if not end:
                notes.append(f"rank {rank} has not finished: it still runs, or it died")
            elif end not in ("done", "stopped"):
                notes.append(f"rank {rank} stopped recording: {end}")
        return notes

    def entries(self, rank: int | None = None) -> list[Entry]:
        """Return the entries in program order of each rank, of all ranks one after the other, or of one rank.

        Raises:
            ValueError: a file is damaged; the message names the line.
        """
        if self._entries is None:
            self._entries = [entry for each in self.ranks for entry in self._read(each)]
        return [entry for entry in self._entries if rank is None or entry.rank == rank]

    def header(self, rank: int) -> dict[str, Any]:
        """Return what a rank says about itself: `host`, `device`, `pid`, `placements` and `stage`."""
        with self._file(rank).open() as file:
            line = file.readline()
        return json.loads(line) if line.endswith("\n") else {}

    def optimizers(self, rank: int) -> list[dict[str, Any]]:
        """Return the optimizers of a rank before the first step, as plain data; empty if tensors were not kept.

        Each has its `class`, its `groups` with names of `parameters` and `settings`, and `scalars` of its state by name
        of a parameter. Tensors of its state are entries of the kind `optimizer_state`.
        """
        return [data for data in self._lines(rank) if data["kind"] == "optimizer"]

    def tensor(self, entry: Entry) -> torch.Tensor | None:
        """Return the recorded local tensor of an entry; None if it was not kept (`full=True` keeps them)."""
        if not entry.full:
            return None
        file, _, key = entry.full.partition("#")
        if not re.fullmatch(r"rank_\d{5}\.\d+\.safetensors", file):
            raise ValueError(f"{self.folder}: entry {entry.sequence} of rank {entry.rank} names the file {file!r}")
        names, kept = self._opened(file)
        return kept.get_tensor(key) if key in names else None

    def _opened(self, file: str) -> tuple[frozenset[str], Any]:
        """Return the names of the tensors that a file has, and the file; the last ones stay open."""
        found = self._open_files.pop(file, None)
        if found is None:
            from safetensors import safe_open

            path = self.folder / file
            if not path.is_file():
                return frozenset(), None
            kept: Any = safe_open(path, "pt")
            found = frozenset(kept.keys()), kept
            if len(self._open_files) >= _OPEN_FILES:
                self._open_files.pop(next(iter(self._open_files)))
        self._open_files[file] = found
        return found

    def _file(self, rank: int) -> Path:
        return self.folder / f"rank_{rank:05}.jsonl"

    def _read(self, rank: int) -> Iterator[Entry]:
        for number, data in enumerate(self._lines(rank), 1):
            if data["kind"] not in ("rank", "end", "optimizer"):
                try:
                    yield Entry.from_json(data)
                except (ValueError, KeyError, TypeError) as error:
                    raise self._damaged(rank, number, error) from None

    def _lines(self, rank: int) -> Iterator[dict[str, Any]]:
        with self._file(rank).open() as file:
            for number, line in enumerate(file, 1):
                if not line.endswith("\n"):
                    return  # the rank died, or the disk was full, while it wrote this line
                try:
                    data: dict[str, Any] = json.loads(line)
                    str(data["kind"])
                except (ValueError, KeyError, TypeError) as error:
                    raise self._damaged(rank, number, error) from None
                yield data

    def _damaged(self, rank: int, number: int, error: Exception) -> ValueError:
        return ValueError(f"{self._file(rank)}:{number} is damaged: {type(error).__name__}: {error}")

    def _end(self, rank: int) -> str:
        with self._file(rank).open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 4096))
            last = file.read().rstrip(b"\n").rpartition(b"\n")[2]
        try:
            data = json.loads(last)
            return str(data["reason"]) if data["kind"] == "end" else ""
        except (ValueError, KeyError, TypeError):
            return ""


def recordings() -> list[str]:
    """Return the names of this user's recordings."""
    try:
        return sorted(each.name for each in Path(recordings_folder()).iterdir() if (each / _DESCRIPTION).is_file())
    except OSError:
        return []


def _others() -> str:
    found = recordings()
    return f"; there are: {', '.join(found)}" if found else "; there are no recordings"


# -- writing -----------------------------------------------------------------------------------------


class _RankFile:
    """The files of one rank in a recording's folder."""

    def __init__(self, path: str, rank: int, description: dict[str, Any], replace: bool) -> None:
        self.path = path
        self._rank = rank
        self._part = 0
        self._kept: dict[str, torch.Tensor] = {}
        self._kept_bytes = 0
        os.makedirs(os.path.dirname(path), 0o700, exist_ok=True)
        self._folder = PrivateFolder.made(path)
        name = f"rank_{rank:05}.jsonl"
        taken = name in self._folder.names()
        if taken and not replace:
            self._folder.close()
            raise FileExistsError(
                f"{path} already has a recording of rank {rank}: choose another name, or pass replace=True "
                "(%mesh record --replace)"
            )
        if replace:
            self._discard(description["world_size"])
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND
        self._fd = self._folder.open_file(name, flags)
        if rank == 0 or _DESCRIPTION not in self._folder.names():
            self.describe(description)

    def describe(self, description: Mapping[str, Any]) -> None:
        """Write the description of the recording. Several ranks may write it at the same time."""
        with written_whole(os.path.join(self.path, _DESCRIPTION)) as file:
            file.write(json.dumps(description, indent=1).encode())

    def _discard(self, world_size: int) -> None:
        """Remove files of an earlier recording: those of this rank; at rank 0, also those of ranks beyond the world."""
        for name in self._folder.names():
            found = re.fullmatch(r"rank_(\d{5})\.(?:jsonl|\d+\.safetensors)", name)
            if found and (int(found[1]) == self._rank or (self._rank == 0 and int(found[1]) >= world_size)):
                self._folder.discard(name)

    def write(self, line: bytes) -> None:
        """Append a line, at once: what a process that dies has written is complete."""
        data = line + b"\n"
        while data:
            data = data[os.write(self._fd, data) :]

    def keep(self, key: str, tensor: torch.Tensor) -> str:
        """Keep a copy of a tensor. Return where it will be."""
        where = f"rank_{self._rank:05}.{self._part}.safetensors#{key}"
        self._kept[key] = tensor.to("cpu", copy=True).contiguous()
        self._kept_bytes += tensor.numel() * tensor.element_size()
        if self._kept_bytes >= PART_BYTES:
            self.flush()
        return where

    def flush(self) -> None:
        """Write the kept tensors to a file, which appears when it is complete."""
        if not self._kept:
            return
        from safetensors.torch import save

        kept, self._kept, self._kept_bytes = self._kept, {}, 0
        self._folder.replace(f"rank_{self._rank:05}.{self._part}.safetensors", save(kept))
        self._part += 1

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._folder.close()
            self._fd = -1


@dataclass(slots=True)
class _MeshEntry:
    """An entry of ranks of a mesh, whose summaries are not there yet.

    Attributes:
        entry: what is known of it.
        is_changing: whether ranks on which it is the same as before are left out.
    """

    entry: Entry
    is_changing: bool = False


class _MeshFiles:
    """The files of ranks of a mesh, which the process that controls the mesh writes.

    Args:
        own: the file of rank 0. It also has what this process computes itself.
        description: of the recording.
        replace: whether to overwrite an earlier recording.
    """

    def __init__(self, own: _RankFile, description: dict[str, Any], replace: bool) -> None:
        self.summaries = MeshSummaries()
        self._files = {0: own}
        self._description = description
        self._replace = replace
        self._waiting: list[_MeshEntry | Entry] = []
        self._hashes: dict[tuple[int, str], str] = {}

    def add(self, entry: _MeshEntry | Entry) -> None:
        """Add an entry in program order."""
        self._waiting.append(entry)
        if len(self._waiting) >= MESH_REQUESTS:
            self.write()

    def write(self) -> None:
        """Fetch the summaries that were requested, and write the entries. Raises RuntimeError if a rank has died."""
        waiting, self._waiting = self._waiting, []
        ranks = self.summaries.fetch()
        for rank, of_rank in sorted(ranks.items()):
            self._open(rank, of_rank)
        if self._description["world_size"] != self.summaries.world_size:
            self._description["world_size"] = self.summaries.world_size
            self._files[0].describe(self._description)
        for each in waiting:
            if isinstance(each, Entry):
                self._files[0].write(each.to_json())
                continue
            for rank, of_rank in sorted(ranks.items()):
                self._write(each, rank, of_rank)

    def _write(self, each: _MeshEntry, rank: int, of_rank: RankSummaries) -> None:
        for name, summary, placement, kept in of_rank.found.get(each.entry.sequence, ()):
            if each.is_changing:
                at = (rank, each.entry.name)
                if self._hashes.get(at) == summary.hash:
                    continue
                self._hashes[at] = summary.hash
            key = f"{each.entry.sequence}{name}"
            full = "" if kept is None else self._files[rank].keep(key, kept)
            entry = replace(
                each.entry,
                name=name or each.entry.name,
                rank=rank,
                **_figures(summary),
                placement=placement,
                full=full,
            )
            self._files[rank].write(entry.to_json())

    def _open(self, rank: int, of_rank: RankSummaries) -> None:
        if rank not in self._files:
            file = self._files[rank] = _RankFile(self._files[0].path, rank, self._description, self._replace)
            header = {"kind": "rank", "rank": rank, "host": of_rank.host, "pid": of_rank.pid}
            file.write(msgspec.json.encode({**header, "created": self._description["created"]}))

    def end(self, reason: str) -> None:
        """End the files of ranks other than 0."""
        for rank, file in self._files.items():
            if rank:
                try:
                    file.flush()
                    file.write(_ending(rank, reason))
                finally:
                    file.close()


class StepRecorder(Subscriber):
    """A recording in progress in this process. A context manager that stops it. `record` creates it."""

    def __init__(
        self,
        name: str,
        *,
        model: nn.Module | None,
        steps: int,
        what: frozenset[str],
        placements: Mapping[str, Split] | None,
        full: bool,
        keep: float,
        folder: str | os.PathLike[str] | None,
        perturb: int,
        rank: int,
        world_size: int,
        replace: bool,
        waits: bool,
    ) -> None:
        self.name = name
        self.rank = rank
        self.folder = folder_of(name, folder)
        self.steps_done = 0
        #: Why it ended; "" while it records.
        self.reason = ""
        self.finished = threading.Event()
        self._steps = steps
        self._what = what
        self._full = full
        self._keep = keep
        self._perturb = perturb
        self._has_floats = True  # whether the model's inputs have floating-point numbers, which `perturb` moves
        self._embeddings: set[str] = set()  # else, the modules whose outputs it moves
        self._placements = Placements(placements, rank, world_size)
        moves: frozenset[Topic] = frozenset(("modules",) if perturb else ())
        self._topics = moves.union(*(_TOPICS[each] for each in what))
        self._waits = waits
        #: How many steps have ended while it waited.
        self.boundaries = 0
        #: The number of the last step that ended while it waited; see `_step_tag`.
        self.tag: int | None = None
        #: By how much that number has grown in the last step.
        self.stride = 1
        self._target: int | None = None
        self._begun = False
        self._step = 0
        self._sequence = 0
        self._phase: Phase = "forward"
        self._lock = threading.RLock()
        self._copies: dict[int, torch.Tensor] = {}
        self._seen: dict[int, tuple[weakref.ref[torch.Tensor], Summary]] = {}
        self._last: tuple[torch.Tensor, Summary] | None = None
        self._of_operations = _OperationSummaries() if "ops" in what else None
        self._buffers: dict[str, str] = {}
        created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        description = {
            "format": FORMAT,
            "name": name,
            "created": created,
            "torch": torch.__version__,
            "device": _device(model),
            "world_size": world_size,
            "steps": steps,
            "what": sorted(what),
            "full": full,
            "perturb": perturb,
        }
        self._file = _RankFile(self.folder, rank, description, replace)
        self._description, self._replaces = description, replace
        self._mesh: _MeshFiles | None = None  # if the model's tensors are on a mesh
        header = {"kind": "rank", "rank": rank, "host": socket.gethostname(), "pid": os.getpid(), "created": created}
        self._file.write(msgspec.json.encode(header))
        # All topics are wanted from the first step on; until then, only beginnings and ends of steps.
        self.wants = frozenset[Topic](("optimizer",)) if waits else frozenset[Topic]()
        self._subscription = observer().subscribe(self, model)

    # -- the life of a recording ---------------------------------------------------------------------

    def __enter__(self) -> StepRecorder:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def has_begun(self) -> bool:
        """Whether its first step has begun."""
        return self._begun

    def begin(self, tag: int | None = None) -> bool:
        """Let a recording that waits begin after the end of the step with that number; None: of the next step.

        Returns:
            False if that step has ended already.
        """
        with self._lock:
            if tag is not None and self.tag is not None and self.tag >= tag:
                return False
            if tag is None:
                tag = -1
            self._target = tag
            if not self.boundaries:  # between two cells, nothing is in the middle of a step
                self._waits = False
            return True

    def stop(self) -> None:
        """End the recording. Called again, it does nothing."""
        self._finish("stopped")

    def _finish(self, reason: str) -> None:
        with self._lock:
            if self.reason:
                return
            self.reason = reason
            self._subscription.end()
            self._copies.clear()
            self._seen.clear()
            self._last = None
            self._of_operations = None
            try:
                if self._mesh is not None:
                    if reason in ("done", "stopped"):
                        self._mesh.write()
                    self._mesh.end(reason)
                self._file.flush()
                self._file.write(_ending(self.rank, reason))
            except (OSError, RuntimeError) as error:
                if reason in ("done", "stopped"):
                    self.reason = str(error)
                    _warn(self.name, error)
            finally:
                self._file.close()
                self.finished.set()

    def _failed(self, error: Exception) -> None:
        self._finish(f"{type(error).__name__}: {error}")
        _warn(self.name, error)

    # -- events --------------------------------------------------------------------------------------

    def step_begins(self, step: int) -> None:
        """See `Subscriber`."""
        if self._waits:
            return
        with self._guarded():
            self._begun = True
            self.wants = self._topics
            self._phase = "forward"
            self._seen.clear()
            if self._of_operations is not None:
                self._of_operations.clear()
            parameters = observer().named_parameters()
            on_mesh = next((each for _, each in parameters if is_on_mesh(each)), None)
            if on_mesh is not None:
                self._begin_on_mesh(on_mesh)
            self._write_generators(on_mesh)
            if self._step == 0 and "optimizer" in self._what:
                for name, parameter in parameters:
                    self._add(_place(name), "forward", "parameter", "", name, parameter)

    def _begin_on_mesh(self, tensor: torch.Tensor) -> None:
        """Prepare to record tensors of a mesh."""
        wrong = {"ops", "collectives"} & self._what
        if wrong:
            raise TypeError(
                f"the tensors of this model are on mesh {mesh_name(tensor)}, whose ranks run its operations: record "
                f"modules and optimizer there, not {' and '.join(sorted(wrong))}"
            )
        if self._mesh is None:
            self._mesh = _MeshFiles(self._file, self._description, self._replaces)

    def forward_begins(self, event: ModuleCall) -> None:
        """See `Subscriber`."""
        with self._guarded():
            self._phase = "forward"
            if not event.place.first:
                return
            if self._perturb and event.is_root:
                self._has_floats = any(each.is_floating_point() for _, each in event.inputs())
                event.args = cast("tuple[Any, ...]", self._moved(event.args))
                event.kwargs = cast("dict[str, Any]", self._moved(event.kwargs))
            if not self._records(event):
                return
            for label, tensor in event.inputs():
                self._add(event.place, "forward", "input", label, f"{event.place.name}:input:{label}", tensor)

    def forward(self, event: ModuleCall) -> None:
        """See `Subscriber`."""
        with self._guarded():
            if not self._has_floats and self._embeds(event):
                self._embeddings.add(event.place.name)
                event.output = self._moved(event.output)
            if event.place.last and self._records(event):
                for label, tensor in event.outputs():
                    name = f"{event.place.name}:output" + (f":{label}" if label else "")
                    self._add(event.place, "forward", "output", label, name, tensor)

    def _embeds(self, event: ModuleCall) -> bool:
        """Return whether a module makes floating-point numbers of what is none, and no module inside of it does."""
        inside = f"{event.place.name}." if event.place.name else ""
        return (
            not event.is_root
            and not any(each.is_floating_point() for _, each in event.inputs())
            and not any(name.startswith(inside) for name in self._embeddings - {event.place.name})
        )

    def backward(self, event: ModuleGradient) -> None:
        """See `Subscriber`."""
        inner = event.kind == "grad_input"
        if not (event.place.first if inner else event.place.last) or not self._records(event):
            return
        with self._guarded():
            self._phase = "backward"
            side = "input" if inner else "output"
            name = f"{event.place.name}:{side}" + (f":{event.tensor}" if event.tensor else "")
            self._add(event.place, "backward", event.kind, event.tensor, name, event.gradient)

    def gradient(self, event: ParameterGradient) -> None:
        """See `Subscriber`."""
        with self._guarded():
            self._phase = "backward"
            self._add(event.place, "backward", "gradient", "", event.place.name, event.gradient)

    def optimizer_begins(self, optimizer: Optimizer, parameters: Sequence[NamedParameter]) -> None:
        """See `Subscriber`."""
        if self._waits:
            return
        with self._guarded():
            self._phase = "reduction"
            if self._full and self._step == 0:
                self._write_optimizer(optimizer, parameters)
            room = UPDATE_BYTES - sum(each.numel() * each.element_size() for each in self._copies.values())
            for each in parameters:
                gradient = each.parameter.grad
                if gradient is not None:
                    self._add(_place(each.name), "reduction", "reduced_gradient", "", each.name, gradient)
                    local = local_of(each.parameter)
                    room -= local.numel() * local.element_size()
                    if room >= 0:
                        self._copies[id(each.parameter)] = local.clone()
            self._phase = "optimizer"

    def optimizer_ends(self, optimizer: Optimizer, parameters: Sequence[NamedParameter]) -> None:
        """See `Subscriber`."""
        if self._waits:
            tag = _step_tag(optimizer)
            self.stride = (tag or 0) - (self.tag or 0)
            self.tag = tag
            return
        with self._guarded():
            for each in parameters:
                before = self._copies.pop(id(each.parameter), None)
                if before is not None:
                    torch.sub(local_of(each.parameter), before, out=before)
                    self._add(_place(each.name), "optimizer", "update", "", each.name, before, like=each.parameter)
                self._add(_place(each.name), "optimizer", "parameter", "", each.name, each.parameter)

    def step_ends(self, step: int) -> None:
        """See `Subscriber`."""
        if self._waits:
            with self._lock:
                self.boundaries += 1
                if self._target is not None and (self.tag is None or self.tag >= self._target):
                    self._waits = False
            return
        if not self._begun:
            return
        with self._guarded():
            if "modules" in self._what:
                self._write_buffers()
            if self._mesh is not None:
                self._mesh.write()
            self._step += 1
            self.steps_done = self._step
            self._copies.clear()
            if self._step >= self._steps:
                self._finish("done")

    def collective(self, event: Collective) -> None:
        """See `Subscriber`."""
        with self._guarded():
            place = StepLocation(event.kind, self._step, 0, event.sequence, event.line)
            for side, tensors in (("input", event.inputs), ("output", event.outputs)):
                for at, tensor in enumerate(tensors):
                    label = f"{side}.{at}"
                    name = f"{event.kind}:{label}"
                    self._add(place, self._phase, "collective", label, name, tensor, op=event.op, group=event.group)

    def operation_begins(self, event: TorchOperation) -> None:
        """See `Subscriber`."""
        with self._guarded():
            self._phase = "backward" if event.is_backward else "forward"
            if self._of_operations is not None:
                self._of_operations.begin(event.epoch)
            self._add_operation(event, "input", event.inputs)

    def operation(self, event: TorchOperation) -> None:
        """See `Subscriber`."""
        with self._guarded():
            if self._of_operations is not None:
                self._of_operations.changed(event.written)
            self._add_operation(event, "output", event.outputs)

    def _add_operation(
        self, event: TorchOperation, side: Literal["input", "output"], tensors: Sequence[tuple[str, torch.Tensor]]
    ) -> None:
        for name, tensor in tensors:
            label = f"{event.label}:{side}" + (f".{name}" if name else "")
            self._add(event.place, self._phase, "operation", label, f"{event.place.name}:{label}", tensor)

    def _records(self, event: ModuleCall | ModuleGradient) -> bool:
        """Return whether the tensors of a module are recorded: of operations alone, those of compiled modules are."""
        return "modules" in self._what or event.is_compiled

    def _guarded(self) -> _Guard:
        return _Guard(self)

    # -- writing -------------------------------------------------------------------------------------

    def _add(
        self,
        place: StepLocation,
        phase: Phase,
        kind: Kind,
        label: str,
        pattern: str,
        tensor: torch.Tensor,
        like: torch.Tensor | None = None,
        op: str = "",
        group: tuple[int, ...] = (),
    ) -> None:
        if self._mesh is not None and is_on_mesh(tensor):
            self._request(place, phase, kind, label, pattern, tensor)
            return
        placement = self._placements.of(pattern, tensor if like is None else like)
        summary = self._summary(tensor, placement, kind)
        self._write(place, phase, kind, label, summary, placement, tensor, op, group)

    def _write(
        self,
        place: StepLocation,
        phase: Phase,
        kind: Kind,
        label: str,
        summary: Summary,
        placement: Placement | None,
        tensor: torch.Tensor,
        op: str = "",
        group: tuple[int, ...] = (),
    ) -> None:
        full = ""
        if self._full and self._keeps(place, kind, label):
            full = self._file.keep(str(self._sequence), local_of(tensor))
        entry = self._entry(place, phase, kind, label, summary, placement, full, op, group)
        if self._mesh is not None:
            self._mesh.add(entry)
        else:
            self._file.write(entry.to_json())

    def _request(
        self,
        place: StepLocation,
        phase: Phase,
        kind: Kind,
        label: str,
        pattern: str,
        tensor: torch.Tensor,
        is_changing: bool = False,
    ) -> None:
        """Have the ranks of a mesh summarize a tensor."""
        assert self._mesh is not None
        keeps = self._full and self._keeps(place, kind, label)
        entry = self._entry(place, phase, kind, label, _UNKNOWN)
        self._mesh.summaries.request(entry.sequence, tensor, self._placements.split_of(pattern), keeps)
        self._mesh.add(_MeshEntry(entry, is_changing))

    def _moved(self, value: object) -> object:
        """Return the tensors in a value moved by units in the last place."""
        mesh = self._mesh

        def moved(tensor: torch.Tensor) -> torch.Tensor:
            if mesh is not None and is_on_mesh(tensor):
                return mesh.summaries.perturbed(tensor, self._perturb)
            return perturbed(tensor, self._perturb)

        return _mapped(value, moved)

    def _entry(
        self,
        place: StepLocation,
        phase: Phase,
        kind: Kind,
        label: str,
        summary: Summary,
        placement: Placement | None = None,
        full: str = "",
        op: str = "",
        group: tuple[int, ...] = (),
    ) -> Entry:
        """Return the next entry of this rank."""
        self._sequence += 1
        return Entry(
            step=self._step,
            micro=place.micro,
            call=place.call,
            phase=phase,
            kind=kind,
            name=place.name,
            tensor=label,
            rank=self.rank,
            sequence=self._sequence - 1,
            line=_whole_line(place.line),
            **_figures(summary),
            placement=placement,
            full=full,
            op=op,
            group=group,
        )

    def _summary(self, tensor: torch.Tensor, placement: Placement | None, kind: Kind) -> Summary:
        """Summarize a tensor, or reuse the summary of the same object if its bytes have not changed.

        An output is often the input of the next module. Collectives change tensors without a new version, so the hash
        decides.
        """
        if self._last is not None and self._last[0] is tensor:
            return self._last[1]
        if kind == "operation" and self._of_operations is not None:
            return self._of_operations.of(tensor, placement)
        if kind not in ("input", "output"):
            return self._summarized(tensor, placement)
        known = self._seen.get(id(tensor))
        if known is not None and known[0]() is tensor and placement is None:
            local = local_of(tensor)
            if local.is_contiguous() and local.layout == torch.strided and hash_of(local) == known[1].hash:
                return known[1]
        summary = self._summarized(tensor, placement)
        if placement is None:
            self._seen[id(tensor)] = (weakref.ref(tensor), summary)
        return summary

    def _summarized(self, tensor: torch.Tensor, placement: Placement | None) -> Summary:
        return summarize(tensor, placement)

    def _keeps(self, place: StepLocation, kind: Kind, label: str) -> bool:
        """Decide by name, so that all ranks and runs keep the same tensors."""
        key = f"{place.name}|{kind}|{label}|{place.micro}|{place.call}"
        return zlib.crc32(key.encode()) < self._keep * (1 << 32)

    def _write_buffers(self) -> None:
        for root, prefix in observer().models():
            for name, _, buffer, _ in named_buffers(root, prefix):
                if self._mesh is not None and is_on_mesh(buffer):
                    self._request(_place(name), "optimizer", "buffer", "", name, buffer, is_changing=True)
                    continue
                placement = self._placements.of(name, buffer)
                summary = summarize(buffer, placement)
                if self._buffers.get(name) != summary.hash:  # masks and tables never change
                    self._buffers[name] = summary.hash
                    self._write(_place(name), "optimizer", "buffer", "", summary, placement, buffer)

    def _write_optimizer(self, optimizer: Optimizer, parameters: Sequence[NamedParameter]) -> None:
        """Write what is needed to build an optimizer again: class, settings and the state before its step."""
        names = {id(each.parameter): each.name for each in parameters}
        scalars: dict[str, dict[str, Any]] = {}
        for each in parameters:
            state: Mapping[str, Any] = optimizer.state.get(each.parameter, {})
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and value.dim():
                    like = each.parameter if value.shape == each.parameter.shape else None
                    self._add(_place(each.name), "optimizer", "optimizer_state", key, each.name, value, like=like)
                elif isinstance(value, torch.Tensor):
                    scalar = {"value": value.item(), "dtype": str(value.dtype).removeprefix("torch.")}
                    scalars.setdefault(each.name, {})[key] = scalar
                elif is_plain(value):
                    scalars.setdefault(each.name, {})[key] = {"value": value}
        kind = type(optimizer)
        groups: list[dict[str, Any]] = optimizer.param_groups
        data = {
            "kind": "optimizer",
            "rank": self.rank,
            "class": f"{kind.__module__}.{kind.__qualname__}",
            "groups": [
                {"parameters": [names[id(each)] for each in group["params"]], "settings": settings_of(group)}
                for group in groups
            ],
            "scalars": scalars,
        }
        self._file.write(msgspec.json.encode(data))

    def _write_generators(self, on_mesh: torch.Tensor | None) -> None:
        """Write the states of generators: of the ranks, if there is a tensor on a mesh."""
        if on_mesh is not None and self._mesh is not None:
            entry = self._entry(_place(""), "forward", "generator", "", _UNKNOWN)
            self._mesh.summaries.request_generators(entry.sequence, on_mesh, self._full)
            self._mesh.add(_MeshEntry(entry))
            return
        for name, tensor, summary in generator_summaries():
            self._write(_place(name), "forward", "generator", "", summary, None, tensor)


class _OperationSummaries:
    """Summaries of tensors that operations share, so that each tensor is read once after it was written.

    A tensor is its part of a storage, in its shape and version. Writes forget all parts of the storage, because views
    that `.data` returns have versions of their own.
    """

    def __init__(self) -> None:
        self._storages: dict[int, tuple[StorageWeakRef, dict[tuple[Any, ...], Summary]]] = {}
        self._epoch = -1

    def clear(self) -> None:
        """Forget all summaries."""
        self._storages.clear()

    def begin(self, epoch: int) -> None:
        """Forget all summaries if tensors may have changed without an operation that was reported."""
        if epoch != self._epoch:
            self._epoch = epoch
            self.clear()

    def changed(self, tensors: Iterable[torch.Tensor]) -> None:
        """Forget the summaries of tensors that an operation has written."""
        for each in tensors:
            local = local_of(each)
            if local.layout == torch.strided:
                self._storages.pop(local.untyped_storage()._cdata, None)

    def of(self, tensor: torch.Tensor, placement: Placement | None) -> Summary:
        """Return the summary of a tensor."""
        local = local_of(tensor)
        if local.layout != torch.strided:
            return summarize(tensor, placement)
        storage = local.untyped_storage()
        found = self._storages.get(storage._cdata)
        if found is None or found[0].expired():
            found = self._storages[storage._cdata] = (StorageWeakRef(storage), {})
        at = (local.storage_offset(), tuple(local.shape), local.stride(), local.dtype, tensor._version, placement)
        at = (*at, local.is_conj(), local.is_neg())
        summary = found[1].get(at)
        if summary is None:
            summary = found[1][at] = summarize(tensor, placement)
        return summary


class _Guard:
    """Serializes events of threads, and ends the recording at an error instead of the training."""

    def __init__(self, recorder: StepRecorder) -> None:
        self._recorder = recorder

    def __enter__(self) -> None:
        self._recorder._lock.acquire()

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> bool:
        try:
            if isinstance(error, Exception):
                self._recorder._failed(error)
                return True
            return False
        finally:
            self._recorder._last = None
            self._recorder._lock.release()


def record(
    name: str,
    model: nn.Module | None = None,
    optimizer: Optimizer | None = None,
    *,
    steps: int = 2,
    what: Iterable[str] = ("modules", "optimizer"),
    placements: Mapping[str, Split] | None = None,
    full: bool = False,
    keep: float = 1.0,
    folder: str | os.PathLike[str] | None = None,
    perturb: int = 0,
    replace: bool = False,
    rank: int | None = None,
    world_size: int | None = None,
    waits: bool = False,
) -> StepRecorder:
    """Record what this process computes from the next step on.

    Args:
        name: the name of the recording, for `compare` and `Recording.open`.
        model: the model that names are relative to; by default, the model that is called.
        optimizer: not needed; steps of all optimizers are recorded.
        steps: after how many steps it ends by itself.
        what: `"modules"` (inputs, outputs and their gradients), `"optimizer"` (gradients of parameters before and after
            reduction, updates), `"collectives"`, and `"ops"` (inputs and outputs of each torch operation).
        placements: which part of a global tensor a rank has, by pattern of names, where it is not a DTensor
            (`summaries.Placements`): `{"*.wq.weight": Shard(0), "*.wq:output": Shard(-1)}`.
        full: also keep the tensors themselves.
        keep: the fraction of tensors that `full` keeps. All ranks and runs keep the same ones.
        folder: the folder; by default, one of that name in `recordings_folder()`.
        perturb: move floating-point inputs of the model by this many units in the last place, to see how far rounding
            alone moves each tensor; if it has none, the outputs of modules that have none, such as embeddings.
        replace: overwrite an earlier recording of that name.
        rank, world_size: of this process; by default, those of `torch.distributed`, of the mesh, or of the environment.
        waits: do not begin before `StepRecorder.begin`.

    Raises:
        ValueError, TypeError: an argument is invalid.
        FileExistsError: there is a recording of that name.
        OSError: the folder cannot be written.
    """
    del optimizer
    chosen = frozenset((what,) if isinstance(what, str) else what)
    if not chosen or not chosen <= set(WHAT):
        wrong = sorted(chosen - set(WHAT))
        raise ValueError(f"what={wrong or 'nothing'} cannot be recorded: choose from {', '.join(WHAT)}")
    if steps < 1:
        raise ValueError(f"steps={steps}: record at least 1 step")
    if not 0 < keep <= 1:
        raise ValueError(f"keep={keep}: it is a fraction above 0, and at most 1")
    if model is not None and not isinstance(model, nn.Module):
        raise TypeError(f"the model is {type(model).__name__}, not a torch.nn.Module")
    if full and find_spec("safetensors") is None:
        raise ImportError(
            f"to keep tensors (full), a recording needs the package safetensors, which {sys.prefix} lacks: "
            "pip install safetensors there"
        )
    own_rank, own_size = rank_and_size()
    return StepRecorder(
        name,
        model=model,
        steps=steps,
        what=chosen,
        placements=placements,
        full=full,
        keep=keep,
        folder=folder,
        perturb=perturb,
        rank=own_rank if rank is None else rank,
        world_size=own_size if world_size is None else world_size,
        replace=replace,
        waits=waits,
    )


def rank_and_size() -> tuple[int, int]:
    """Return rank and world size of this process: of torch.distributed, else of its mesh, else of the environment."""
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    if running_here()[0]:
        point = context().actor_instance.rank
        return point.rank, point.extent.nelements
    rank, size = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    return (int(rank), int(size)) if rank.isdigit() and size.isdigit() else (0, 1)


def _step_tag(optimizer: Optimizer) -> int | None:
    """Return a number of the last step that is equal on all ranks: the optimizer's own count, else of collectives."""
    states: Iterable[Mapping[str, Any]] = optimizer.state.values()
    counts = (state["step"] for state in states if "step" in state)
    count = next(counts, None)
    if count is not None:
        return int(count)
    if distributed.is_available() and distributed.is_initialized():
        number = cast("Any", distributed.group.WORLD)._get_sequence_number_for_group()
        return int(number) or None
    return None


def is_plain(value: object) -> bool:
    """Return whether a value is a finite number, a text, None, or a list of such."""
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, tuple | list):
        return all(is_plain(each) for each in cast("Sequence[object]", value))
    return isinstance(value, bool | int | str | None)


def settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of an optimizer's parameter group that are plain data, without its parameters."""
    settings = {
        key: value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
        for key, value in group.items()
        if key not in ("params", "param_names")
    }
    return {key: value for key, value in settings.items() if is_plain(value)}


def _mapped(value: object, change: Callable[[torch.Tensor], torch.Tensor]) -> object:
    """Apply a function to the floating-point tensors in tuples, lists and dictionaries."""
    if isinstance(value, torch.Tensor):
        return change(value) if value.is_floating_point() else value
    if isinstance(value, tuple) and type(value) is tuple:
        return tuple(_mapped(each, change) for each in value)
    if type(value) is list:
        return [_mapped(each, change) for each in value]
    if type(value) is dict:
        return {key: _mapped(each, change) for key, each in value.items()}
    return value


#: Of a tensor whose ranks have not answered yet.
_UNKNOWN = Summary((), "", 0.0, 0.0, 0, "", 0.0)


def _figures(summary: Summary) -> dict[str, Any]:
    """Return the fields of an entry that a summary has."""
    return {each.name: getattr(summary, each.name) for each in fields(summary)}


def _ending(rank: int, reason: str) -> bytes:
    return msgspec.json.encode({"kind": "end", "rank": rank, "reason": reason})


def _whole_line(line: str) -> str:
    """Return a line with the whole name of a cell's file, from which a notebook that reads it finds the cell."""
    file, _, number = line.rpartition(":")
    return f"{cell_files[file]}:{number}" if file in cell_files else line


def _place(name: str) -> StepLocation:
    return StepLocation(name, 0, 0, 0, "")


def _device(model: nn.Module | None) -> str:
    parameter = next(model.parameters(), None) if model is not None else None
    if parameter is not None:
        return parameter.device.type
    return "cuda" if torch.cuda.is_available() and torch.cuda.is_initialized() else "cpu"


def _warn(name: str, error: Exception) -> None:
    warnings.warn(
        f"the recording {name!r} has ended, training continues: {type(error).__name__}: {error}",
        RuntimeWarning,
        stacklevel=2,
    )
