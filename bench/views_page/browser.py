"""Open the page of the views in Chromium: measure it, and take pictures of it.

``python -m bench.views_page.browser --pictures FOLDER`` writes pictures of all sizes and themes, to look at.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.browser.lab import browser_path

HERE = Path(__file__).resolve().parent
LABEXTENSION = HERE.parents[1] / "labextension"
#: The duration of the scrolling measurement (seconds).
SCROLLED = 4.0


def build(folder: Path) -> None:
    """Bundle the page into a folder.

    Raises:
        LookupError: the packages of ``labextension`` are not installed.
    """
    esbuild = LABEXTENSION / "node_modules" / ".bin" / "esbuild"
    if not esbuild.exists():
        raise LookupError("the views are built by esbuild: run `npm ci` in labextension first")
    shutil.copy(HERE / "page.html", folder)
    subprocess.run(
        [
            *(str(esbuild), str(HERE / "page.ts"), "--bundle", "--format=iife", "--target=es2022"),
            *("--loader:.css=text", "--log-level=warning", f"--outfile={folder / 'page.js'}"),
        ],
        check=True,
    )


@contextmanager
def opened(width: int = 900, height: int = 900, scale: float = 1, dark: bool = False) -> Generator[Any]:
    """Open the page with the views in a separate browser; yield playwright's page."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path(), args=["--no-sandbox"])
        with shown(browser, width, height, scale, dark) as page:
            yield page
        browser.close()


@contextmanager
def shown(browser: Any, width: int = 900, height: int = 900, scale: float = 1, dark: bool = False) -> Generator[Any]:
    """Open the page with the views in a browser; yield playwright's page."""
    with tempfile.TemporaryDirectory() as folder:
        build(Path(folder))
        page = browser.new_page(
            viewport={"width": width, "height": height},
            device_scale_factor=scale,
            color_scheme="dark" if dark else "light",
        )
        page.goto((Path(folder) / "page.html").as_uri())
        page.wait_for_function("() => window.bench")
        if dark:
            page.evaluate("() => document.body.classList.add('dark')")
        yield page
        page.close()


def measure(ranks: int, hosts: int = 0, rounds: int = 5) -> dict[str, float]:
    """Measure the costs of a mesh of this size in the browser.

    Args:
        ranks: the number of ranks of the mesh.
        hosts: the number of their hosts; 0: eight ranks on each.
        rounds: the number of rounds; figures of single events are medians over them.

    Returns:
        ``first_paint``, ``change_paint`` (ms, from the message to the picture), ``change_cost`` (ms of the main thread
        for a message that changes 2 % of the ranks), ``frame_median``, ``frame_p95``, ``frame_worst`` (ms, while all
        cells scroll and 2 % of the ranks change five times a second), ``frames_late`` (the share of frames of more
        than 25 ms) and ``frame_idle`` (ms, the median of a page where nothing scrolls: what this machine can do).
    """
    hosts = hosts or max(1, ranks // 8)
    with opened() as page:
        paints = sorted(page.evaluate(f"() => bench.firstPaint({ranks}, {hosts})") for _ in range(rounds))
        changes = sorted(page.evaluate("() => bench.changePaint()") for _ in range(rounds))
        cost = page.evaluate("() => bench.changeCost(50, 0.02)")
        _show_cells(page)
        idle = sorted(page.evaluate("() => bench.scroll(1, 0, 'body')"))
        frames = sorted(page.evaluate(f"() => bench.scroll({SCROLLED}, 0.02)"))
    return {
        "first_paint": paints[rounds // 2],
        "change_paint": changes[rounds // 2],
        "change_cost": cost,
        "frame_median": frames[len(frames) // 2],
        "frame_p95": frames[int(len(frames) * 0.95)],
        "frame_worst": frames[-1],
        "frames_late": sum(frame > 25 for frame in frames) / len(frames),
        "frame_idle": idle[len(idle) // 2],
    }


def _show_cells(page: Any) -> None:
    cells = page.get_by_role("button", name="Ranks", exact=True)
    if cells.is_visible():
        cells.click()


def pictures(folder: Path) -> None:
    """Take pictures of the views at many sizes, in both themes, as PNG files in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    sizes = [(1, 1), (8, 1), (16, 16), (16, 2), (64, 8), (256, 32), (256, 1), (1024, 128), (4096, 512), (4096, 1)]
    for dark in (False, True):
        theme = "dark" if dark else "light"
        for width, scale in ((300, 1.0), (900, 1.0), (450, 2.0)):
            with opened(width=width, height=760, scale=scale, dark=dark) as page:
                for ranks, hosts in sizes:
                    page.evaluate(f"() => bench.show({ranks}, {hosts})")
                    page.wait_for_timeout(100)
                    page.screenshot(path=folder / f"{ranks}x{hosts}-{width}-{theme}.png")
                page.evaluate("() => { bench.show(64, 8); bench.opened().board.select(6) }")
                page.wait_for_timeout(100)
                page.screenshot(path=folder / f"details-{width}-{theme}.png", full_page=True)
                page.get_by_role("button", name="Kill", exact=True).click()
                for tab in ("Stack", "Log", "Variables"):
                    page.get_by_role("tab", name=tab).click()
                    page.wait_for_timeout(150)
                    page.screenshot(path=folder / f"details-{tab.lower()}-{width}-{theme}.png", full_page=True)
                page.evaluate("() => { bench.show(1024, 128) }")
                page.locator(".mk-News-more").click()
                _show_cells(page)
                page.mouse.move(160, 420)
                page.wait_for_timeout(100)
                page.screenshot(path=folder / f"hover-{width}-{theme}.png")
                page.evaluate("() => bench.opened().client.close()")
                page.screenshot(path=folder / f"gone-{width}-{theme}.png")
                for name, call in {
                    "chart-8": "chart(8, 300)",
                    "chart-64": "chart(64, 300)",
                    "chart-512": "chart(512, 300)",
                    "log": "log(100000)",
                    "hosts": "hosts(16)",
                }.items():
                    page.evaluate(f"() => bench.{call}")
                    page.wait_for_timeout(150)
                    page.screenshot(path=folder / f"{name}-{width}-{theme}.png")


def main() -> None:
    """Measure, or take pictures with ``--pictures``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pictures", type=Path, help="the folder for PNG files")
    parser.add_argument("--ranks", type=int, nargs="*", default=[1000, 4096])
    args = parser.parse_args()
    if args.pictures:
        pictures(args.pictures)
        return
    for ranks in args.ranks:
        print(ranks, {name: round(value, 2) for name, value in measure(ranks).items()})


if __name__ == "__main__":
    main()
