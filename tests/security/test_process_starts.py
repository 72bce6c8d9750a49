"""How processes are started: by lists of arguments, without a shell; and what scripts are made of."""

from __future__ import annotations

import ast
import functools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from monarch_kernel import programs

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("monarch_kernel", "workspace_sync")
#: The one place that starts programs, and its functions.
PLACE = "monarch_kernel/programs.py"
STARTS = {f"monarch_kernel.programs.{name}" for name in ("start", "run", "spawn", "become")}
#: What starts a program or a process otherwise, by its full name; and methods by their own.
OTHERS = re.compile(
    r"(os|posix)\.(system|popen|exec[lv]\w*|spawn\w+|posix_spawnp?|startfile|fork|forkpty)"
    r"|subprocess\.(Popen|run|call|check_\w+|get\w*output)|_posixsubprocess\.\w+|pty\.(spawn|fork)"
    r"|asyncio(\.subprocess)?\.create_subprocess_\w+|.*\.subprocess_(exec|shell)"
    r"|(torch\.)?multiprocessing(\.\w+)*\.(Process|Pool|Manager|get_context|spawn|start_processes)"
    r"|concurrent\.futures(\.process)?\.ProcessPoolExecutor"
)
#: Where that is used all the same, and why.
_FORK = "a fork runs no other program"
ELSEWHERE = {
    ("monarch_kernel/launchers/ray/host.py", "subprocess.Popen"): "Ray sends it to interpreters without this package",
    ("workspace_sync/mounts/guardian.py", "os.posix_spawn"): "it runs in an isolated interpreter, without any package",
    ("monarch_kernel/runtime/host/forkserver.py", "os.fork"): _FORK,
    ("monarch_kernel/runtime/host/worker_main.py", "os.fork"): _FORK,
    ("monarch_kernel/runtime/host/__main__.py", "os.fork"): _FORK,
    ("monarch_kernel/cli/worker.py", "os.fork"): _FORK,
}
SHELLS = re.compile(r"(.*/)?(ba|da|z|k)?sh")
#: Who quotes for a shell beside ``launchers/scripts.py``, and what: lines of a notebook's magics, which no shell gets;
#: what a shell completes; a command line in an error; commands that are shown, to be typed.
QUOTING = {
    "monarch_kernel/cli/doctor.py",
    "monarch_kernel/launchers/scripts.py",
    "monarch_kernel/kernel/views.py",
    "monarch_kernel/cli/install.py",
    "monarch_kernel/launchers/spmd_job.py",
}
#: What only a script for a shell has.
OF_SHELLS = re.compile(r"\$\(|\$\{|\$[0-9A-Za-z_]+\b.*;|2>|>&2|#!/|\|\| exit|; do\b|\bthen\b.*\bfi\b")
#: Texts that are put together and look like one, by their file: what they are.
LIKE_SCRIPTS = {
    "monarch_kernel/watch/admin.py": "a page of HTML",
    "monarch_kernel/launchers/kubernetes/api.py": "a line in an error, with what Kubernetes replaces in a Pod",
    "monarch_kernel/launchers/kubernetes/pods.py": "variables that Kubernetes replaces in a field of a Pod",
}

#: What stands in code for Python as it is, beside constants: by file, what, and why.
IN_CODE = {"monarch_kernel/runtime/host/start_command.py": {"module": "the name of a module of this package"}}


#: What a module has, at least, in which something is found: others are not parsed.
_HINTS = re.compile(
    rf"\b(os|posix)\.(system|popen|exec|spawn|posix_spawn|startfile|fork)|from (os|posix) import|{OF_SHELLS.pattern}"
    r"|subprocess|\bpty\b|multiprocessing|ProcessPool|programs|shlex|cript\(|['\"]-\w*c['\"]"
)


