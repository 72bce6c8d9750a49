"""Words for what a person does with the panel of meshes, and sees in it."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from tests.browser.lab import Lab

#: The width of a side bar as JupyterLab opens it (CSS pixels).
SIDEBAR = 250


class Panel:
    """The panel in a page of JupyterLab or Notebook.

    Args:
        lab: the page.
    """

    def __init__(self, lab: Lab) -> None:
        self._lab = lab
        self.page: Any = lab.page
        self.node: Any = lab.page.locator("#monarch-kernel-meshes")

    def open(self) -> None:
        """Bring it to the front."""
        self.command("monarch-kernel:show")
        self.node.wait_for()

    def command(self, name: str) -> None:
        """Execute a command, as the palette does."""
        self.page.evaluate("name => window.jupyterapp.commands.execute(name)", name)

    def says(self, pattern: str) -> None:
        """Wait until it shows such a text."""
        self.node.filter(has_text=re.compile(pattern)).wait_for()

    def press(self, deed: str) -> None:
        """Press the button of a deed for the whole mesh."""
        self.node.locator(f".mk-Bar [data-deed={deed}]").click()

    def has_states(self, **counts: int) -> None:
        """Wait until so many cards show these states."""
        self.page.wait_for_function(
            """counts => Object.entries(counts).every(([state, count]) =>
                document.querySelectorAll(`#monarch-kernel-meshes .mk-Card[data-state=${state}]`).length === count)""",
            arg=counts,
        )

    def rank(self, rank: int) -> Any:
        """The card of a rank."""
        return self.node.locator(".mk-Card").nth(rank)

    def details(self) -> Any:
        """The details of the rank that is chosen."""
        return self.node.locator(".mk-Details")

    def section(self, name: str) -> Any:
        """Open a section, if it is closed; its content."""
        head = self.node.locator(f"[data-section={name}]")
        head.wait_for()
        if head.get_attribute("aria-expanded") != "true":
            head.click()
        return head.locator("xpath=following-sibling::div")

    def status(self, pattern: str) -> None:
        """Wait until the item of the status bar reads so."""
        self.page.locator(".mk-Status").filter(has_text=re.compile(pattern)).wait_for()

    def picture(self, name: str, folder: Path) -> None:
        """Save what the panel looks like: among the test's files, or in the folder that TEST_PICTURES names."""
        self.page.mouse.move(700, 600)  # no tooltip, nothing hovered
        target = Path(os.environ.get("TEST_PICTURES") or folder)
        box = self.node.bounding_box()
        bottom = self.node.evaluate(
            """panel => Math.max(...[...panel.querySelectorAll('button, input, .mk-Kept')]
                .filter(each => each.offsetParent)
                .map(each => each.getBoundingClientRect().bottom))"""
        )
        clip = {**box, "height": min(box["height"], bottom - box["y"] + 16)}
        self.page.screenshot(path=str(target / f"{name}.png"), clip=clip, animations="disabled")

    def theme(self, name: str) -> None:
        """Choose a theme of JupyterLab, and wait until it is there."""
        self.page.evaluate(
            "theme => window.jupyterapp.commands.execute('apputils:change-theme', {theme})", f"JupyterLab {name}"
        )
        self.page.wait_for_function("name => document.body.dataset.jpThemeName === name", arg=f"JupyterLab {name}")
