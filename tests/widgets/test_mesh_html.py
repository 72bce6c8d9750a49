"""The HTML of a mesh: it tells the state by itself, from one rank to thousands. Parsed, as a browser would."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from typing import Any

import pytest

from monarch_kernel.display.tables import STATE_COLOURS
from monarch_kernel.watch.model import HostView, MeshView, RankState, RankView, Snapshot, StopView
from monarch_kernel.widgets.mesh_display import MOST_HOSTS, mesh_html, meshes_html

NOW = 1_000.0


def snapshot(size: int, hosts: int = 1, **special: RankView) -> Snapshot:
    """A mesh `m` whose ranks are idle, except for those that are given as r3=..."""
    per = size // hosts
    ranks = [
        special.get(f"r{rank}", RankView("u", rank, f"h{rank // per}", f"u.{rank}", 100 + rank, RankState.IDLE))
        for rank in range(size)
    ]
    named = {f"h{at}": HostView(f"h{at}", f"node{at}") for at in range(hosts)}
    mesh = MeshView("u", "m", ("hosts", "gpus"), (hosts, per), tuple(named), current=True)
    return Snapshot(1, NOW, {"u": mesh}, named, {"u": tuple(ranks)}, ())


def rank(number: int, state: RankState, host: str = "h0", **fields: Any) -> RankView:
    return RankView("u", number, host, f"u.{number}", 100 + number, state, **fields)


class Balance(HTMLParser):
    """Fails unless each element that opens closes, in order, and none is a script."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self._open: list[str] = []
        self.feed(html)
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag != "script"
        assert not any(name.startswith("on") for name, _ in attrs)
        if tag not in ("path", "rect", "line", "circle") or self.get_starttag_text()[-2] != "/":
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag != "script"

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag


@pytest.mark.parametrize("size, hosts", [(1, 1), (8, 1), (64, 8), (256, 32), (1024, 16), (4096, 512)])
def test_it_is_well_formed_and_bounded(size: int, hosts: int) -> None:
    html = mesh_html(snapshot(size, hosts), "u", NOW)
    Balance(html)
    assert f"{size:,} idle" in html
    assert len(html) < 120_000


def test_bad_news_come_first_with_their_causes() -> None:
    html = mesh_html(
        snapshot(
            8,
            r1=rank(1, RankState.UNRESPONSIVE, cause="holds the interpreter lock"),
            r3=rank(3, RankState.DEAD, cause="killed by <SIGKILL>"),
            r4=rank(4, RankState.DEAD, cause="killed by <SIGKILL>"),
            r5=rank(5, RankState.STOPPED, stop=StopView("breakpoint", "train.py", 42, "step")),
            r6=rank(6, RankState.RUNNING, doing="cell [7], line 3"),
        ),
        "u",
        NOW,
    )
    said = re.sub("<[^>]+>", " ", html)
    dead = said.index("ranks 3-4  dead: killed by &lt;SIGKILL&gt;")
    silent = said.index("rank 1  unresponsive: holds the interpreter lock")
    stopped = said.index("rank 5  stopped: train.py:42 in step (breakpoint)")
    assert dead < silent < stopped
    assert html.index("2 dead") < html.index("1 running") < html.index("3 idle")


def test_each_state_has_a_shape_of_its_own() -> None:
    shapes = {}
    for state in RankState:
        html = mesh_html(snapshot(1, r0=rank(0, state)), "u", NOW)
        icon = html[html.index("<svg") : html.index("</svg>")]
        shapes[state] = icon.replace(STATE_COLOURS[state.value], "")
    assert len(set(shapes.values())) == len(RankState)


def test_a_rank_of_an_older_tree_has_a_mark() -> None:
    plain = mesh_html(snapshot(2), "u", NOW)
    marked = mesh_html(snapshot(2, r1=rank(1, RankState.IDLE, older=True)), "u", NOW)
    assert marked.count("<path") == plain.count("<path") + 1
    assert "older tree" in marked


def test_one_dead_rank_of_thousands_is_named_and_seen() -> None:
    html = mesh_html(snapshot(4096, 512, r4000=rank(4000, RankState.DEAD, "h500", cause="lost")), "u", NOW)
    assert "<b>rank 4000</b> dead: lost" in html
    assert "node500" in html  # though most hosts are left out
    assert html.count("role=") <= MOST_HOSTS + 1
    assert f"{512 - MOST_HOSTS} more hosts: 3,712 idle" in html


def test_a_lost_host_and_a_hang_are_told() -> None:
    seen = snapshot(4, 2)
    hosts = {**seen.hosts, "h1": HostView("h1", "node1", gone="no heartbeat for 3 s")}
    mesh = MeshView("u", "m", ("hosts", "gpus"), (2, 2), ("h0", "h1"), hang="rank 1 skipped all_reduce")
    html = mesh_html(Snapshot(1, NOW, {"u": mesh}, hosts, seen.ranks, ()), "u", NOW)
    assert "host node1 is gone: no heartbeat for 3 s" in html
    assert "rank 1 skipped all_reduce" in html


def test_meshes_that_are_gone_are_left_out() -> None:
    assert meshes_html(snapshot(1), NOW, ["other"]) == ""
    assert meshes_html(snapshot(1), NOW).count("mesh m") == 1
