"""The repository itself: nothing of one machine in it, pages that name what exists, pins that are only pins."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

import monarch_kernel
from tests.line_counts import FileSize, size_of

ROOT = Path(__file__).resolve().parent.parent


def tracked() -> list[Path]:
    """Every file that is in the repository, or will be when all is added."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    try:
        done = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    return [p for name in done.stdout.split("\0") if name and (p := ROOT / name).is_file()]


def lines() -> list[tuple[str, int, str]]:
    """(file, line number, text) of every tracked text file."""
    found: list[tuple[str, int, str]] = []
    for path in tracked():
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        name = str(path.relative_to(ROOT))
        found += [(name, n, line) for n, line in enumerate(text.splitlines(), 1)]
    return found


def matching(pattern: str, but: tuple[str, ...] = ()) -> list[str]:
    return [f"{f}:{n}: {text.strip()[:100]}" for f, n, text in lines() if f not in but and re.search(pattern, text)]


def test_no_package_index_is_named() -> None:
    # Cut in two, so that this file does not match itself.
    hosts = "|".join(["pypi" + r"\.org", "python" + r"hosted\.org", "registry" + r"\.(npm|yarn)", "debian" + r"\.org"])
    options = "--(extra-)?" + "index-url|--" + "find-links|--" + "trusted-host"
    assert not matching(f'{hosts}|{options}|"resolved": *"https?:')


def test_no_path_of_one_machine_is_named() -> None:
    homes = r"(?<![\w.])/(home|Users|root|work|opt/(pypi|wheels))/"
    assert not matching(homes + r"\w", but=("tests/test_project.py",))
    assert not matching(re.escape(str(ROOT)) + r"\b")


def test_files_that_pages_name_exist() -> None:
    # Pages name files from the repository, the package, or the part of it that they are about.
    starts = [
        "",
        *(f"monarch_kernel/{part}" for part in ("", "kernel/")),
        *(f"monarch_kernel/runtime/{part}" for part in ("", "actor/", "transfer/", "tensor/")),
    ]
    missing = [
        f"{page.relative_to(ROOT)} names {name}"
        for page in pages()
        for name in re.findall(r"`([\w/]+/\w+\.py)`", page.read_text())
        if not name.endswith("/NAME.py") and not any((ROOT / start / name).is_file() for start in starts)
    ]
    assert not missing


def test_tests_that_pages_name_exist() -> None:
    missing = [
        f"{page.relative_to(ROOT)} names {path}::{name}"
        for page in sorted((ROOT / "docs").glob("*.md"))
        for path, name in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", page.read_text())
        if not re.search(rf"^(?:async )?def {name}\(", (ROOT / path).read_text(), re.M)
    ]
    assert not missing


def pages() -> list[Path]:
    """The pages for users and developers."""
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def without_code(text: str) -> str:
    """The text of a page without its blocks of code."""
    return re.sub(r"^ *```.*?^ *```$", "", text, flags=re.M | re.S)


def anchors_of(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ +(.+?) *$", without_code(page.read_text()), re.M):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        anchor = plain = re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-")
        count = 0
        while anchor in found:
            anchor = f"{plain}-{(count := count + 1)}"
        found.add(anchor)
    return found


def test_links_of_pages_resolve() -> None:
    broken: list[str] = []
    for page in [*pages(), ROOT / "CHANGELOG.md"]:
        text = re.sub(r"`[^`\n]*`", "", without_code(page.read_text()))
        for link in re.findall(r"\]\(([^)\s]+)\)", text):
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            if re.match(r"\w+:", link):
                continue
            if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors_of(target)):
                broken.append(f"{page.relative_to(ROOT)} links to {link}")
    assert not broken


def test_pages_that_code_names_exist() -> None:
    named = r"docs/(\w+\.md)(?:#([\w-]+))?"
    missing = [
        f"{file}:{number} names docs/{page}{'#' * bool(anchor)}{anchor}"
        for file, number, text in lines()
        if file not in ("CHANGELOG.md", "tests/test_project.py")
        for page, anchor in re.findall(named, text)
        if not (target := ROOT / "docs" / page).is_file() or (anchor and anchor not in anchors_of(target))
    ]
    assert not missing


def test_every_page_is_in_the_index_of_pages() -> None:
    linked = re.findall(r"^\| \[.*?\]\((\w+\.md)\) \|", (ROOT / "docs" / "README.md").read_text(), re.M)
    assert sorted(linked) == sorted(p.name for p in ROOT.glob("docs/*.md") if p.name != "README.md")


def defined_in(path: Path) -> set[str]:
    """The names that a module defines at its top, and those of its classes' methods, with dots."""
    text = path.read_text()
    if path.suffix != ".py":
        return set(re.findall(r"^(?:export )?(?:const|function|class|interface|type) (\w+)", text, re.M))
    found: set[str] = set()
    for node in ast.parse(text).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            inner = [n.name for n in node.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
            found.update(f"{node.name}.{name}" for name in inner)
    return found


def behaviours() -> list[tuple[str, str, list[str]]]:
    """(behaviour, file, names) of each row of the behaviour index."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    index = text.partition("\n## Behaviour index\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (?!Where |-)(.+) \| `(\S+)` \| (`.+`) \|$", index, re.M)
    return [(what, file, re.findall(r"`([^`]+)`", names)) for what, file, names in rows]


def test_the_behaviour_index_names_what_exists() -> None:
    rows = behaviours()
    assert len(rows) >= 40
    assert len({what for what, _, _ in rows}) == len(rows)
    missing = [
        f"{what}: {file} does not define {name}"
        for what, file, names in rows
        for name in names
        if not (ROOT / file).is_file() or name not in defined_in(ROOT / file)
    ]
    assert not missing


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(p, id=p.name)
        for p in sorted([*ROOT.glob("constraints/*.txt"), *ROOT.glob("bench/requirements/*.txt")])
    ],
)
def test_pins_are_names_and_exact_versions(path: Path) -> None:
    wrong = [x for x in path.read_text().splitlines() if not re.fullmatch(r"[a-z0-9][a-z0-9-]*==[0-9][0-9a-z.]*", x)]
    assert not wrong


def test_every_dependency_is_pinned_for_every_python() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    named = ("bench", "demo", "dev", "docs", "engines", "lab", "test", "titan", "torch")
    wanted = project["dependencies"] + [r for name in named for r in extras[name]]
    names = {re.split(r"[\[<>=!~ ;]", r)[0].replace("_", "-").lower() for r in wanted}
    names -= {"monarch-kernel", "triton"}  # torch for GPUs pins its triton
    for minor in (11, 12, 13):
        text = (ROOT / "constraints" / f"py3.{minor}.txt").read_text()
        pinned = {line.partition("==")[0] for line in text.splitlines()}
        assert names <= pinned, f"not pinned for 3.{minor}: {sorted(names - pinned)}; run make lock with that Python"


def test_lines_of_code_are_neither_blank_nor_prose() -> None:
    source = '''"""What it is.

More.
"""

from typing import Any  # for x


# A comment.
class A:
    """A class."""

    #: An attribute.
    x: Any = """two
lines"""
'''
    assert size_of(source) == FileSize(lines=15, code=4, anys=2)


def test_the_version_is_single_sourced() -> None:
    assert monarch_kernel.__version__ == importlib.metadata.version("monarch_kernel")
