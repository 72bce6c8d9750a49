"""The views in a real browser, with a simulated kernel: what is drawn, what moves, and what keys do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from bench.views_page.browser import shown

#: Where things are that must not move, and how large, in whole pixels: digits differ by 1/64 of one.
BOXES = """() => [...document.querySelectorAll(
    '.mk-News-headline, .mk-News-strip, .mk-Legend-chip, .mk-Legend-name, .mk-Grid, .mk-Cells-space, .mk-Card'
)].map(node => {
    const { x, y, width, height } = node.getBoundingClientRect()
    return [node.className, ...[x, y, width, height].map(Math.round)]
})"""
#: The colours (RGBA) in the middle of the cells of some ranks; the canvas has the size of what is in view.
PIXELS = """ranks => {
    const canvas = document.querySelector('.mk-Cells-canvas')
    const ratio = canvas.width / canvas.clientWidth
    const area = document.querySelector('.mk-Cells')
    const boxes = ranks.map(rank => bench.opened().board._grid._canvas._layout.box(rank))
    return boxes.map(({x, y, width, height}) => [...canvas.getContext('2d').getImageData(
        Math.round(x * ratio), Math.round((y - area.scrollTop) * ratio),
        Math.round(width * ratio), Math.round(height * ratio)).data].join())
}"""


@pytest.fixture(scope="module")
def page(browser: Any) -> Iterator[Any]:
    """The page; each test shows what it needs."""
    try:
        with shown(browser) as made:
            yield made
    except LookupError as error:
        pytest.skip(str(error))


@pytest.fixture(autouse=True)
def wide(page: Any) -> None:
    """The page as wide as a notebook, with the pointer outside of what is shown."""
    page.set_viewport_size({"width": 900, "height": 900})
    page.mouse.move(899, 899)


def show(page: Any, ranks: int, hosts: int, troubled: bool = True) -> None:
    page.evaluate(f"() => bench.show({ranks}, {hosts}, {str(troubled).lower()})")
    frames(page)


def frames(page: Any) -> None:
    """After two frames all that was told is drawn."""
    page.evaluate("() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")


def test_each_state_has_a_picture_of_its_own(page: Any) -> None:
    show(page, 256, 32)
    # Running, idle with older modules, idle, dead, unresponsive, stopped, healing, starting, ended.
    drawn = page.evaluate(PIXELS, [0, 1, 2, 3, 5, 6, 9, 10, 11])
    assert len(set(drawn)) == len(drawn)


def test_a_death_is_drawn_at_once_and_nothing_else_changes(page: Any) -> None:
    show(page, 256, 32)
    others = [20, 22, 100, 255]
    before = page.evaluate(PIXELS, [21, 3, *others])
    page.evaluate("() => { const { kernel, client } = bench.opened(); client.receive(kernel.kill(21)) }")
    frames(page)
    after = page.evaluate(PIXELS, [21, 3, *others])
    assert before[0] != after[0]
    assert after[0] == after[1]  # as the rank that was dead before
    assert before[1:] == after[1:]


@pytest.mark.parametrize(("ranks", "hosts"), [(8, 1), (16, 2), (64, 8), (1024, 128), (4096, 512)])
@pytest.mark.parametrize("width", [300, 900])
def test_nothing_moves_while_ranks_change(page: Any, ranks: int, hosts: int, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    show(page, ranks, hosts)
    before = page.evaluate(BOXES)
    for _ in range(10):
        page.evaluate("() => { const { kernel, client } = bench.opened(); client.receive(kernel.change(0.5)) }")
        frames(page)
        assert page.evaluate(BOXES) == before


@pytest.mark.parametrize(("ranks", "hosts"), [(1, 1), (8, 1), (16, 16), (64, 8), (256, 1), (1024, 128), (4096, 1)])
@pytest.mark.parametrize("width", [260, 300, 900])
def test_nothing_is_wider_than_the_view(page: Any, ranks: int, hosts: int, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    show(page, ranks, hosts)
    page.evaluate("() => bench.opened().board.select(0)")
    frames(page)
    assert page.evaluate("() => document.documentElement.scrollWidth") <= width
    over = page.evaluate(
        """() => { const board = document.querySelector('.mk-Board').getBoundingClientRect()
        return [...document.querySelectorAll('.mk-Board button:not(.mk-Tab), .mk-Board canvas, .mk-Legend-count')]
            .filter(node => node.getBoundingClientRect().right > board.right + 1).map(node => node.className) }"""
    )
    assert over == []


def test_cells_that_are_scrolled_to_are_those_that_are_drawn_and_pointed_at(page: Any) -> None:
    show(page, 4096, 1)
    area = page.locator(".mk-Cells")
    area.evaluate("node => { node.scrollTop = 300 }")
    frames(page)
    box = area.bounding_box()
    page.mouse.move(box["x"] + 200, box["y"] + 200)
    title = page.locator(".mk-Tooltip-title").text_content()
    rank = int(title.split()[1])
    state = title.split(" · ")[1]
    assert rank > 1000
    known = page.evaluate(f"() => bench.opened().client.store.rank('m1', {rank}).state")
    assert state == known
    same = page.evaluate(
        """([rank, state]) => bench.opened().client.store.ranks('m1').find(
            each => each.state === state && each.rank > rank && each.rank < rank + 300 && !each.older).rank""",
        [rank, state],
    )
    drawn = page.evaluate(PIXELS, [rank, same])
    assert drawn[0] == drawn[1]


def test_all_is_done_by_keys(page: Any) -> None:
    show(page, 1024, 128)
    page.locator(".mk-Modes button").last.focus()
    page.keyboard.press("Tab")
    focused = "() => document.activeElement.getAttribute('aria-label')"
    assert page.evaluate(focused).startswith("gpu-node-101: 1 dead")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    assert page.locator(".mk-Grid-place").text_content() == "gpu-node-102"
    page.keyboard.press("ArrowRight")
    assert page.evaluate(focused).startswith("rank 9, healing")
    page.keyboard.press("Enter")
    details = page.locator(".mk-Details")
    assert details.is_visible()
    details.get_by_role("tab", name="Overview").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    page.get_by_text("waits in all_reduce").wait_for()
    page.keyboard.press("Escape")
    assert details.is_hidden()


def test_colours_follow_the_page(page: Any) -> None:
    show(page, 64, 8)
    before = page.evaluate(PIXELS, [3, 0])
    page.evaluate("() => document.body.classList.add('dark')")
    try:
        page.locator(".mk-Board[data-mk-theme=dark]").wait_for()
        frames(page)
        after = page.evaluate(PIXELS, [3, 0])
        assert before[0] != after[0]
        assert before[1] != after[1]
    finally:
        page.evaluate("() => document.body.classList.remove('dark')")
    page.locator(".mk-Board[data-mk-theme=light]").wait_for()


def test_a_log_of_any_length_has_few_lines_in_the_page_and_stays_where_it_is_read(page: Any) -> None:
    page.evaluate("() => bench.log(100000)")
    frames(page)
    lines = page.locator(".mk-Log-line")
    assert lines.count() < 100
    scroll = page.locator(".mk-Log-scroll")
    follow = page.get_by_role("button", name="Follow")
    assert follow.get_attribute("aria-pressed") == "true"
    scroll.evaluate("node => { node.scrollTop = 18 * 5000 }")
    frames(page)
    assert follow.get_attribute("aria-pressed") == "false"
    read = "() => document.elementFromPoint(100, 300).closest('.mk-Log-line').textContent"
    before = page.evaluate(read)
    assert page.evaluate("() => document.querySelectorAll('.mk-Log-line').length") < 100
    follow.click()
    frames(page)
    assert page.evaluate(read) != before
    end = "node => node.scrollHeight - node.scrollTop - node.clientHeight"
    assert scroll.evaluate(end) <= 1
