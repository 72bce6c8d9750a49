"""How processes are started: by lists of arguments, without a shell; and what scripts are made of."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("monarch_kernel", "workspace_sync")
#: What starts a process, and takes a list.
STARTS = {"subprocess.run", "subprocess.Popen"}
#: The same for what has no name in ``subprocess``, and where it is used: what takes the place of its process, or is
#: started without a fork of a process with threads.
SYSTEM_CALLS = {
    "os.execvpe": {"monarch_kernel/runtime/host/forkserver.py"},
    "os.execve": {"monarch_kernel/runtime/host/worker_exec.py"},
    "os.posix_spawn": {
        "monarch_kernel/runtime/host/launch.py",
        "monarch_kernel/runtime/host/stack_reader.py",
        "workspace_sync/mounts/guardian.py",
    },
}
#: Everything else that starts one.
OTHERS = re.compile(
    r"os\.(system|popen|exec\w+|spawn\w+|posix_spawnp?|startfile)|subprocess\.(call|check_\w+|get\w+output)|pty\.spawn"
    r"|asyncio\.create_subprocess_\w+|(asyncio\.)?loop\.subprocess_\w+"
)
#: Who quotes for a shell beside ``launchers/scripts.py``, and what: lines of a notebook's magics, which no shell gets;
#: what a shell completes; a command line in an error.
QUOTING = {
    "monarch_kernel/launchers/scripts.py",
    "monarch_kernel/kernel/views/command_lines.py",
    "monarch_kernel/cli/completion.py",
    "monarch_kernel/launchers/spmd_job.py",
}
#: What only a script for a shell has.
OF_SHELLS = re.compile(r"\$\(|\$\{|\$[0-9A-Za-z_]+\b.*;|2>|>&2|#!/|\|\| exit|; do\b|\bthen\b.*\bfi\b")
#: Texts that are put together and look like one, by their file: what they are.
LIKE_SCRIPTS = {
    "monarch_kernel/launchers/kubernetes_tunnel.py": "a line in an error, with what Kubernetes replaces in a Pod",
    "monarch_kernel/launchers/kubernetes_pods.py": "variables that Kubernetes replaces in a field of a Pod",
}

#: What stands in code for Python as it is, beside constants: by file, what, and why.
IN_CODE = {"monarch_kernel/runtime/host/start_command.py": {"module": "the name of a module of this package"}}


def sources() -> Iterator[tuple[str, ast.Module]]:
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            yield str(path.relative_to(ROOT)), ast.parse(path.read_text())


def put_together(node: ast.AST) -> bool:
    """Whether this is a text that values are put into."""
    if isinstance(node, ast.JoinedStr):
        return True
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Mod):
        return any(
            isinstance(each, ast.Constant | ast.JoinedStr) or put_together(each) for each in (node.left, node.right)
        )
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("format", "join")


def assigned(tree: ast.Module) -> dict[str, list[ast.expr]]:
    """What names are assigned."""
    found: dict[str, list[ast.expr]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    found.setdefault(target.id, []).append(node.value)
    return found


def text_of(node: ast.AST) -> str:
    """The fixed parts of a text."""
    return "".join(
        str(each.value) for each in ast.walk(node) if isinstance(each, ast.Constant) and isinstance(each.value, str)
    )


def problems(file: str, tree: ast.Module) -> Iterator[str]:
    names = assigned(tree)
    for node in ast.walk(tree):
        where = f"{file}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.ImportFrom) and node.module in ("subprocess", "os", "pty", "shlex"):
            for name in (f"{node.module}.{each.name}" for each in node.names):
                if name in {*STARTS, *SYSTEM_CALLS, "shlex.quote", "shlex.join"} or OTHERS.fullmatch(name):
                    yield f"{where}: imports {name}, which this test does not follow"
        if put_together(node) and OF_SHELLS.search(text_of(node)) and file not in LIKE_SCRIPTS:
            yield f"{where}: puts values into a script; use launchers/scripts.py"
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        if called in STARTS:
            first = node.args[0] if node.args else ast.Constant("")
            values = [first, *(names.get(first.id, []) if isinstance(first, ast.Name) else [])]
            if any(put_together(value) or isinstance(value, ast.Constant) for value in values):
                yield f"{where}: starts a process by a text"
            if {"shell", "executable", "preexec_fn"} & {each.arg for each in node.keywords}:
                yield f"{where}: starts a process by a shell, or not by its first argument"
            if any(each.arg is None for each in node.keywords) or any(isinstance(a, ast.Starred) for a in node.args):
                yield f"{where}: starts a process with arguments that cannot be read here"
        elif called in SYSTEM_CALLS:
            if file not in SYSTEM_CALLS[called]:
                yield f"{where}: {called} starts a process; use subprocess, or say here why not"
        elif OTHERS.fullmatch(called):
            yield f"{where}: {called} starts a process; use subprocess with a list"
        elif called in ("shlex.quote", "shlex.join") and file not in QUOTING:
            yield f"{where}: quotes for a shell; use launchers/scripts.py"
        elif called == "Script" and file != "monarch_kernel/launchers/scripts.py":
            yield f"{where}: vouches for a script; use script()"
        elif called == "script" and "launchers" in file and not isinstance(node.args[0], ast.Constant):
            yield f"{where}: the text of a script is no literal"
    yield from code_for_python(file, tree, names)


def code_for_python(file: str, tree: ast.Module, names: dict[str, list[ast.expr]]) -> Iterator[str]:
    """What is wrong with code after ``-c``: a value in it is no ``repr``."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.List | ast.Tuple):
            continue
        for before, code in zip(node.elts, node.elts[1:]):
            if not (isinstance(before, ast.Constant) and before.value == "-c"):
                continue
            for text in names.get(code.id, [code]) if isinstance(code, ast.Name) else [code]:
                if put_together(text) and not isinstance(text, ast.JoinedStr):
                    yield f"{file}:{node.lineno}: code for Python is put together"
                for value in ast.walk(text):
                    if not isinstance(value, ast.FormattedValue) or value.conversion == ord("r"):
                        continue
                    said = ast.unparse(value.value)
                    if not said.isupper() and said not in IN_CODE.get(file, {}):
                        yield f"{file}:{node.lineno}: {said} stands in code for Python without !r"


