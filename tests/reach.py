"""Which tests a change can reach: what ``python -m tests.run --changed`` runs, and skips the others.

A skip must never be wrong, so only these files reach a part of the tests:

- a test file: itself, and what names it;
- a helper of the tests or of the bench: what names its module or its file, in code or in text, directly or through
  other helpers; and all tests in its folder and below;
- a page of the documentation: what names one; all that look at the whole repository run whatever has changed.

Everything else reaches all of them: the two packages (they load parts of themselves by name, so the graph of
``tests/test_imports.py`` leads from every test to every module), each conftest, the Makefile, constraints, data files.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
_PAGE = re.compile(r"(docs/.*|[A-Z]+)\.md|docs/pictures/.*|docs/.*\.png")
_READS_PAGES = re.compile(r"""["'](docs|README|CHANGELOG|CONTRIBUTING)\b""")
_LOOKS = re.compile(r"\brglob\(|ls-files")
_TEST = re.compile(r"tests/(.*/)?test_\w+\.py")
_HELPER = re.compile(r"(tests|bench)/.*\.py")
#: What runs the tests is in no test, and reaches all of them.
_RUNNER = {"tests/run.py", "tests/warm.py", "tests/reach.py"}
#: What each run of all tests writes; the test that reads it looks at the whole repository.
_OF_ITSELF = {"tests/durations.json"}
_WORD = re.compile(r"\w+")
_FILE = re.compile(r"\w+\.py\b")
_DOTTED = re.compile(r"\b(?:tests|bench)(?:\.\w+)*")
_FROM = re.compile(r"^\s*from (tests[\w.]*|bench[\w.]*) import (\([^)]*\)|[^\n]*)", re.MULTILINE)


def reached(tests: Iterable[Path], changed: Iterable[str]) -> list[Path]:
    """Those tests that one of these files, named from the root of the repository, can reach."""
    changed = set(changed)
    tests = list(tests)
    pages = {name for name in changed if _PAGE.fullmatch(name)}
    code = changed - pages - _OF_ITSELF
    if any(_reaches_all(name) for name in code):
        return tests
    return [
        path
        for path in tests
        if (changed and _looks_at_all(path)) or (pages and _reads_pages(path)) or code & _behind(path)
    ]


def _reaches_all(name: str) -> bool:
    if not _HELPER.fullmatch(name) or name.endswith("conftest.py") or name in _RUNNER:
        return True
    return not (ROOT / name).exists() and not _TEST.fullmatch(name)  # nobody names what was removed


def _looks_at_all(test: Path) -> bool:
    """Whether a test looks at all files of the repository: those that do lie beside this file."""
    return test.parent == Path(__file__).parent and bool(_LOOKS.search(_text(str(test.relative_to(ROOT)))))


def _reads_pages(test: Path) -> bool:
    return any(_READS_PAGES.search(_text(name)) for name in _behind(test))


def _behind(test: Path) -> set[str]:
    """The files of tests and bench that may have a part in a test file: it, and what it names, and what that names."""
    name = str(test.relative_to(ROOT))
    found, todo = {name}, [name]
    while todo:
        for other in _named_in(todo.pop()) - found:
            found.add(other)
            todo.append(other)
    return found


@cache
def _text(name: str) -> str:
    try:
        return (ROOT / name).read_text()
    except OSError:  # it was removed
        return ""


@cache
def _modules() -> dict[str, str]:
    """The files of tests and bench by their dotted names; packages have two, the second as ``python -m`` runs it."""
    found: dict[str, str] = {}
    for top in ("tests", "bench"):
        for path in (ROOT / top).rglob("*.py"):
            name = path.relative_to(ROOT)
            if str(name) not in _RUNNER:
                found[".".join(name.with_suffix("").parts)] = str(name)
    return found


@cache
def _named_in(name: str) -> frozenset[str]:
    """The modules and the file names that stand in a file, in code or in text, and the helpers of its folders."""
    text, modules = _text(name), _modules()
    dotted = set(_DOTTED.findall(text))
    for start, names in _FROM.findall(text):
        dotted |= {f"{start}.{word}" for word in _WORD.findall(names)}
    found: set[str] = set()
    for each in dotted:
        parts = each.split(".")
        for n in range(1, len(parts) + 1):
            start = ".".join(parts[:n])
            found |= {modules[m] for m in (start, f"{start}.__init__", f"{start}.__main__") if m in modules}
    files = set(_FILE.findall(text))
    found |= {other for other in modules.values() if other.rpartition("/")[2] in files and not _TEST.fullmatch(other)}
    top = ROOT / name.partition("/")[0]
    for folder in [folder for folder in (ROOT / name).parents if folder.is_relative_to(top)]:
        beside = folder.glob("*.py" if folder != top else "conftest.py")
        found |= {other for path in beside if not _TEST.fullmatch(other := str(path.relative_to(ROOT)))}
    return frozenset(found - _RUNNER)
