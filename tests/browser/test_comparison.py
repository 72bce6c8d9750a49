"""The grid of a comparison in a cell of JupyterLab: its cells, by pointer and by keys, in both themes."""

from __future__ import annotations

import re

import pytest

from tests.browser.lab import Lab
from tests.browser.panel import Panel
from tests.browser.test_accessibility import AXE, findings

RECORD = """
import os, torch
from monarch_kernel.numerics import record

def train(name, factor=1.0):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    right = net[0].forward
    net[0].forward = lambda x: right(x) * factor
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with record(name, net, optimizer, steps=2, folder=os.path.abspath(name)):
        for step in range(2):
            optimizer.zero_grad()
            net(torch.ones(3, 4)).square().mean().backward()
            optimizer.step()

train("right")
train("wrong", 2.0)
"""
COMPARE = "found = %mesh compare ./right ./wrong\nfound"


@pytest.mark.torch
def test_the_grid_of_a_comparison_is_read_by_pointer_and_keys_in_both_themes(lab: Lab) -> None:
    lab.open(RECORD, COMPARE)
    lab.run(0)
    lab.run(1)
    view = lab.cell(1).locator(".mk-Comparison")
    view.wait_for()
    first = view.locator(".mk-Comparison-cell[data-first]")
    assert first.count() == 1
    label = first.get_attribute("aria-label") or ""
    assert re.match(r"0, step 0: .* × tolerance, the first wrong tensor", label), label
    details = view.locator(".mk-Comparison-details")
    assert details.is_hidden()
    first.click()
    details.wait_for()
    wrong = details.locator("tr[data-wrong]").first.locator("td")
    phase, tensor, _ranks, line, _ratio, guess = wrong.all_inner_texts()
    assert (phase, tensor) == ("forward", "output of 0"), details.inner_text()
    assert re.search(r":\d+$", line), line
    assert "every element is 2 times that of the reference" in guess
    # By keys: Escape closes; the arrows move to the second step, Enter opens it.
    lab.page.keyboard.press("Escape")
    details.wait_for(state="hidden")
    lab.page.keyboard.press("ArrowRight")
    lab.page.keyboard.press("Enter")
    details.get_by_text("0, step 1", exact=True).wait_for()
    colours: dict[str, str] = {}
    panel = Panel(lab)
    try:
        for theme in ("Light", "Dark"):
            panel.theme(theme)
            view.and_(lab.page.locator(f"[data-mk-theme={theme.lower()}]")).wait_for()
            colours[theme] = first.evaluate("node => getComputedStyle(node).backgroundColor")
            if AXE.is_file():
                assert findings(lab.page, ".mk-Comparison") == [], theme
    finally:
        panel.theme("Light")
    assert colours["Light"] != colours["Dark"]


@pytest.mark.torch
def test_a_saved_comparison_is_html_where_its_kernel_has_gone(lab: Lab) -> None:
    lab.open(RECORD, COMPARE)
    lab.run(0)
    lab.run(1)
    lab.cell(1).locator(".mk-Comparison").wait_for()
    lab.save()
    lab.end_kernel()
    html = lab.cell(1).locator(".jp-RenderedHTML")
    html.filter(has_text=re.compile(r"modules × steps")).wait_for()
    assert lab.cell(1).locator(".mk-Comparison").count() == 0
    assert html.locator("td[title*='the first wrong tensor']").count() == 1
