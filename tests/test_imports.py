"""Imports go one way (docs/architecture.md), and `import monarch_kernel` costs little."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("monarch_kernel", "workspace_sync")

# The façades: what launchers, kernel, debugger, widgets, server and the user build on.
FACADES = {
    f"monarch_kernel.{name}"
    for name in (
        "actor",
        "config",
        "distributed",
        "errors",
        "introspection",
        "job",
        "meshes",
        "output",
        "private_files",
        "random",
        "rdma",
        "spmd",
        "tensor",
        "workers",
    )
}
RUNTIME = "monarch_kernel.runtime"
PROTOCOL = "monarch_kernel.protocol"
MESH = f"{RUNTIME}.mesh"
# What tools build on: the façades, and errors where they are defined. The façade of errors is for programs alone: it
# names those of tools, too, so whoever imported it would be in one circle with all of them.
OFFERED = (FACADES - {"monarch_kernel.errors"}) | {
    *(f"{PROTOCOL}.{module}" for module in ("faults", "refs")),
    *(f"{RUNTIME}.{module}" for module in ("actor.errors", "transfer.errors", "host.devices")),
}
# How a controller starts its host agent: by name, so the agent itself does not come with it.
LAUNCH = f"{RUNTIME}.host.launch"
# Small modules that import nothing of ours; all others may import them.
_COMMON = (
    "_version",
    "aliases",
    "display",
    "environment",
    "loading",
    "logs",
    "programs",
    "subscriptions",
    "thread_frames",
)
COMMON = {f"monarch_kernel.{name}" for name in _COMMON}
DEBUGGER, POOL, LAUNCHERS, KERNEL = (f"monarch_kernel.{tool}" for tool in ("debugger", "pool", "launchers", "kernel"))
NUMERICS = "monarch_kernel.numerics"
DEBUG = "monarch_kernel.debug"  # the façade of the debugger
ENGINES = "monarch_kernel.engines"  # what the tools ask of the runtime under them
SYNC = "workspace_sync"  # a package of its own
WATCH, WIDGETS = "monarch_kernel.watch", "monarch_kernel.widgets"

# package -> which of our packages it may import, beside itself. The most exact entry counts.
ALLOWED: dict[str, set[str]] = {
    PROTOCOL: set(),
    RUNTIME: set(),
    MESH: set(),
    f"{RUNTIME}.supervision": {PROTOCOL, MESH},
    f"{RUNTIME}.node": {PROTOCOL, MESH},
    f"{RUNTIME}.actor": {
        PROTOCOL,
        MESH,
        f"{RUNTIME}.node",
        f"{RUNTIME}.supervision",
        f"{RUNTIME}.transfer",
        LAUNCH,
    },
    f"{RUNTIME}.transfer": {PROTOCOL, MESH, f"{RUNTIME}.node"},
    f"{RUNTIME}.tensor": {PROTOCOL, MESH, *(f"{RUNTIME}.{part}" for part in ("node", "actor", "transfer", "spmd"))},
    f"{RUNTIME}.spmd": {PROTOCOL, MESH, f"{RUNTIME}.node", f"{RUNTIME}.actor"},
    f"{RUNTIME}.rank": {
        PROTOCOL,
        MESH,
        f"{RUNTIME}.node",
        f"{RUNTIME}.actor",
        f"{RUNTIME}.supervision",
        f"{RUNTIME}.transfer",
    },
    f"{RUNTIME}.host": {PROTOCOL, MESH, f"{RUNTIME}.node"},
    LAUNCH: {
        PROTOCOL,
        f"{RUNTIME}.node",
        *(f"{RUNTIME}.host.{m}" for m in ("cleanup", "start_command")),
    },
    **{leaf: set() for leaf in COMMON},
    **{facade: {PROTOCOL, RUNTIME, *FACADES} for facade in FACADES},
    # Jobs are where hosts come from, and nothing of the runtime.
    "monarch_kernel.job": {LAUNCHERS},
    # A former place of names, for programs: nothing of ours may import it.
    "monarch_kernel.tools": FACADES,
    "monarch_kernel.tools.commands": {*FACADES, LAUNCHERS, "monarch_kernel.cli.monarch"},
    # Monarch's modules of these names.
    "monarch_kernel.tools.config": {SYNC},
    DEBUG: {DEBUGGER},
    # Tools build on the façades. The debugger, the pool and the launchers know no other tool; the kernel shows the
    # debugger and the pool; views show what the watch and the debugger know.
    DEBUGGER: {*OFFERED, ENGINES},
    POOL: OFFERED,
    # Training steps are observed in ranks; a controller reaches these as the debugger does.
    NUMERICS: {*OFFERED, ENGINES, DEBUGGER},
    LAUNCHERS: OFFERED,
    KERNEL: {*OFFERED, ENGINES, DEBUG, DEBUGGER, LAUNCHERS, NUMERICS, POOL, SYNC, WATCH, WIDGETS},
    # One model of what the runtime, the debugger and syncs know; views take it from there.
    WATCH: {*OFFERED, DEBUG, DEBUGGER, SYNC},
    WIDGETS: {*OFFERED, DEBUG, DEBUGGER, WATCH},
    "monarch_kernel.server": {*OFFERED, WATCH},
    # Another runtime under the tools: what crosses process boundaries, and the names that tools use.
    ENGINES: {PROTOCOL, *OFFERED},
    # Tools in another runtime's processes: calls, futures and output are handled as in ranks of our own, and in a
    # controller its own system has them.
    f"{ENGINES}.hosted": {
        PROTOCOL,
        MESH,
        *OFFERED,
        ENGINES,
        f"{RUNTIME}.node.node",
        f"{RUNTIME}.rank.output_capture",
        *(f"{RUNTIME}.actor.{part}" for part in ("calls", "execution.collectives", "extensions", "meshes.actor_mesh")),
        *(f"{RUNTIME}.actor.{part}" for part in ("output", "system", "wire_types")),
    },
    # Jobs that others have started; what is in a rank before somebody joins imports the private folders alone.
    f"{ENGINES}.join": {
        *(PROTOCOL, *OFFERED, ENGINES, f"{ENGINES}.hosted", f"{RUNTIME}.host.py_spy"),
        f"{RUNTIME}.actor.calls.pending",
    },
    # Meeting points have the runtime's authenticated links.
    **{
        f"{ENGINES}.join.{part}": {
            *(PROTOCOL, ENGINES, f"{ENGINES}.join", "monarch_kernel.private_files"),
            *(f"{RUNTIME}.node.{module}" for module in ("audit", "descriptors", "link", "poller", "tcp")),
        }
        for part in ("gateway_caller", "gateway_machines", "join_gateway", "gateway_seal")
    },
    "monarch_kernel.join": {f"{ENGINES}.join"},
    # A command parses options, and calls one function of what it runs.
    "monarch_kernel.cli": {
        PROTOCOL,
        *OFFERED,
        LAUNCHERS,
        "monarch_kernel.__main__",
        f"{KERNEL}.install",
        f"{DEBUGGER}.outside",
        f"{DEBUGGER}.reports",
        f"{DEBUGGER}.controller.stragglers",
        f"{ENGINES}.join.announcements",
        f"{DEBUGGER}.terminal.client",
        f"{RUNTIME}.host.worker_main",
        f"{RUNTIME}.host.worker_start",
        f"{ENGINES}.join",
        f"{WATCH}.tracing",
        f"{RUNTIME}.transfer.verbs.card",
        f"{NUMERICS}.step_capture",
        f"{NUMERICS}.step_replay",
    },
    "monarch_kernel.__main__": {"monarch_kernel.cli", f"{KERNEL}.kernel"},
    # The package itself: what `import monarch_kernel` names, each loaded at first use.
    # Its functions are thin: joined jobs are meshes by name, too, and the magics are loaded by IPython.
    "monarch_kernel": {*FACADES, MESH, ENGINES, f"{KERNEL}.extension"},
    SYNC: OFFERED,
}
# What else one module may import, and why.
EXCEPTIONS = {
    # Code of the kernel that runs in ranks reaches their streams through this one module.
    f"{KERNEL}.rank.cell_streams": {f"{RUNTIME}.rank.output_capture"},
    # What a worker announces reaches launchers without anything of the runtime.
    f"{LAUNCHERS}.base": {f"{PROTOCOL}.announcement"},
    # The names of tools that the runtime loads, with what each must offer.
    f"{RUNTIME}.actor.extensions": {DEBUG, DEBUGGER, POOL, SYNC, WIDGETS, "monarch_kernel.tensor"},
    # Whether the server extension can be loaded is found out by loading it.
    "monarch_kernel.cli.doctor": {"monarch_kernel.server"},
    # The nodes of a Slurm job whose processes are read from outside.
    f"{DEBUGGER}.outside.slurm": {f"{LAUNCHERS}.slurm.queue", f"{LAUNCHERS}.base"},
    # A job that has a driver refuses another one, as the debugger of a mesh does.
    f"{ENGINES}.join.joined_process": {f"{DEBUGGER}.controller.viewers"},
    # The fork server starts ranks, and gets their entry point and the module of async actors by name.
    f"{RUNTIME}.host.fork_requests": {f"{RUNTIME}.rank", f"{RUNTIME}.actor.execution.async_instance"},
    # Names only, of modules that are not loaded by them: a process that is started, the module that tracebacks show,
    # the one in which users set a hook, and the one whose frames are recognised.
    LAUNCH: {f"{RUNTIME}.host.__main__"},
    "monarch_kernel.aliases": {"workspace_sync.mounts", "workspace_sync.model.workspace"},
    f"{RUNTIME}.actor.errors": {"monarch_kernel.errors"},
    f"{RUNTIME}.actor.unhandled_fault": {"monarch_kernel.actor"},
    f"{DEBUGGER}.rank.task_stacks": {f"{RUNTIME}.actor.execution.async_instance"},
    # The telemetry of a job and its servers: what the watch sees; its mounts.
    f"{LAUNCHERS}.services": {WATCH},
    f"{LAUNCHERS}.job": {WATCH, "workspace_sync.mounts"},
    # Exceptions of tools are loaded when a program names one.
    "monarch_kernel.errors": {DEBUGGER, ENGINES, LAUNCHERS, NUMERICS, POOL, KERNEL, WATCH, "workspace_sync"},
}
# What the runtime must never know of, and what may be imported only where it is used.
JUPYTER = {
    "IPython",
    "ipykernel",
    "jupyter_client",
    "jupyter_core",
    "ipywidgets",
    "anywidget",
    "traitlets",
    "comm",
}
HEAVY = {"torch", "numpy", "IPython", "ipykernel", "rich", "matplotlib", "debugpy", "asyncio"}


def inside(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def modules() -> Iterator[tuple[str, Path]]:
    """(dotted name, file) of every module of ours."""
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


KNOWN = {name for name, _ in modules()}


@functools.cache
def tree_of(path: Path) -> ast.Module:
    """The syntax tree of a file, which several tests look at."""
    return ast.parse(path.read_text())


def type_checking(node: ast.AST) -> bool:
    """Whether a statement is `if TYPE_CHECKING:`."""
    return isinstance(node, ast.If) and ast.unparse(node.test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}


def imports(tree: ast.AST, module: str, is_package: bool) -> Iterator[tuple[str, int]]:
    """(module of ours or another's, line) of each import: in functions, for type checkers only, and by name."""
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # docstrings
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from of_statement(node, module, is_package)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            # For import_module(), `python -m` or sys.modules; "module:function" names a function in a module.
            named = node.value.partition(":")[0]
            if named in KNOWN and "." in named:
                yield named, node.lineno


def of_statement(node: ast.Import | ast.ImportFrom, module: str, is_package: bool) -> Iterator[tuple[str, int]]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield alias.name, node.lineno
        return
    base = node.module or ""
    if node.level:
        parts = module.split(".")
        up = parts[: len(parts) - node.level + (1 if is_package else 0)]
        base = ".".join([*up, base] if base else up)
    for alias in node.names:
        whole = f"{base}.{alias.name}"
        yield whole if whole in KNOWN else base, node.lineno


def test_what_counts_as_an_import() -> None:
    source = """
'''Prose about monarch_kernel.debug is none.'''
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    from monarch_kernel.debugger import sets
def later():
    import monarch_kernel.pool.pool as data
    import_module("monarch_kernel.debug")
    entry = "monarch_kernel.runtime.rank.main:main"
    said = "see monarch_kernel.errors"
"""
    found = {target for target, _ in imports(ast.parse(source), "monarch_kernel.runtime.node.x", False)}
    assert found == {
        "typing",
        "monarch_kernel.debugger",
        "monarch_kernel.pool.pool",
        "monarch_kernel.debug",
        "monarch_kernel.runtime.rank.main",
    }


@functools.cache
def imports_of(module: str, path: Path) -> list[tuple[str, int]]:
    return list(imports(tree_of(path), module, path.name == "__init__.py"))


def rule_for(module: str) -> str:
    """The most exact package with a rule that holds the module; the whole package's rule is for its own file only."""
    holders = [p for p in ALLOWED if inside(module, p) and (p != "monarch_kernel" or module == p)]
    return max(holders, key=len, default="")


@pytest.mark.parametrize("module, path", [pytest.param(m, p, id=m) for m, p in modules()])
def test_imports_go_one_way(module: str, path: Path) -> None:
    package = rule_for(module)
    assert package, f"{module} has no rule: add one to ALLOWED"
    own = set[str]() if package == "monarch_kernel" else {package}
    allowed = ALLOWED[package] | EXCEPTIONS.get(module, set()) | COMMON | own
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {target}"
        for target, line in imports_of(module, path)
        if target.split(".")[0] in PACKAGES and not any(inside(target, a) for a in allowed)
        # `import monarch_kernel` alone gives the façades
        if target != "monarch_kernel"
    ]
    assert not wrong, f"{package} may import only {sorted(allowed)}:\n" + "\n".join(wrong)