class Source:
    """A module, and the names in it."""

    def __init__(self, file: str, code: str) -> None:
        self.file = file
        self.nodes = list(ast.walk(ast.parse(code)))
        #: What each imported name stands for.
        self.imported: dict[str, str] = {}
        #: What names are assigned.
        self.assigned: dict[str, list[ast.expr]] = {}
        for node in self.nodes:
            if isinstance(node, ast.Import):
                self.imported |= {each.asname: each.name for each in node.names if each.asname}
            elif isinstance(node, ast.ImportFrom):
                self.imported |= {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
            elif isinstance(node, ast.Assign):
                for target in node.targets:
                    if isinstance(target, ast.Name):
                        self.assigned.setdefault(target.id, []).append(node.value)

    def full_name(self, node: ast.expr) -> str:
        """The name of what a name or an attribute stands for."""
        if isinstance(node, ast.Name):
            return self.imported.get(node.id, node.id)
        if isinstance(node, ast.Attribute):
            return f"{self.full_name(node.value)}.{node.attr}"
        return "?"

    def starts(self) -> Iterator[tuple[str, int]]:
        """(name, line) of what starts a process outside of the one place: whatever is used, called or not."""
        called = {id(node.func) for node in self.nodes if isinstance(node, ast.Call)}
        # Popen[bytes] is a type.
        types = {id(node.value) for node in self.nodes if isinstance(node, ast.Subscript) and id(node) not in called}
        for node in self.nodes:
            if isinstance(node, ast.Name | ast.Attribute) and id(node) not in types:
                name = self.full_name(node)
                if OTHERS.fullmatch(name) and self.file != PLACE:
                    yield name, node.lineno


@functools.cache
def sources() -> list[Source]:
    """The modules of the packages in which something may be found."""
    paths = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    texts = ((str(path.relative_to(ROOT)), path.read_text()) for path in paths)
    return [Source(file, text) for file, text in texts if _HINTS.search(text)]


def put_together(node: ast.AST) -> bool:
    """Whether this is a text that values are put into."""
    if isinstance(node, ast.JoinedStr):
        return True
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Mod):
        return any(
            isinstance(each, ast.Constant | ast.JoinedStr) or put_together(each) for each in (node.left, node.right)
        )
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("format", "join")


def text_of(node: ast.AST) -> str:
    """The fixed parts of a text."""
    return "".join(
        str(each.value) for each in ast.walk(node) if isinstance(each, ast.Constant) and isinstance(each.value, str)
    )


def problems(source: Source) -> Iterator[str]:
    file, names = source.file, source.assigned
    for name, line in source.starts():
        if (file, name) not in ELSEWHERE:
            yield f"{file}:{line}: {name} starts a process; use {PLACE}, or say here why not"
    for node in source.nodes:
        where = f"{file}:{getattr(node, 'lineno', 0)}"
        if put_together(node) and OF_SHELLS.search(text_of(node)) and file not in LIKE_SCRIPTS:
            yield f"{where}: puts values into a script; use launchers/scripts.py"
        if isinstance(node, ast.List | ast.Tuple):
            for shell, option, text in zip(node.elts, node.elts[1:], node.elts[2:]):
                if (
                    all(isinstance(each, ast.Constant) for each in (shell, option))
                    and SHELLS.fullmatch(text_of(shell))
                    and text_of(option).endswith("c")
                    and not isinstance(text, ast.Constant)
                    and not (isinstance(text, ast.Call) and ast.unparse(text.func) == "script")
                ):
                    yield f"{where}: a shell runs a text that is neither a literal nor of script()"
        if not isinstance(node, ast.Call):
            continue
        called = source.full_name(node.func)
        if called in STARTS or ((file, called) in ELSEWHERE and node.args):
            first = node.args[0] if node.args else ast.Constant("")
            values = [first, *(names.get(first.id, []) if isinstance(first, ast.Name) else [])]
            if any(put_together(value) or isinstance(value, ast.Constant) for value in values):
                yield f"{where}: starts a process by a text"
            if {"shell", "executable", "preexec_fn"} & {each.arg for each in node.keywords}:
                yield f"{where}: starts a process by a shell, or not by its first argument"
            if any(each.arg is None for each in node.keywords) or any(isinstance(a, ast.Starred) for a in node.args):
                yield f"{where}: starts a process with arguments that cannot be read here"
        elif called in ("shlex.quote", "shlex.join") and file not in QUOTING:
            yield f"{where}: quotes for a shell; use launchers/scripts.py"
        elif called.endswith("Script") and file != "monarch_kernel/launchers/scripts.py":
            yield f"{where}: vouches for a script; use script()"
        elif ast.unparse(node.func) == "script" and "launchers" in file and not isinstance(node.args[0], ast.Constant):
            yield f"{where}: the text of a script is no literal"
    yield from code_for_python(source)


def code_for_python(source: Source) -> Iterator[str]:
    """What is wrong with code after ``-c``: a value in it is no ``repr``."""
    file, names = source.file, source.assigned
    for node in source.nodes:
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
    assert not [problem for source in sources() for problem in problems(source)]


def test_each_start_outside_of_the_one_place_is_still_there() -> None:
    assert {(source.file, name) for source in sources() for name, _ in source.starts()} == ELSEWHERE.keys()


_P = "from monarch_kernel import programs\n"