def test_processes_are_started_by_lists_and_scripts_get_values_by_one_function() -> None:
    assert not [problem for file, tree in sources() for problem in problems(file, tree)]


@pytest.mark.parametrize(
    "code, said",
    [
        ("subprocess.run('ls')", "by a text"),
        ("subprocess.run(f'ls {x}')", "by a text"),
        ("line = 'ls ' + x\nsubprocess.Popen(line)", "by a text"),
        ("subprocess.run([x], shell=True)", "by a shell"),
        ("subprocess.run(**how)", "cannot be read"),
        ("os.system('ls')", "use subprocess with a list"),
        ("subprocess.check_output(['ls'])", "use subprocess with a list"),
        ("asyncio.create_subprocess_shell('ls')", "use subprocess with a list"),
        ("os.execve(x, x, x)", "say here why not"),
        ("from subprocess import run", "imports subprocess.run"),
        ("text = f'cat {x} 2>/dev/null'", "puts values into a script"),
        ("text = 'a=$(cat %s)' % x", "puts values into a script"),
        ("text = '#!/bin/sh\\nrm {}'.format(x)", "puts values into a script"),
        ("text = shlex.quote(x)", "quotes for a shell"),
        ("text = Script(x)", "vouches for a script"),
        ("text = script(x)", "no literal"),
        ("code = f'import {x}'\nsubprocess.run([python, '-c', code])", "without !r"),
    ],
)
def test_it_is_seen(code: str, said: str) -> None:
    assert any(said in problem for problem in problems("monarch_kernel/launchers/x.py", ast.parse(code)))
