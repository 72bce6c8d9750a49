"""The documentation as a site: it builds without a warning, its links lead somewhere, and its search finds the pages.

The search is the site's own, in a browser: the index that was built, and the ranking that a reader gets.
"""

from __future__ import annotations

import functools
import http.server
import subprocess
import sys
import threading
import urllib.parse
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tests.browser.test_accessibility import AXE, findings
from tests.waiting import patience

ROOT = Path(__file__).resolve().parents[2]

#: What a user types, and the page that must come first (of several, one of them).
QUESTIONS = {
    "rank hangs": "hang",
    "job is stuck": "hang",
    "loss is nan": "nan",
    "torchrun": "torchrun",
    "join a running job": "join",
    "vscode": "vscode",
    "marimo": "other_notebooks",
    "colab": "other_notebooks",
    "jupyterhub": "jupyterhub",
    "install without internet": "air_gapped",
    "slurm": "slurm",
    "kubernetes pods": "kubernetes",
    "ray cluster": "ray",
    "hosts by ssh": "ssh",
    "lightning studio": "lightning tutorials/10_lightning_studio",
    "skypilot": "sky",
    "environment variables": "configuration",
    "MONARCH_KERNEL_KEY_FILE": "configuration",
    "prometheus metrics": "telemetry metrics",
    "opentelemetry": "telemetry",
    "history sql": "telemetry",
    "fsdp": "training tutorials/11_titan",
    "snapshot checkpoint": "training",
    "training continues when a rank dies": "fault_tolerance tutorials/04_fault_tolerance",
    "kept mesh": "magics reliability",
    "rdma": "rdma",
    "infiniband": "rdma",
    "revoke key": "security",
    "trust model": "security",
    "sync workspace": "sync tutorials/07_workspace_sync",
    "conda environment": "sync",
    "breakpoint on all ranks": "debugging join",
    "slow rank straggler": "debugging hang",
    "read unprepared process": "look",
    "panel": "panel",
    "options of mesh up": "magic_options",
    "monarch-kernel worker": "commands",
    "ValueMesh": "api/actor",
    "sharded tensor": "sharded",
    "replay compile": "replay",
    "write a launcher": "launchers",
    "benchmark": "performance",
    "H100": "gpu",
    "differences from monarch": "engines",
    "start worker on several hosts": "hosts",
    "glossary": "architecture",
}
#: Keeps what is asked and answered: the search runs in a worker of the page.
LISTEN = """
const Real = window.Worker;
window.asked = [];
window.answers = [];
window.Worker = class extends Real {
    constructor(...given) {
        super(...given);
        this.addEventListener("message", ({data}) => { if (data.type === 3) window.answers.push(data.data) });
    }
    postMessage(message, ...more) {
        if (message.type === 2) window.asked.push(message.data);
        super.postMessage(message, ...more);
    }
};
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built."""
    pytest.importorskip("mkdocs", reason="mkdocs is not installed: make docs installs it")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", "website/mkdocs.yml"]
    done = subprocess.run(
        [*command, "--site-dir", folder], cwd=ROOT, capture_output=True, text=True, timeout=patience(120)
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def served(site: Path) -> Iterator[str]:
    """The site, served; its address."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site))) as server:
        server.socket.setblocking(False)  # a connection that was reset before it is accepted must not block the loop
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


class Targets(HTMLParser):
    """Collects what a page links to, what it loads, and the anchors that it has."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.loaded: set[str] = set()
        self.anchors: set[str] = set()
        self.feed(page.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value for name, value in attrs if value is not None}
        self.anchors.update(given[name] for name in ("id", "name") if name in given)
        for name in ("href", "src"):
            if name in given:
                is_link = tag == "a" or (tag == "link" and given.get("rel") in ("canonical", "prev", "next"))
                (self.links if is_link else self.loaded).add(given[name])


def test_no_link_is_dead_and_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    pages = {page: Targets(page) for page in site.rglob("*.html") if page.name != "404.html"}
    dead: list[str] = []
    for page, targets in pages.items():
        for link in targets.links | targets.loaded:
            address = urllib.parse.urlsplit(link)
            if address.scheme or address.netloc:
                assert link not in targets.loaded or address.scheme == "data", f"{page.name} loads {link}"
                continue
            path = urllib.parse.unquote(address.path)
            target = (page.parent / path).resolve() if path else page
            target = target / "index.html" if target.is_dir() else target
            anchor = urllib.parse.unquote(address.fragment)
            is_there = target.exists() and (not anchor or target not in pages or anchor in pages[target].anchors)
            if not is_there and not anchor.startswith("__"):
                dead.append(f"{page.relative_to(site)}: {link}")
    assert not dead, dead


def test_every_page_is_for_language_models_too(site: Path) -> None:
    overview = (site / "llms.txt").read_text()
    listed = {part.partition(")")[0] for part in overview.split("](")[1:]}
    assert listed == {str(page.relative_to(site)) for page in site.rglob("*.md")}
    assert len(listed) > 50
    assert all((site / name).with_suffix(".html").is_file() for name in listed)


def test_the_reference_has_every_option_and_every_public_name(site: Path) -> None:
    options, api = (site / "magic_options.md").read_text(), (site / "api" / "actor.html").read_text()
    for option in ("--when-differs EXPR", "--dist {gloo,nccl}", "--at-step"):
        assert option in options
    assert (
        'id="monarch_kernel.runtime.actor.meshes.proc_mesh.ProcMesh"' in api
        or 'id="monarch_kernel.actor.ProcMesh"' in api
    )
    assert "monarch_call_seconds" in (site / "metrics.md").read_text()


def test_recorded_outputs_are_on_the_pages_of_notebooks(site: Path) -> None:
    page = (site / "tutorials" / "01_quickstart.html").read_text()
    assert "The outputs are those of its last recorded run" in page or "has changed since" in page
    assert "%%mesh" in page


def test_its_search_finds_the_page_for_each_question(served: str, browser: Any) -> None:
    page = browser.new_page()
    page.set_default_timeout(patience(30_000))
    page.add_init_script(LISTEN)
    page.goto(f"{served}/index.html")
    box = page.locator("[data-md-component=search-query]")
    box.click()
    found: dict[str, list[str]] = {}
    for question in QUESTIONS:
        box.fill(question)
        box.press("End")  # the page listens to keys
        page.wait_for_function(
            "text => window.asked.at(-1) === text && window.answers.length === window.asked.length", arg=question
        )
        items = page.evaluate("() => window.answers.at(-1).items.map(each => each[0].location)")
        found[question] = [each.partition("#")[0].removesuffix(".html") for each in items]
    page.close()
    wrong = {
        question: found[question][:3] for question, wanted in QUESTIONS.items() if not first_of(found[question], wanted)
    }
    assert not wrong, wrong
    assert len(QUESTIONS) >= 40


def first_of(pages: list[str], wanted: str) -> bool:
    """Whether the first page is one of those that are wanted."""
    return bool(pages) and pages[0] in wanted.split()


@pytest.mark.skipif(not AXE.is_file(), reason="axe-core is not installed: npm --prefix labextension ci")
def test_nothing_serious_is_found_in_its_pages_in_both_themes(served: str, browser: Any) -> None:
    colours: set[str] = set()
    found: dict[str, list[str]] = {}
    for scheme in ("light", "dark"):
        page = browser.new_page(color_scheme=scheme)
        for name in ("index", "hang", "magic_options", "tutorials/05_debugging", "api/actor"):
            page.goto(f"{served}/{name}.html")
            colours.add(page.evaluate("() => getComputedStyle(document.body).backgroundColor"))
            found[f"{name}, {scheme}"] = findings(page, "body")
        page.close()
    assert len(colours) == 2, "both themes look alike"
    assert not any(found.values()), found
