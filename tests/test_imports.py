"""Imports go one way (docs/architecture.md), and `import monarch_kernel` costs little."""

from __future__ import annotations

import ast
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
        "errors",
        "introspection",
        "job",
        "meshes",
        "output",
        "private_files",
        "rdma",
        "spmd",
        "tensor",
        "tools",
        "workers",
    )
}
RUNTIME = "monarch_kernel.runtime"
PROTOCOL = "monarch_kernel.protocol"
MESH = f"{RUNTIME}.mesh"
# How a controller starts its host agent: by name, so the agent itself does not come with it.
LAUNCH = f"{RUNTIME}.host.launch"
TOOLS = ("debugger", "kernel", "launchers", "pool", "server", "widgets")

# package -> which of our packages it may import, beside itself.  The most exact entry counts.
ALLOWED: dict[str, set[str]] = {
    PROTOCOL: set(),
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
    f"{RUNTIME}.tensor": {PROTOCOL, MESH, f"{RUNTIME}.node", f"{RUNTIME}.actor", f"{RUNTIME}.transfer"},
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
    LAUNCH: {PROTOCOL, f"{RUNTIME}.node", *(f"{RUNTIME}.host.{m}" for m in ("agent_config", "cleanup", "procs"))},
    "monarch_kernel.aliases": set(),
    "monarch_kernel.environment": set(),
    "monarch_kernel.subscriptions": set(),
    "monarch_kernel.display": set(),
    **{facade: {PROTOCOL, RUNTIME, *FACADES} for facade in FACADES},
    # Jobs are where hosts come from, and nothing of the runtime.
    "monarch_kernel.job": {"monarch_kernel.launchers"},
    **{f"monarch_kernel.{tool}": {*FACADES, *(f"monarch_kernel.{t}" for t in TOOLS)} for tool in TOOLS},
    "workspace_sync": FACADES,
}
# What else one module may import, and why.
EXCEPTIONS = {
    # Code of the kernel that runs in ranks reaches their streams through this one module.
    "monarch_kernel.kernel.rank.rank_output": {f"{RUNTIME}.rank.output_capture"},
}
# Small modules that say something about the package itself, and how views of ours look; anyone may read them.
COMMON = {f"monarch_kernel.{name}" for name in ("_version", "aliases", "display", "environment", "subscriptions")}
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


def type_checking(node: ast.stmt) -> bool:
    """Whether a statement is `if TYPE_CHECKING:`."""
    return isinstance(node, ast.If) and ast.unparse(node.test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}


def imports(body: list[ast.stmt], module: str, is_package: bool) -> Iterator[tuple[str, int]]:
    """(imported module, line), in functions too, but not what only type checkers read."""
    for statement in body:
        if type_checking(statement):
            assert isinstance(statement, ast.If)
            yield from imports(statement.orelse, module, is_package)
            continue
        for node in ast.iter_child_nodes(statement) if not is_import(statement) else [statement]:
            yield from of_node(node, module, is_package)


def is_import(node: ast.AST) -> bool:
    return isinstance(node, ast.Import | ast.ImportFrom)


def of_node(node: ast.AST, module: str, is_package: bool) -> Iterator[tuple[str, int]]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield alias.name, node.lineno
    elif isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            parts = module.split(".")
            up = parts[: len(parts) - node.level + (1 if is_package else 0)]
            base = ".".join([*up, base] if base else up)
        for alias in node.names:
            whole = f"{base}.{alias.name}"
            yield whole if whole in KNOWN else base, node.lineno
    elif isinstance(node, ast.stmt):
        yield from imports([node], module, is_package)
    else:
        for child in ast.iter_child_nodes(node):
            yield from of_node(child, module, is_package)


def rule_for(module: str) -> str | None:
    """The most exact package with a rule that holds the module."""
    holders = [p for p in ALLOWED if inside(module, p)]
    return max(holders, key=len, default=None)


@pytest.mark.parametrize("module, path", [pytest.param(m, p, id=m) for m, p in modules()])
def test_imports_go_one_way(module: str, path: Path) -> None:
    package = rule_for(module)
    if package is None:
        pytest.skip("the package's own top level may import everything")
    allowed = ALLOWED[package] | EXCEPTIONS.get(module, set()) | COMMON | {package}
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {target}"
        for target, line in imports(ast.parse(path.read_text()).body, module, path.name == "__init__.py")
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
        for target, line in imports(ast.parse(path.read_text()).body, module, path.name == "__init__.py")
        if target.split(".")[0] in JUPYTER
    ]
    assert not found, "\n".join(found)


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
