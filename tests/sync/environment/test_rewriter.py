"""Text, scripts, padded binaries and compiled modules at another prefix."""

from __future__ import annotations

import importlib.util
import marshal
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from workspace_sync.environment.rewriter import Rewriter
from workspace_sync.environment.rewriting import replace_conda, replace_conda_env, replace_pip, restored_binary
from workspace_sync.model.errors import IncompatibleError
from workspace_sync.model.manifest import FileEntry, Rewrite, digest_of

A = b"/envs/a"
LONG = b"/" + b"long-" * 30 + b"/b"


def rewritten(data: bytes, how: Rewrite, target: bytes) -> bytes:
    return Rewriter(target)(FileEntry(len(data), 0o644, digest_of(data), rewrite=how), data, path=b"bin/x")


def test_text_names_the_prefix_and_nothing_beside_it() -> None:
    data = b"-I/envs/a/include '/envs/a' /envs/a2/lib /envs/a.bak /envs/a-x /envs/a."
    moved = replace_conda(data, A, b"/b")
    assert moved == b"-I/b/include '/b' /envs/a2/lib /envs/a.bak /envs/a-x /b."


@pytest.mark.parametrize("argument", [b"", b" -I"])
def test_scripts_of_pip_change_their_form_with_the_length(argument: bytes) -> None:
    body = b"# -*- coding: utf-8 -*-\nprint('/envs/a/x')\n"
    short = b"#!/envs/a/bin/python" + argument + b"\n" + body
    long = replace_pip(short, A, LONG)
    assert long.startswith(b"#!/bin/sh\n'''exec' " + LONG + b"/bin/python" + argument + b" \"$0\" \"$@\"\n' '''\n#")
    assert LONG + b"/x" in long
    assert replace_pip(long, LONG, A) == short
    assert replace_pip(short, A, b"/with space") == (
        b"#!/bin/sh\n'''exec' \"/with space/bin/python\""
        + argument
        + b" \"$0\" \"$@\"\n' '''\n"
        + body.replace(A, b"/with space")
    )


@pytest.mark.parametrize("replace", [replace_pip, replace_conda])
def test_long_scripts_run(tmp_path: Path, replace: object) -> None:
    assert callable(replace)
    prefix = tmp_path / ("d" * 100) / ("e" * 100)
    (prefix / "bin").mkdir(parents=True)
    (prefix / "bin" / "python").symlink_to(sys.executable)
    script = prefix / "bin" / "hello"
    script.write_bytes(replace(b"#!/envs/a/bin/python\nimport sys\nprint('hello', sys.argv[1:])\n", A, bytes(prefix)))
    script.chmod(0o755)
    done = subprocess.run([script, "one", "two words"], capture_output=True, text=True, check=True)
    assert done.stdout == "hello ['one', 'two words']\n"


def test_other_interpreters_of_conda_are_found_by_env() -> None:
    script = b"#!/envs/a/bin/perl -w\nprint 1;\n"
    assert replace_conda(script, A, LONG) == b"#!/usr/bin/env perl -w\nprint 1;\n"
    assert replace_conda_env(b"#!/usr/bin/env perl -w\nprint 1;\n", LONG, A) == script


def test_interpreters_elsewhere_stay() -> None:
    script = b"#!/bin/sh\nexec /envs/a/bin/x\n"
    assert replace_conda(script, A, LONG) == b"#!/bin/sh\nexec " + LONG + b"/bin/x\n"
    assert replace_pip(b"#!/usr/bin/env python\n/envs/a", A, b"/b") == b"#!/usr/bin/env python\n/b"


def test_padded_strings_keep_their_length() -> None:
    placeholder = b"/" + b"p" * 254
    package = b"\x7fELF\0" + placeholder + b"/lib:" + placeholder + b"/lib64\0next\0" + placeholder + b"\0\0end"
    at_a = rewritten(package, Rewrite("binary", placeholder, 255), A)
    assert len(at_a) == len(package)
    assert b"\0/envs/a/lib:/envs/a/lib64\0\0" in at_a
    how = Rewrite("binary", A, 255)
    for target in (b"/b", LONG, b"/" + b"q" * 254):
        assert rewritten(at_a, how, target) == rewritten(package, Rewrite("binary", placeholder, 255), target)
    assert restored_binary(at_a, A, placeholder) == package
    with pytest.raises(
        IncompatibleError, match=r"bin/x .* prefix /envs/a .* 255 bytes; .* has 256: set MONARCH_KERNEL"
    ):
        rewritten(at_a, how, b"/" + b"q" * 255)


def test_strings_without_padding_have_no_space() -> None:
    data = b"\x7fELF\0/envs/a/lib\0abc\0/envs/a\0\0\0\0"
    assert rewritten(data, Rewrite("binary", A, 255), b"/b") == b"\x7fELF\0/b/lib\0\0\0\0\0\0abc\0/b\0\0\0\0\0\0\0\0\0"
    with pytest.raises(IncompatibleError, match="space for 7 bytes"):
        rewritten(data, Rewrite("binary", A, 255), b"/envs/bb")


SOURCE = """
class C:
    "A class."
    def f(self, x: int = 3) -> str:
        return "%s" % [lambda: y for y in range(x)]
"""


def compiled(prefix: str, source: str) -> bytes:
    code = compile(source, f"{prefix}/lib/python3.11/site-packages/m.py", "exec")
    head = importlib.util.MAGIC_NUMBER + bytes(4) + (1).to_bytes(4, "little") + len(source).to_bytes(4, "little")
    return head + marshal.dumps(code)


@pytest.mark.parametrize("target", ["/b", "/envs/c", "/" + "t" * 300, "/é"])
@pytest.mark.parametrize("prefix", ["/envs/a", "/" + "s" * 300, "/ü"])
def test_compiled_modules_are_those_of_the_compiler(prefix: str, target: str) -> None:
    how = Rewrite("pyc", prefix.encode())
    assert rewritten(compiled(prefix, SOURCE), how, target.encode()) == compiled(target, SOURCE)


def test_constants_of_compiled_modules_are_refused() -> None:
    data = compiled("/envs/a", "x = 'it is in /envs/a/lib'")
    with pytest.raises(IncompatibleError, match=r"bin/x .* within a constant"):
        rewritten(data, Rewrite("pyc", A), b"/b")


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_a_moved_program_runs(tmp_path: Path) -> None:
    placeholder = "/" + "p" * 254
    source = tmp_path / "where.c"
    source.write_text(f'#include <stdio.h>\nint main(void) {{ puts("{placeholder}/share"); return 0; }}\n')
    program = tmp_path / "where"
    subprocess.run(["cc", "-o", program, source], check=True)
    moved = rewritten(program.read_bytes(), Rewrite("binary", placeholder.encode(), 255), b"/short")
    program.write_bytes(rewritten(moved, Rewrite("binary", b"/short", 255), b"/somewhat/longer"))
    assert subprocess.run([program], capture_output=True, text=True, check=True).stdout == "/somewhat/longer/share\n"


@pytest.mark.parametrize("target", ["relative", "", "/with\nnewline", "/with\0nul"])
def test_prefixes_that_cannot_be(target: str) -> None:
    with pytest.raises(ValueError, match="no absolute path"):
        Rewriter(target)
