"""Hooks of MkDocs: the navigation, generated pages, links that leave ``docs/``, and ``llms.txt``.

MkDocs calls the functions by their names.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.nav import Navigation
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from website.reference import GeneratedPage, reference_pages  # noqa: E402
from website.tutorials import NOTEBOOKS, tutorial  # noqa: E402

log = logging.getLogger("mkdocs.hooks.website")
#: Pages of the repository that are also pages of the site, by their paths from the root of the repository.
FROM_ROOT = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
#: Weights in the search of pages by the beginning of their path; others have 1. Overviews and lists of names mention
#: everything, and come after the pages that explain it.
WEIGHTS = {"README.md": 0.3, "changelog.md": 0.2, "api/": 0.4, "tutorials/": 0.8, "magic_options.md": 0.8}


class Entry(NamedTuple):
    """A row of a table of pages in ``docs/README.md``."""

    part: str
    path: str
    subject: str


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Derive the navigation from the tables of ``docs/README.md``, plus the generated pages."""
    generated = reference_pages()
    entries = contents((Path(config.docs_dir) / "README.md").read_text())
    nav: list[dict[str, Any]] = [{"Home": "README.md"}]
    for part in dict.fromkeys(entry.part for entry in entries):
        pages: list[Any] = [entry.path for entry in entries if entry.part == part]
        if part == "Reference":
            pages += [{page.title: page.path} for page in generated if not page.path.startswith("api/")]
            pages.append(
                {"Python API": [{page.title: page.path} for page in generated if page.path.startswith("api/")]}
            )
        if part == "Explanation":
            pages += [{"Contributing": FROM_ROOT["CONTRIBUTING.md"]}, {"Changelog": FROM_ROOT["CHANGELOG.md"]}]
        nav.append({part: pages})
    config.nav = nav
    if "MIKE_DOCS_VERSION" in os.environ:  # else there are no versions to choose from
        config.extra["version"] = {"provider": "mike"}
    config.extra["generated_pages"] = generated
    config.extra["entries"] = entries
    return config


def contents(readme: str) -> list[Entry]:
    """Return the rows of the tables of pages in ``docs/README.md``."""
    found: list[Entry] = []
    part = ""
    for line in readme.splitlines():
        if heading := re.fullmatch(r"## (.+)", line):
            part = heading[1]
        elif row := re.fullmatch(r"\| \[.*?\]\((?:\.\./notebooks/(\w+)\.ipynb|(\w+\.md))\) \| (.+) \|", line):
            found.append(Entry(part, f"tutorials/{row[1]}.md" if row[1] else row[2], row[3]))
    return found


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages, the tutorials, and pages of the repository's root."""
    generated: list[GeneratedPage] = config.extra["generated_pages"]
    for page in generated:
        files.append(File.generated(config, page.path, content=page.text))
    for notebook in sorted(NOTEBOOKS.glob("*.ipynb")):
        lesson = tutorial(notebook)
        if lesson.missing:
            log.info("%s: %s", notebook.name, lesson.missing)
        files.append(File.generated(config, lesson.path, content=lesson.text))
        for path, picture in lesson.pictures.items():
            files.append(File.generated(config, path, content=picture))
    for source, path in FROM_ROOT.items():
        files.append(File.generated(config, path, content=(ROOT / source).read_text()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links that leave ``docs/`` to the page of the site with that content, and weigh the page in the search."""
    weight = next((weight for start, weight in WEIGHTS.items() if page.file.src_uri.startswith(start)), 1.0)
    page.meta["search"] = {"boost": weight}
    if page.file.src_uri in FROM_ROOT.values():
        markdown = markdown.replace("](docs/", "](")
    if page.file.src_uri.startswith("tutorials/"):
        markdown = markdown.replace("](../docs/", "](../")
    markdown = re.sub(r"\]\(\.\./notebooks/(\w+)\.ipynb\)", r"](tutorials/\1.md)", markdown)
    for source, path in FROM_ROOT.items():
        markdown = markdown.replace(f"](../{source}", f"]({path}")
    named = re.compile(r"\[`?(?:docs/)?(\w+\.md)`?\]\(((?:\.\./)?\1[^)]*)\)")
    return named.sub(lambda link: f"[{title(Path(config.docs_dir) / link[1])}]({link[2]})", markdown)


def title(page: Path) -> str:
    """Return the title of a page of ``docs/``, or its file name if it stands elsewhere."""
    heading = re.search(r"^# (.+)$", page.read_text(), re.M) if page.is_file() else None
    return heading[1] if heading else page.name


def on_nav(nav: Navigation, config: MkDocsConfig, files: Files) -> Navigation:
    """Keep the pages in order for ``llms.txt``."""
    config.extra["pages"] = [page for page in nav.pages if isinstance(page, Page)]
    return nav


def on_post_build(config: MkDocsConfig) -> None:
    """Write ``llms.txt``, and beside each page its Markdown, to which it points."""
    site, pages = Path(config.site_dir), list[Page](config.extra["pages"])
    subjects = {entry.path: entry.subject for entry in config.extra["entries"]}
    subjects |= {page.path: page.subject for page in config.extra["generated_pages"]}
    (site / "llms.txt").write_text(llms_txt(config.site_name, config.site_description or "", pages, subjects))
    for page in pages:
        (site / page.file.dest_uri).with_suffix(".md").write_text(page.markdown or "")


def llms_txt(name: str, description: str, pages: Iterable[Page], subjects: dict[str, str]) -> str:
    """Return an overview of the site for language models: the pages by part, each with its subject."""
    lines = [f"# {name}", "", f"> {description}"]
    part = None
    for page in pages:
        top = [*page.ancestors][-1].title if page.ancestors else None
        if top != part or page.is_homepage:
            part = top
            lines += ["", f"## {part or 'Start'}", ""]
        subject = re.sub(r"\[(.*?)\]\(.*?\)", r"\1", subjects.get(page.file.src_uri, ""))
        target = Path(page.file.dest_uri).with_suffix(".md").as_posix()
        lines.append(f"- [{page.title}]({target})" + (f": {subject}" if subject else ""))
    return "\n".join(lines) + "\n"
