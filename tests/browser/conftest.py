"""A page with JupyterLab; skipped, and said so, where there is no browser to drive."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.browser.lab import Lab, browser_path, server


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    """JupyterLab; what a failed test has left on the screen is in `lab.png` of its folder."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")
    pytest.importorskip("jupyterlab", reason="JupyterLab is not installed")
    try:
        path = browser_path()
    except LookupError as error:
        pytest.skip(str(error))
    with server(tmp_path) as url, sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-dev-shm-usage"])
        try:
            page = browser.new_page(viewport={"width": 1400, "height": 1000})
            try:
                yield Lab(page, url, tmp_path)
            finally:
                page.screenshot(path=str(tmp_path / "lab.png"))
        finally:
            browser.close()
