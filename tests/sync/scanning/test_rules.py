"""What is left out is what git leaves out, with the line that says so; ``.meshignore`` is stronger."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sync.scanning.conftest import Client
from workspace_sync.model.workspace import Workspace
from workspace_sync.scanning import Index, scan

needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="compares with git")

NAMES = [
    *(b"a", b"b", b"ab", b"foo", b"foo.py", b"x.txt", b"a b", b"[a]", b"d1", b"*.x", b"!n", b"#h", b"t ", b"back\\s"),
    *(b"n\nl", b"\xff\xfe", b"-", b"a-b", b"]"),
]
PARTS = [
    *(b"a", b"b", b"foo", b"*", b"**", b"?", b"[ab]", b"[!a]", b"[^b]", b"[a-f]", b"/", b"/", b"**/", b"/**", b".py"),
    *(b"[[:alpha:]]", b"[[:digit:]]", b"\\*", b"\\", b"!", b"#", b" ", b"\\ ", b"[]]", b"[]-a]", b"[a\\]", b"\r"),
    *(b"[[:foo:]]", b"[", b"-", b"[[:alpha]", b"[--a]", b"[[a]", b"d1", b"ab", b"\t", b"x", b"t "),
]


def pattern(rng: random.Random) -> bytes:
    text = rng.choice(NAMES) if rng.random() < 0.25 else b"".join(rng.choices(PARTS, k=rng.randint(1, 5)))
    text = text.replace(b"\n", b"?")
    if rng.random() < 0.2:
        text = b"!" + text
    if rng.random() < 0.25:
        text += b"/"
    return b"/" + text if rng.random() < 0.2 else text


def grow(rng: random.Random, folder: bytes, depth: int = 0) -> list[bytes]:
    """Fill a folder; returns it and its subfolders."""
    folders = [folder]
    for name in rng.sample(NAMES, rng.randint(2, 6)):
        path = folder + b"/" + name
        if depth < 3 and rng.random() < 0.45:
            os.mkdir(path)
            folders += grow(rng, path, depth + 1)
        else:
            with open(path, "wb"):
                pass
    return folders


@needs_git
@pytest.mark.parametrize("seed", range(25))
def test_random_rules_leave_out_what_git_leaves_out(seed: int, tmp_path: Path, no_git_settings: None) -> None:
    rng = random.Random(seed)
    root = tmp_path / "tree"
    root.mkdir()
    subprocess.run(["git", "init", "-q", root], check=True)
    folders = grow(rng, os.fsencode(root))
    for folder in folders:
        if folder == os.fsencode(root) or rng.random() < 0.3:
            with open(folder + b"/.gitignore", "wb") as file:
                file.write(b"\n".join(pattern(rng) for _ in range(rng.randint(1, 6))))
    (root / ".git" / "info" / "exclude").write_bytes(pattern(rng))
    listed = subprocess.run(
        ["git", "-C", root, "ls-files", "-z", "--others", "--exclude-standard"], capture_output=True, check=True
    )
    wanted = {path for path in listed.stdout.split(b"\0") if path}
    workspace = Workspace(dirs={root: ""})
    found = {path for path, _ in scan(workspace, Index(workspace.id, str(tmp_path / "memory"))).manifest.files()}
    # Entries that no rule of git's is about, but our defaults: none of the names above is.
    assert found == wanted


def write(folder: Path, **files: str) -> None:
    """Write files; ``:`` in a name separates folders."""
    for name, text in files.items():
        path = folder / name.replace(":", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_folders_that_are_left_out_are_not_entered(client: Client, tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a/__pycache__", "a/node_modules", ".git", "a/data"):
        (tree / name).mkdir()
        (tree / name / "file").write_text("x")
    (tree / ".gitignore").write_text("data/\n")
    entered: list[bytes] = []
    real = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: (entered.append(path), real(path))[1])  # type: ignore[misc]
    assert client.paths() == {".gitignore", "a/one.py", "a/b/two.py", "run.sh"}
    assert {os.path.basename(path) for path in entered} == {b"tree", b"a", b"b", b"empty"}


def test_it_is_known_which_line_leaves_out_what(client: Client, tree: Path) -> None:
    (tree / ".gitignore").write_text("# large\n*.bin\n\nlogs/\n")
    (tree / "a" / "w.bin").write_bytes(b"x" * 1000)
    (tree / "v.bin").write_bytes(b"x" * 500)
    (tree / "a" / "logs").mkdir()
    (tree / "a" / "__pycache__").mkdir()
    for _ in range(2):  # the second time from what is remembered
        found = {each.source: (each.files, each.folders, each.bytes) for each in client.scan().ignored}
        assert found == {
            f"{tree}/.gitignore:2: *.bin": (2, 0, 1500),
            f"{tree}/.gitignore:4: logs/": (0, 1, 0),
            "default: __pycache__/": (0, 1, 0),
        }


def test_changed_rules_count_at_once(client: Client, tree: Path) -> None:
    before = client.paths()
    (tree / "a" / ".gitignore").write_text("two.py\n")
    assert client.paths() == before - {"a/b/two.py"} | {"a/.gitignore"}
    (tree / "a" / ".gitignore").write_text("!two.py\n")
    assert client.paths() == before | {"a/.gitignore"}
    (tree / "a" / ".gitignore").write_text(".gitignore\none.py\n")
    assert client.paths() == before - {"a/one.py"}
    (tree / "a" / ".gitignore").write_text(".gitignore\n")
    assert client.paths() == before
    (tree / "a" / ".gitignore").unlink()
    assert client.paths() == before


def test_what_is_left_out_may_become_something_else(client: Client, tree: Path) -> None:
    (tree / ".gitignore").write_text("out/\n")
    (tree / "out").mkdir()
    (tree / "out" / "file").write_text("x")
    assert "out/file" not in client.paths()
    (tree / "out" / "file").unlink()
    (tree / "out").rmdir()
    (tree / "out").write_text("a file has no rule against it")
    assert "out" in client.paths()


def test_meshignore_is_stronger(client: Client, tree: Path) -> None:
    write(tree, **{".gitignore": "*.bin\n", "a:keep.bin": "x", "drop.bin": "x", "a:b:.gitignore": "*.bin\n"})
    write(tree, **{"a:b:c.bin": "x", "__pycache__:m.pyc": "x", ".meshignore": "!keep.bin\n!/a/b/*.bin\nrun.sh\n"})
    left = client.paths()
    assert {"a/keep.bin", "a/b/c.bin"} <= left
    assert not {"drop.bin", "run.sh", "__pycache__/m.pyc"} & left
    write(tree, **{"a:.meshignore": "keep.bin\n", ".meshignore": "!keep.bin\n!__pycache__/\n!*.pyc\n"})
    left = client.paths()
    assert "a/keep.bin" not in left
    assert "__pycache__/m.pyc" in left


def test_environments_are_left_out_whatever_their_names(client: Client, tree: Path) -> None:
    write(tree, **{"mine:pyvenv.cfg": "home = /usr", "mine:lib:x.py": "x", "other:conda-meta:history": ""})
    write(tree, **{"a:later:x.py": "x"})
    assert client.paths() == {"a/one.py", "a/b/two.py", "run.sh", "a/later/x.py"}
    write(tree, **{"a:later:pyvenv.cfg": "home = /usr"})
    for _ in range(3):
        assert client.paths() == {"a/one.py", "a/b/two.py", "run.sh"}
    (tree / ".meshignore").write_text("!mine/\n!later/\n")
    assert {"mine/lib/x.py", "a/later/x.py"} <= client.paths()


@needs_git
def test_rules_around_the_folder_hold(tmp_path: Path, no_git_settings: Path) -> None:
    top = tmp_path / "repository"
    root = top / "src" / "package"
    write(root, **{"m.py": "", "m.log": "", "m.tmp": "", "m.user": "", "m.more": "", "build:x": "", "m.root": ""})
    subprocess.run(["git", "init", "-q", top], check=True)
    (top / ".gitignore").write_text("*.log\n/src/package/build/\n/m.root\n")
    (top / ".git" / "info" / "exclude").write_text("*.tmp\n")
    write(no_git_settings, **{".config:git:ignore": "*.user\n"})
    client = Client(tmp_path, root)
    assert client.paths() == {"m.py", "m.more", "m.root"}
    write(no_git_settings, **{".gitconfig": "[core]\n\texcludesFile = ~/mine\n", "mine": "*.more\n"})
    assert client.paths() == {"m.py", "m.user", "m.root"}
    (top / ".gitignore").write_text("src/\n*.py\n")  # the folder was named, so it is wanted
    assert client.paths() == {"m.py", "m.log", "m.user", "m.root", "build/x"}


@needs_git
def test_a_repository_within_has_rules_of_its_own(client: Client, tree: Path, no_git_settings: Path) -> None:
    write(tree, **{".gitignore": "*.log\n", "x.log": "", "inner:y.log": "", "inner:z.tmp": ""})
    subprocess.run(["git", "init", "-q", tree / "inner"], check=True)
    (tree / "inner" / ".git" / "info" / "exclude").write_text("*.tmp\n")
    assert client.paths() >= {"inner/y.log"}
    assert not {"x.log", "inner/z.tmp"} & client.paths()
    (tree / "inner" / ".git" / "info" / "exclude").write_text("")
    assert "inner/z.tmp" in client.paths()


def test_a_large_first_sync_is_announced(client: Client, tree: Path) -> None:
    assert client.scan().announcement() is None
    with open(tree / "a" / "b" / "weights", "wb") as file:
        file.truncate((1 << 30) + 1)
    (tree / ".gitignore").write_text("*.log\n")
    (tree / "x.log").write_bytes(b"x" * 5000)
    found = client.scan().announcement()
    assert found is not None
    assert (found.files, found.largest[0].path) == (5, b"a/b")
    text = str(found)
    assert f"from {tree}" in text
    assert "5 files (1.1 GB)" in text
    assert f"1 file (5 kB)  by {tree}/.gitignore:1: *.log" in text


def test_many_small_files_are_announced_too(client: Client, tree: Path) -> None:
    (tree / "many").mkdir()
    for i in range(10_001):
        os.close(os.open(tree / "many" / f"{i}", os.O_CREAT | os.O_WRONLY))
    announced = client.scan().announcement()
    assert announced is not None
    assert announced.files == 10_004


@pytest.mark.parametrize(
    "line, path",
    [
        (b"*a" * 30 + b"*b", b"a" * 250),
        (b"*?" * 60 + b"*[!a]", b"a" * 250),
        (b"x/" + b"*a" * 30 + b"*b", b"x/" + b"a" * 250),
        (b"**/a*/" * 30 + b"b", b"a/" * 400 + b"a"),
        (b"a/**/" * 30 + b"b", b"a/" * 400 + b"a"),
        (b"a**" * 60 + b"/**/b", b"a" * 250),
    ],
)
def test_no_line_takes_long_for_any_name(line: bytes, path: bytes) -> None:
    code = (
        "import os, sys\n"
        "from workspace_sync.scanning.rules import RuleFile\n"
        "line, path = map(os.fsencode, sys.argv[1:])\n"
        "rules = RuleFile(line, b'/tree', 'x')\n"
        "print(rules.match(os.path.basename(path), b'/tree/' + path, False))\n"
    )
    # Where it is tried again from each place, it takes longer than anybody waits.
    done = subprocess.run([sys.executable, "-c", code, line, path], capture_output=True, text=True, timeout=60)
    assert done.stdout == "None\n", done.stderr