@pytest.mark.parametrize(
    "module, path",
    [pytest.param(m, p, id=m) for m, p in modules() if inside(m, RUNTIME) or inside(m, PROTOCOL)],
)
def test_the_runtime_knows_nothing_of_jupyter(module: str, path: Path) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line} imports {target}"
        for target, line in imports_of(module, path)
        if target.split(".")[0] in JUPYTER
    ]
    assert not found, "\n".join(found)


# Circles of imports that are left, with those in functions. (At the top of modules there is none; names that only type
# checkers need may be mutual within a package.)
CIRCLES: dict[str, set[str]] = {
    "a host mesh spawns proc meshes, and a proc mesh says on which hosts it is": {
        f"{RUNTIME}.actor.hosts.host_mesh",
        f"{RUNTIME}.actor.meshes.proc_mesh",
    },
    "pickling by value, which keeps arrays apart as all pickling does, is loaded with cloudpickle at its first use": {
        f"monarch_kernel.protocol.{module}" for module in ("by_value", "serialize")
    },
    "the debugger's agents and its hub call each other, and its package gives the hub": {
        DEBUGGER,
        f"{DEBUGGER}.rank.rank_debugger",
        *(f"{DEBUGGER}.controller.{module}" for module in ("breakpoints", "hub", "hub_actor", "query", "registry")),
    },
    "a rank's shell is made when a cell first needs it": {
        f"{KERNEL}.rank.lazy_shell",
        f"{KERNEL}.rank.rank_shell",
    },
}
# A module that loads others at first use, for programs; what it names is above it.
LATE = {f"{RUNTIME}.actor.extensions"}


