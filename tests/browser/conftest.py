"""A page with JupyterLab; skipped, and said so, where there is no browser to drive.

All tests of a batch share a browser and a server, which cost more to start than most tests do; what a test has left
with either is removed before the next one.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser.lab import Lab, Server, browser_path


@pytest.fixture(scope="session")
def browser(checked_session: None) -> Iterator[Any]:
    """Chromium, as playwright has it."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")
    try:
        path = browser_path()
    except LookupError as error:
        pytest.skip(str(error))
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def server(checked_session: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """JupyterLab's server."""
    pytest.importorskip("jupyterlab", reason="JupyterLab is not installed")
    with Server(tmp_path_factory.mktemp("lab")) as started:
        yield started


@pytest.fixture
def lab(browser: Any, server: Server, tmp_path: Path) -> Iterator[Lab]:
    """JupyterLab; what a failed test has left on the screen is in `lab.png` of its folder."""
    server.empty()
    page = browser.new_page(viewport={"width": 1400, "height": 1000})
    try:
        yield Lab(page, server)
    finally:
        page.screenshot(path=str(tmp_path / "lab.png"))
        page.close()
        server.end_kernels()
