"""A page with JupyterLab; skipped, and said so, where there is no browser to drive.

All tests of a batch share a server and a page with JupyterLab, which cost more to start than most tests do. What a test
has open there is closed after it; after one that has failed, the next one has a new page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser.lab import Lab, Server, browser_path


@pytest.fixture(scope="session")
def chromium(checked_session: None) -> Iterator[Callable[..., Any]]:
    """Starts Chromium, as playwright has it: ``chromium("launch")``, or another of its methods with more arguments."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")
    try:
        path = browser_path()
    except LookupError as error:
        pytest.skip(str(error))
    arguments = {"executable_path": path, "args": ["--no-sandbox", "--disable-dev-shm-usage"]}
    with sync_api.sync_playwright() as playwright:
        yield lambda how, *args, **options: getattr(playwright.chromium, how)(*args, **arguments, **options)


@pytest.fixture(scope="session")
def browser(chromium: Callable[..., Any]) -> Iterator[Any]:
    """A browser that keeps nothing from page to page."""
    browser = chromium("launch")
    yield browser
    browser.close()


@pytest.fixture(scope="session")
def profile(chromium: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A browser with a folder for what it keeps: the pages of such a one alone find scripts that are compiled."""
    folder = tmp_path_factory.mktemp("profile")
    profile = chromium("launch_persistent_context", folder, viewport={"width": 1400, "height": 1000})
    yield profile
    profile.close()


@pytest.fixture(scope="session")
def server(checked_session: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """JupyterLab's server."""
    pytest.importorskip("jupyterlab", reason="JupyterLab is not installed")
    with Server(tmp_path_factory.mktemp("lab")) as started:
        yield started


@pytest.fixture
def lab(request: pytest.FixtureRequest, profile: Any, server: Server, tmp_path: Path) -> Iterator[Lab]:
    """JupyterLab, with nothing open; what a failed test has left on the screen is in `lab.png` of its folder."""
    server.empty()
    page, failed = profile.pages[-1], request.session.testsfailed
    lab = Lab(page, server)
    yield lab
    if request.session.testsfailed == failed:
        lab.clear()
        return
    page.screenshot(path=str(tmp_path / "lab.png"))
    profile.new_page()
    page.close()
    server.end_kernels()