@pytest.mark.parametrize(
    "code, said",
    [
        (f"{_P}programs.run('ls')", "by a text"),
        (f"{_P}programs.run(f'ls {{x}}')", "by a text"),
        (f"{_P}line = 'ls ' + x\nprograms.start(line)", "by a text"),
        (f"{_P}programs.run([x], shell=True)", "by a shell"),
        (f"{_P}programs.run(**how)", "cannot be read"),
        (f"{_P}programs.start(['sh', '-c', text])", "a shell runs a text"),
        (f"{_P}programs.start(['/bin/bash', '-ec', f'echo {{x}}'])", "a shell runs a text"),
        ("from monarch_kernel.programs import start as go\ngo('ls')", "by a text"),
        ("subprocess.run(['ls'])", "say here why not"),
        ("subprocess.Popen[bytes](['ls'])", "say here why not"),
        ("import subprocess as s\ns.check_output(['ls'])", "say here why not"),
        ("from subprocess import run\nrun(['ls'])", "say here why not"),
        ("run = subprocess.run", "say here why not"),
        ("os.system('ls')", "say here why not"),
        ("os.execve(x, x, x)", "say here why not"),
        ("os.posix_spawn(x, x, x)", "say here why not"),
        ("os.fork()", "say here why not"),
        ("asyncio.create_subprocess_shell('ls')", "say here why not"),
        ("loop.subprocess_exec(x, 'ls')", "say here why not"),
        ("multiprocessing.Process(target=x)", "say here why not"),
        ("text = f'cat {x} 2>/dev/null'", "puts values into a script"),
        ("text = 'a=$(cat %s)' % x", "puts values into a script"),
        ("text = '#!/bin/sh\\nrm {}'.format(x)", "puts values into a script"),
        ("text = shlex.quote(x)", "quotes for a shell"),
        ("from shlex import quote\ntext = quote(x)", "quotes for a shell"),
        ("text = Script(x)", "vouches for a script"),
        ("text = script(x)", "no literal"),
        (f"{_P}code = f'import {{x}}'\nprograms.run([python, '-c', code])", "without !r"),
    ],
)
def test_it_is_seen(code: str, said: str) -> None:
    assert _HINTS.search(code)
    assert any(said in problem for problem in problems(Source("monarch_kernel/launchers/x.py", code)))


def test_a_type_is_no_start() -> None:
    assert not list(Source("x.py", "def f() -> subprocess.Popen[bytes]: ...").starts())


@pytest.mark.parametrize("begin", [programs.start, programs.run, lambda c: programs.spawn(c, {}, {1: 1})])
@pytest.mark.parametrize("command", ["touch taken", b"touch taken", [], [""], ["touch", "taken\0x"], ["touch", None]])
def test_a_line_is_not_started(
    begin: Callable[[Any], Any], command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises((TypeError, ValueError), match=r"^(a command|an argument) "):
        begin(command)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("option", [{"shell": True}, {"executable": "/bin/sh"}, {"preexec_fn": print}])
def test_no_option_names_another_program(option: dict[str, Any]) -> None:
    for begin in (programs.start, programs.run):
        with pytest.raises(TypeError, match=next(iter(option))):
            begin(["true"], **option)


def test_arguments_reach_a_program_as_they_are(tmp_path: Path) -> None:
    words = ["$(touch taken)", "a b", "*", "", "x\ny", "-n", "\udcff"]
    said = programs.run(["printf", "%s\\0", *words], capture_output=True, cwd=str(tmp_path), check=True)
    assert said.stdout == b"".join(os.fsencode(word) + b"\0" for word in words)
    started = programs.start(["sh", "-c", 'printf %s "$1"', "sh", words[0]], stdout=subprocess.PIPE)
    assert started.communicate()[0].decode() == words[0]
    read, write = os.pipe()
    program = shutil.which("sh") or ""
    pid = programs.spawn(
        [program, "-c", 'printf "%s %s" "$1" "$(cut -d" " -f6 /proc/$$/stat)" >&7', "sh", "$(id)"],
        {"PATH": os.defpath},
        {7: write},
        new_session=True,
    )
    os.close(write)
    with os.fdopen(read) as file:
        assert file.read() == f"$(id) {pid}"
    assert os.waitpid(pid, 0)[1] == 0
    code = "from monarch_kernel import programs; programs.become(['printf', '%s', '$(id)'], {'PATH': '/usr/bin:/bin'})"
    assert programs.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "$(id)"


def test_the_place_costs_no_load_of_subprocess() -> None:
    code = "import sys; from monarch_kernel import programs; sys.exit('subprocess' in sys.modules)"
    assert programs.run([sys.executable, "-c", code], check=False).returncode == 0