def circles(graph: dict[str, set[str]]) -> list[set[str]]:
    """The strongly connected parts with more than one module (Tarjan)."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[set[str]] = []

    def visit(module: str) -> None:
        order[module] = low[module] = len(order)
        stack.append(module)
        for target in sorted(graph[module]):
            if target not in order:
                visit(target)
                low[module] = min(low[module], low[target])
            elif target in stack:
                low[module] = min(low[module], order[target])
        if low[module] == order[module]:
            at = stack.index(module)
            part = set(stack[at:])
            del stack[at:]
            if len(part) > 1:
                found.append(part)

    for module in sorted(graph):
        if module not in order:
            visit(module)
    return found


def test_circles_are_found() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": {"e"}, "e": {"d"}, "f": {"a"}}
    assert sorted(map(sorted, circles(graph))) == [["a", "b", "c"], ["d", "e"]]


def edges(for_types: bool) -> dict[str, set[str]]:
    """The modules of ours that each module imports, at its top or in functions, and those that only types need."""
    found: dict[str, set[str]] = {module: set() for module in KNOWN}
    for module, path in modules():
        if module in LATE:
            continue
        tree = tree_of(path)
        left_out: set[int] = set()
        if not for_types:
            left_out = {id(child) for node in ast.walk(tree) if type_checking(node) for child in ast.walk(node)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Import | ast.ImportFrom) and id(node) not in left_out:
                targets = {target for target, _ in of_statement(node, module, path.name == "__init__.py")}
                found[module] |= targets & KNOWN - {module}
    return found


def test_imports_have_no_circles_but_a_few() -> None:
    left = [part for part in circles(edges(for_types=False)) if not any(part <= known for known in CIRCLES.values())]
    assert not left, "\n\n".join("\n".join(sorted(part)) for part in left)


#: The largest circles with what only types need: how many modules each has. These numbers may only fall. (The first
#: rose from 19 when nine protocols that had one implementer each became its class.)
LARGEST_WITH_TYPES = (26, 17, 9, 8, 4)


def test_circles_by_types_do_not_grow() -> None:
    found = sorted(circles(edges(for_types=True)), key=len, reverse=True)
    sizes = [len(part) for part in found if len(part) > 3]
    grown = len(sizes) > len(LARGEST_WITH_TYPES) or any(size > most for size, most in zip(sizes, LARGEST_WITH_TYPES))
    assert not grown, f"{sizes}, at most {LARGEST_WITH_TYPES}:\n\n" + "\n\n".join(
        "\n".join(sorted(part)) for part in found if len(part) > 3
    )


# A module with fewer lines stands in its only importer beside it, unless it has a reason to be alone.
SMALL = 120
ALONE = {
    "monarch_kernel.loading": "agents start with it alone, by the code on their command line",
    f"{ENGINES}.join.startup": "lines that `monarch-kernel join install` wrote into environments name it",
    f"{KERNEL}.rank.cell_runner": "debuggers know a cell by the frames of this file, which holds nothing else",
    f"{KERNEL}.rank.cell_loop": "its frames, which are below those of a cell that awaits, must not be the runner's",
    f"{WIDGETS}.mesh_widget": "its classes need anywidget and ipywidgets, which are loaded with the first live view",
    "monarch_kernel.server": "its folder has data, and it loads where the packages that `routes` needs are missing",
    "monarch_kernel.tools": "Monarch's paths of modules, which programs import",
    "workspace_sync.environment.conda_unpack": "archives of environments hold it; hosts run it without this package",
    "workspace_sync.mounts.guardian": "a program of its own, which outlives the process that starts it",
}


def importers() -> dict[str, set[str]]:
    """The product's modules that import each module, by its name or through names that its package takes from it."""
    taken: dict[str, dict[str, str]] = {}  # package -> name -> module that defines it
    users: dict[str, list[tuple[str, str]]] = {}  # module -> (module or package, name that is imported from it)
    for module, path in modules():
        is_package = path.name == "__init__.py"
        found = users[module] = []
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Import | ast.ImportFrom):
                targets = [target for target, _ in of_statement(node, module, is_package)]
                found += zip(targets, (alias.name for alias in node.names))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append((node.value.partition(":")[0], ""))
        if is_package:
            taken[module] = {name: target for target, name in found if inside(target, module)}
            users[module] = [(target, name) for target, name in found if not inside(target, module)]
    result: dict[str, set[str]] = {module: set() for module in KNOWN}
    for module, found in users.items():
        for target, name in found:
            defines = taken.get(target, {}).get(name, target)
            if defines in result and defines != module:
                result[defines].add(module)
    return result


