"""The repository itself: nothing of one machine in it, pages that name what exists, pins that are only pins."""

from __future__ import annotations

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
    pages = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    missing = [
        f"{page.relative_to(ROOT)} names {name}"
        for page in pages
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
    named = ("bench", "demo", "dev", "engines", "lab", "test", "titan", "torch")
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
