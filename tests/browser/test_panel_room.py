"""The panel where there is little room and no mouse, and a mesh in the main area, where there is much."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.browser.lab import Lab
from tests.browser.panel import Panel

pytestmark = pytest.mark.slow

#: What sticks out of the panel, to the right or the left, or is cut without an ellipsis.
OUTSIDE = """panel => {
    const box = panel.getBoundingClientRect();
    const seen = [...panel.querySelectorAll('*')]
        .filter(each => each.checkVisibility() && !each.closest('canvas, svg'));
    const scrolls = each => { let at = each.parentElement;
        for (; at && at !== panel; at = at.parentElement) {
            if (/auto|scroll|hidden/.test(getComputedStyle(at).overflowX)) return true;
        }
        return false; };
    return seen.filter(each => {
        const own = each.getBoundingClientRect();
        return own.width && (own.right > box.right + 0.5 || own.left < box.left - 0.5) && !scrolls(each);
    }).map(each => `${each.className}: ${each.getBoundingClientRect().right - box.right} px, ${each.textContent}`);
}"""
#: What is cut off, though a person would press or read it whole.
CUT = """panel => [...panel.querySelectorAll('button, input, select')]
    .filter(each => each.checkVisibility() && each.tagName === 'BUTTON' && each.scrollWidth > each.clientWidth + 1
        && getComputedStyle(each).textOverflow !== 'ellipsis')
    .map(each => each.className + ': ' + each.textContent)"""
#: Where the focus is, and whether a person sees it there.
FOCUS = """() => {
    const at = document.activeElement, style = getComputedStyle(at);
    return {
        name: at.getAttribute('aria-label') || at.textContent.trim() || at.id || at.className,
        inside: !!at.closest('#monarch-kernel-meshes'),
        seen: style.outlineStyle !== 'none' && parseFloat(style.outlineWidth) > 0,
        role: at.closest('[role]')?.getAttribute('role') ?? '',
    };
}"""

LONG = "a_mesh_with_a_long_name_for_a_small_panel"


def set_width(lab: Lab, width: int) -> float:
    """Drag the edge of the side bar until it is so wide; how wide it then is."""
    panel = lab.page.locator("#monarch-kernel-meshes")
    for _ in range(2):
        box = panel.bounding_box()
        edge, middle = box["x"] + box["width"] + 1, box["y"] + 300
        lab.page.mouse.move(edge, middle)
        lab.page.mouse.down()
        lab.page.mouse.move(edge + width - box["width"], middle, steps=4)
        lab.page.mouse.up()
    return float(panel.bounding_box()["width"])


def focus(lab: Lab) -> dict[str, Any]:
    return dict(lab.page.evaluate(FOCUS))


def walk(lab: Lab) -> list[str]:
    """Press Tab through the whole panel, from its first control on; the names of what had the focus."""
    names: list[str] = []
    while (now := focus(lab))["inside"]:
        assert now["seen"], now
        names.append(now["name"])
        assert len(names) < 100
        lab.page.keyboard.press("Tab")
    return names


def test_all_fits_and_is_reached_without_a_mouse(lab: Lab, tmp_path: Path) -> None:
    lab.open(f"%mesh up {LONG} --procs 8\n%mesh up n --procs 2", f"%mesh kill {LONG} -r 3", "%%mesh\n1 / 0")
    panel = Panel(lab)
    panel.open()
    lab.run(0)
    panel.has_states(idle=2)
    panel.node.get_by_role("option", name=re.compile(LONG)).or_(
        panel.node.locator(".mk-MeshList-item").filter(has_text=LONG)
    ).first.click()
    panel.has_states(idle=8)
    lab.run(1)
    panel.has_states(dead=1, idle=7)
    panel.rank(2).click()
    sections = ["debug", "log", "stacks", "hang", "actors", "hosts", "jobs"]
    for name in sections:
        panel.section(name)
    panel.node.get_by_role("button", name="Bring up a mesh …").click()
    for width in (200, 250, 300):
        reached = set_width(lab, width)
        assert abs(reached - width) < 12, reached
        panel.picture(f"panel_{width}", tmp_path)
        assert panel.node.evaluate(OUTSIDE) == []
        assert panel.node.evaluate(CUT) == []
        assert panel.node.evaluate("panel => panel.scrollWidth - panel.clientWidth") <= 0

    # Escape closes the details; the keyboard then walks through all, in the order in which it stands there.
    panel.details().get_by_role("button", name="Close").focus()
    lab.page.keyboard.press("Escape")
    panel.details().wait_for(state="hidden")
    panel.node.get_by_role("button", name="Open this mesh in the main area").focus()
    lab.page.keyboard.press("Shift+Tab")
    lab.page.keyboard.press("Tab")  # the focus came by key, and so is visible
    names = walk(lab)
    tops = [name for name in names if name in ("Use", "Interrupt", "Log", "Stacks", "Hosts", "Bring up")]
    assert tops[0] in ("Use", "Interrupt") and len(tops) >= 4, names
    for name in sections:
        assert any(name.lower() in each.lower() for each in names if each), (name, names)

    # Sections open and close by Enter and by Space; ranks are walked by arrows, and opened by Enter.
    head = panel.node.locator("[data-section=hosts]")
    head.focus()
    for key, state in (("Enter", "false"), ("Space", "true")):
        lab.page.keyboard.press(key)
        assert head.get_attribute("aria-expanded") == state
    toolbar = panel.node.get_by_role("toolbar", name="Do with this mesh").locator("button")
    toolbar.first.focus()
    for _ in range(toolbar.count() - 1):
        lab.page.keyboard.press("ArrowRight")
    assert focus(lab)["name"] == "Insert as code"
    panel.node.locator(".mk-Card, .mk-Grid [tabindex='0']").first.focus()
    lab.page.keyboard.press("ArrowRight")
    lab.page.keyboard.press("Enter")
    panel.details().wait_for()
    lab.page.keyboard.press("Escape")
    panel.details().wait_for(state="hidden")


def test_debug_of_one_rank_is_cancelled(lab: Lab) -> None:
    work = (
        "%%mesh -a -o job\nimport os, subprocess\nsubprocess.run(['sh', '-c', 'until test -e go; do sleep 0.05; done'])"
    )
    lab.open("%mesh up --procs 2", f"{work}\nrank", "print(list(job.result(60).values()))")
    panel = Panel(lab)
    panel.open()
    lab.run(0)
    panel.has_states(idle=2)
    lab.run(1)
    panel.has_states(running=2)
    panel.rank(1).click()
    details = panel.details()
    details.get_by_role("button", name="Debug", exact=True).click()
    details.get_by_text("will stop at the next line of user code").wait_for()
    details.get_by_role("button", name="Do not stop").click()
    details.get_by_text("Rank 1 will not stop").wait_for()
    details.get_by_role("button", name="Debug", exact=True).wait_for()
    (lab.folder / "work" / "go").touch()
    assert "[0, 1]" in lab.run(2)
    panel.has_states(idle=2)


def test_a_mesh_in_the_main_area_with_plots_over_time(lab: Lab) -> None:
    loop = "import os, time\nstep = 0\nwhile not os.path.exists('go'):\n    step += 1 + rank\n    time.sleep(0.02)"
    lab.open("%mesh up --procs 3", f"%%mesh\n{loop}")
    panel = Panel(lab)
    panel.open()
    lab.run(0)
    panel.has_states(idle=3)
    panel.node.get_by_role("button", name="Open this mesh in the main area").press("Enter")
    view = lab.page.locator(".mk-MainView")
    view.wait_for()
    assert view.locator(".mk-Card").count() == 3
    charts = view.locator(".mk-Chart")
    for title, news in (("Memory (MB)", r"median \d"), ("Processor (%)", r"median \d")):
        charts.filter(has_text=title).filter(has_text=re.compile(news)).wait_for()
    lab.start(1)
    box = view.get_by_label("Draw an expression of ranks")
    box.fill("step")
    box.press("Enter")
    drawn = charts.filter(has_text=re.compile(r"step\s*median \d"))
    drawn.wait_for()
    lab.page.wait_for_function(
        "() => [...document.querySelectorAll('.mk-MainView .mk-Chart')]"
        ".every(each => !each.textContent.includes('no values'))"
    )
    (lab.folder / "work" / "go").touch()
    lab.done()
    view.get_by_role("button", name="Remove the plot of step").click()
    drawn.wait_for(state="detached")
    # The same mesh again is the same tab; it says so when the mesh has ended.
    panel.command("monarch-kernel:open")
    assert lab.page.locator(".mk-MainView").count() == 1
    panel.press("down")
    lab.page.locator(".jp-Dialog").get_by_role("button", name="Stop", exact=True).click()
    view.filter(has_text=re.compile("ended")).wait_for()