def without_reason() -> dict[str, str]:
    """Small modules whose only importer stands beside them, and folders with one module, each with what to do."""
    paths = dict(modules())
    wrong: dict[str, str] = {}
    for module, users in importers().items():
        path = paths[module]
        if any(inside(module, each) for each in {*ALONE, *FACADES}):
            continue
        if path.name == "__init__.py":
            inner = [each for each in path.parent.iterdir() if each.suffix == ".py" or (each / "__init__.py").is_file()]
            if len(inner) == 2 and module not in PACKAGES:
                wrong[module] = "it is a folder with one module: make it a module"
        elif len(users) == 1 and path.read_text().count("\n") < SMALL:
            (user,) = users
            if paths[user].parent == path.parent:
                wrong[module] = f"only {user} imports it, so it belongs there"
    return wrong


def test_a_module_has_a_reason_to_be_alone() -> None:
    wrong = without_reason()
    assert not wrong, "\n".join(f"{module}: {why}" for module, why in sorted(wrong.items()))


def imported_by(statement: str) -> set[str]:
    """Top-level packages that are in sys.modules after a statement in a new interpreter."""
    code = f"{statement}\nimport sys\nprint(*sorted({{m.partition('.')[0] for m in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT)
    return set(done.stdout.split())


def test_importing_the_package_imports_nothing_heavy() -> None:
    assert not imported_by("import monarch_kernel") & HEAVY


@pytest.mark.skipif("monarch_kernel.actor" not in KNOWN, reason="the runtime's public module is not there yet")
def test_importing_the_actor_api_takes_no_torch_and_no_jupyter() -> None:
    assert not imported_by("import monarch_kernel.actor") & (HEAVY - {"asyncio"})


def test_importing_the_actor_api_loads_nothing_that_only_failures_and_odd_actors_need() -> None:
    late = {"typing_extensions", "inspect", "logging", "traceback", "dataclasses", "tempfile", "subprocess", "json"}
    assert not imported_by("import monarch_kernel.actor") & late
