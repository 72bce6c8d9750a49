"""A class has one name in the whole package, and a thing one word: docs/architecture.md has the glossary."""

from __future__ import annotations

import ast
import collections
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import workspace_sync
from monarch_kernel import errors
from tests.test_imports import tree_of

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("monarch_kernel", "workspace_sync")

# Names that stand in several files, and why.
SHARED = {
    "profile": "Monarch has two of this name: in its profiler, and of a job",
    "Recording": "of a function's operations on a mesh, which Monarch names so, and of training steps",
    "Placement": "of ranks on hosts, and of a part of a tensor, as torch has it",
    "Placements": "of ranks on hosts, and of parts of tensors, as torch has it",
    "Subscription": "to a list of functions, and to events of training steps",
}

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
    "StepReplayed": "ends a replayed program, which must not catch it",
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

# Retired words -> the standard terms, and the modules (a pattern) in which the word is itself the standard term.
RETIRED: dict[tuple[str, ...], tuple[str, str]] = {
    ("engine", "engines"): ("provider, transfer, tracer, tool runtime", r"monarch_kernel\.runtime\.tensor\b.*"),
    ("worker", "workers"): ("executor", r"monarch_kernel\.(?!pool\b|runtime\.tensor\b).*"),
    ("place", "places"): ("location, coordinates, placement", ""),
    ("watch", "watched", "watcher", "watches", "watching"): (
        "monitor, watchpoint, events",
        r"monarch_kernel\.watch\b.*",
    ),
    ("join", "joined", "joining", "joins"): ("form", r"monarch_kernel\.(join|engines|kernel|cli)\b.*"),
    ("door", "doors"): ("listener", ""),
    ("meeting", "meetings"): ("gateway", ""),
    ("guest", "guests"): ("attached process", ""),
    ("patience",): ("timeout", ""),
    ("asking",): ("query, request", ""),
    ("looking",): ("inspection", ""),
    ("told",): ("reported", ""),
    ("said",): ("received", ""),
    ("found",): ("result", ""),
}
# Names that have a retired word nevertheless, and why.
KEPT_WORDS = {
    **dict.fromkeys(("EngineJob", "engine_job"), "monarch_kernel.job offers EngineJob; the module has its name"),
    **dict.fromkeys(("QueryEngineClient", "patch_tensor_engine"), "Monarch's name"),
    "engines": "the package is to become runtime/guest and join",
    **dict.fromkeys(("Meeting", "count_meetings", "join", "meetings"), "monarch_kernel.spmd offers it"),
    "said_first": "monarch_kernel.introspection offers it",
    "kept_place": "monarch_kernel.meshes offers it",
    "place_ranks": "monarch_kernel.workers offers it; a verb",
    "in_place": "an idiom, of no location",
    **dict.fromkeys(("NanWatching", "nan_watch", "watch_nan"), "monarch_kernel.tensor offers watch_nan"),
    **dict.fromkeys(("Watcher", "watch"), "workspace_sync offers watch, which returns a Watcher"),
}


def classes() -> dict[str, list[tuple[str, ast.ClassDef]]]:
    """The public classes at the top of modules, by name, with their files."""
    found: dict[str, list[tuple[str, ast.ClassDef]]] = collections.defaultdict(list)
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in tree_of(path).body:
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


def names() -> Iterator[tuple[str, str]]:
    """(module, name) of each module by the last part of its path, and of each public class and function at its top."""
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            parts = parts[:-1] if parts[-1] == "__init__" else parts
            module = ".".join(parts)
            yield module, parts[-1]
            for node in tree_of(path).body:
                if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.name[0] != "_":
                    yield module, node.name


def retired_in(module: str, name: str) -> list[str]:
    """The retired words of a name in snake or camel case, with the terms to use in that module instead."""
    words = {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)}
    return [
        f"{word}: {instead}"
        for retired, (instead, where) in RETIRED.items()
        for word in retired
        if word in words and not re.fullmatch(where, module)
    ]


def test_retired_words_are_found_in_names() -> None:
    assert retired_in("monarch_kernel.kernel.cell", "CellPlace") == ["place: location, coordinates, placement"]
    assert retired_in("monarch_kernel.launchers.job", "all_engines") and retired_in(
        "monarch_kernel.pool.pool", "Worker"
    )
    assert not retired_in("monarch_kernel.runtime.tensor.controller.engine", "TensorEngine")
    assert not retired_in("monarch_kernel.actor", "Replacement")


def test_no_name_has_a_retired_word_but_a_few() -> None:
    wrong: dict[str, list[str]] = collections.defaultdict(list)
    for module, name in names():
        wrong[name] += [f"{name} in {module}: instead of {each}" for each in retired_in(module, name)]
    wrong = {name: lines for name, lines in wrong.items() if lines}
    assert wrong.keys() == KEPT_WORDS.keys(), "\n".join(
        line for name in wrong.keys() - KEPT_WORDS.keys() for line in wrong[name]
    )


# Files of Python, torch and programs, which are recognised by name.
FOREIGN_FILES = {
    *("threading.py", "queue.py", "concurrent/futures/thread.py", "bdb.py", "pdb.py", "*/_sysconfigdata_*.py"),
    *("c10d_logger.py", "distributed_c10d.py", "graph.py", "train.py", "__init__.py", "__main__.py"),
}


def test_files_that_are_named_in_code_exist() -> None:
    files = {str(path.relative_to(ROOT)) for package in PACKAGES for path in (ROOT / package).rglob("*.py")}
    missing = []
    for file in sorted(files):
        for node in ast.walk(tree_of(ROOT / file)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.endswith(".py"):
                name = node.value
                if (
                    name[0] != "."
                    and " " not in name
                    and name not in FOREIGN_FILES
                    and not any(f"/{each}".endswith(f"/{name}") for each in files)
                ):
                    missing.append(f"{file}:{node.lineno} names {name}")
    assert not missing, missing
