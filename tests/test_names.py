"""A class has one name in the whole package: what is read in one file is not mistaken for what stands in another."""

from __future__ import annotations

import ast
import collections
from pathlib import Path

import pytest

import workspace_sync
from monarch_kernel import errors

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("monarch_kernel", "workspace_sync")

# Names that stand in several files, and why.
SHARED = {"profile": "Monarch has two of this name: in its profiler, and of a job"}

# Exceptions that never reach a program: they end within the package, or a person reads their text as it is.
INTERNAL = {
    "UnhandledFault": "a KeyboardInterrupt and a SystemExit, which a script catches as either",
    "TensorUseError": "a TypeError; programs catch MixedTensorsError or BorrowError",
    "UnreachableError": "an OSError, as launchers raise it for an engine that does not answer",
    "ApiRefusedError": "a LaunchError, with the words of the API server of Kubernetes",
    "CellLocationError": "the error of the cell shows its text",
    "FrameTooLongError": "a ValueError for senders; a receiver ends the connection",
    "SealBrokenError": "a JoinError has its text",
    "PipeClosed": "the rank says what has become of the process",
    "ViewRequestError": "front ends show its text",
    "Aborted": "ends an actor's thread",
    "Unformed": "the engine forms the process group anew",
    "SkyError": "a LaunchError, or why a host is gone, with SkyPilot's words",
    "BaseGoneError": "the client sends a whole manifest to that host",
    "TensorArgument": "an endpoint catches it, or it is the TypeError of what cannot be pickled",
    "OperationFailed": "the tensor engine turns it into RemoteException or DeviceMeshError",
    "CommandError": "the debugger's console shows its text",
    "CompiledError": "the rewriter of environments turns it into IncompatibleError",
    "FetchError": "a read in a mount turns it into EIO",
    "NoRule": "the tensor engine turns it into RemoteException",
    "Gone": "the data plane turns it into RDMAError",
    "KeyRefused": "a link reports it to its calls as the cause",
    "LineError": "a command of the terminal prints its text",
    "LinkError": "ends a link, whose calls fail with SupervisionError",
    "ManifestError": "a host's report has its text",
    "NoGreeting": "ends a connection before it is a link",
    "NobodyLeft": "a port's receiver turns it into its own error",
    "OutsideError": "a cell or a command of the terminal shows its text",
    "PrefixTooLongError": "the rewriter of environments turns it into IncompatibleError",
    "WebhookError": "the report that is not posted has its text",
    "RecordsError": "a cell or a command of the terminal shows its text",
    "RequestError": "becomes an answer of the Debug Adapter Protocol",
    "SourceError": "the client has the block fetched from elsewhere",
    "StillBusy": "a reload says which actors were busy",
    "SyncOverError": "ends the work of an agent for a sync that was aborted",
    "TimeLimitError": "a rank answers that the time was up",
    "Unsound": "becomes the reason why a module is not reloaded",
    "Unfit": "the data plane tries the next backend",
    "WorkFailure": "a transfer over RDMA cards turns it into RDMAError",
}


def classes() -> dict[str, list[tuple[str, ast.ClassDef]]]:
    """The public classes at the top of modules, by name, with their files."""
    found: dict[str, list[tuple[str, ast.ClassDef]]] = collections.defaultdict(list)
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    found[node.name].append((str(path.relative_to(ROOT)), node))
    return found


CLASSES = classes()


def test_no_class_name_stands_in_two_files() -> None:
    twice = {name: [file for file, _ in places] for name, places in CLASSES.items() if len(places) > 1}
    assert twice.keys() == SHARED.keys(), "\n".join(f"{name}: {', '.join(files)}" for name, files in twice.items())


def is_exception(name: str) -> bool:
    """Whether a class is an exception, as its bases say."""
    if name.endswith(("Error", "Exception", "Interrupt", "Warning")) and name not in CLASSES:
        return True
    bases = [base for _, node in CLASSES.get(name, ()) for base in node.bases]
    return any(is_exception(base.id) for base in bases if isinstance(base, ast.Name))


@pytest.mark.parametrize("name", sorted(filter(is_exception, CLASSES)))
def test_every_exception_can_be_imported_from_errors_or_stays_inside(name: str) -> None:
    sync = CLASSES[name][0][0].startswith("workspace_sync")
    public = workspace_sync if sync else errors
    where = f"{public.__name__}.__all__"
    assert (name in public.__all__) != (name in INTERNAL), f"add {name} to {where}, or to INTERNAL here"
    assert name in INTERNAL or issubclass(getattr(public, name), BaseException)
